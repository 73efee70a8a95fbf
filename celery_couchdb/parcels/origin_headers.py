"""The header that says from which parcel a task came: the tasks that a task sends inherit it.

`x-parcel` has the document id of a parcel with a receipt, and the id of its task. The result of this task names the
parcel, so that the receipt can have it. Other tasks inherit the header, because one of them may store the result under
the id of the first: a retry, or what replaces it.

A task with the first version of Celery's message protocol has no headers and passes nothing on.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from celery._state import get_current_worker_task

#: Publishers cannot set this header: the mover sets or removes it.
PARCEL = 'x-parcel'


def parcel_of(request: Any, task_id: str) -> str | None:
    """Return the document id of the parcel whose task has this id; None if it came from no parcel with a receipt.

    `request` is the task's request or None.
    """
    found = header_of(request, PARCEL)
    is_valid = isinstance(found, (list, tuple)) and len(found) == 2 and all(isinstance(part, str) for part in found)
    return found[0] if is_valid and found[1] == task_id else None


def pass_on(headers: dict[str, Any]) -> None:
    """Give a message the header `x-parcel` of the running task, if there is one."""
    inherit(headers, PARCEL)


def inherit(headers: dict[str, Any], name: str) -> None:
    """Give a message a header of the running task, if there is one that has it."""
    if (task := get_current_worker_task()) and (value := header_of(task.request, name)):
        headers.setdefault(name, value)


def header_of(request: Any, name: str) -> Any:
    """Return a header of a task, or None; `request` is the task's request or None."""
    return getattr(request, name, None) or (getattr(request, 'headers', None) or {}).get(name)


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict):
        pass_on(headers)
