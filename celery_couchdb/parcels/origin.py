"""The parcel from which a task came: its result names the parcel, so that the parcel's receipt can have it.

The header `x-parcel` of a message has the parcel's document id and the task's id. All tasks that a task sends inherit
the header, because one of them may store the result under the id of the first: a retry, or what replaces it.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from celery._state import get_current_worker_task

__all__ = ['HEADER', 'parcel_of']

#: Publishers cannot set this header: the mover sets or removes it.
HEADER = 'x-parcel'


def parcel_of(request: Any, task_id: str) -> str | None:
    """Return the document id of the parcel whose task has this id; None if it came from no parcel with a receipt."""
    found = _header_of(request)
    is_valid = isinstance(found, (list, tuple)) and len(found) == 2 and all(isinstance(part, str) for part in found)
    return found[0] if is_valid and found[1] == task_id else None


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict) and (task := get_current_worker_task()) and (found := _header_of(task.request)):
        headers.setdefault(HEADER, found)


def _header_of(request: Any) -> Any:
    return getattr(request, HEADER, None) or (getattr(request, 'headers', None) or {}).get(HEADER)
