"""The parcel from which a task came: its result names the parcel, so that the parcel's receipt can have it.

The header `x-parcel` of a message has the parcel's document id and the task's id. All tasks that a task sends inherit
the header, because one of them may store the result under the id of the first: a retry, or what replaces it.
"""

from __future__ import annotations

from typing import Any

from .inherited import PARCEL, header_of

__all__ = ['parcel_of']


def parcel_of(request: Any, task_id: str) -> str | None:
    """Return the document id of the parcel whose task has this id; None if it came from no parcel with a receipt."""
    found = header_of(request, PARCEL)
    is_valid = isinstance(found, (list, tuple)) and len(found) == 2 and all(isinstance(part, str) for part in found)
    return found[0] if is_valid and found[1] == task_id else None
