"""A registry of checks for tasks that may still run when their channel closes. The program's framework adds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..documents import workitem

__all__ = ['may_run', 'register']

#: A function that tells, for the id of a task, whether this process may be running it.
Check = Callable[[str], bool]

_checks: list[Check] = []


def register(check: Check) -> None:
    """Ask `check` about messages with the id of a task. Any thread may call it."""
    if check not in _checks:
        _checks.append(check)


def may_run(doc: Mapping[str, Any]) -> bool:
    """Tell whether this process may be working on a message that it has received; True if nobody knows."""
    task_id = workitem.task_id(doc)
    return task_id is None or not _checks or any(check(task_id) for check in _checks)
