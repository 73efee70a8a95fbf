"""Parcels: tasks from publishers without access to the broker's database.

Publishers write parcels into a separate database. A worker checks each parcel and moves it to the broker's database.
`kombu_couchdb.contrib.parcels.parcel` defines the document. One of the workers whose transport has the option
`parcels` moves parcels (`mover`); `parcel_checks` decides which. A parcel of a program without Celery becomes a
receipt, into which `receipts` writes how the task ended.

This module has what the core asks of the room, and the header `x-parcel`, by which a result finds its receipt: it has
the database and the document id of a parcel with a receipt, and the id of its task. The result of this task names the
parcel. Other tasks inherit the header, because one of them may store the result under the id of the first: a retry, or
what replaces it. A task with the first version of Celery's message protocol has no headers and passes nothing on.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from celery import signals
from celery._state import get_current_worker_task

#: Publishers cannot set this header: the mover sets or removes it.
PARCEL = 'x-parcel'

#: The headers that the tasks of a task inherit.
INHERITED = [PARCEL]


def parcel_of(request: Any, task_id: str) -> list[str] | None:
    """Return database and document id of the parcel whose task has this id; None if no parcel with a receipt has it.

    `request` is the task's request or None.
    """
    found = header_of(request, PARCEL)
    is_valid = isinstance(found, (list, tuple)) and len(found) == 3 and all(isinstance(part, str) for part in found)
    return [*found[:2]] if is_valid and found[2] == task_id else None


def pass_on(headers: dict[str, Any]) -> None:
    """Give a message those headers of the running task that are `INHERITED`."""
    if task := get_current_worker_task():
        for name in INHERITED:
            if value := header_of(task.request, name):
                headers.setdefault(name, value)


def header_of(request: Any, name: str) -> Any:
    """Return a header of a task, or None; `request` is the task's request or None."""
    return getattr(request, name, None) or (getattr(request, 'headers', None) or {}).get(name)


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict):
        pass_on(headers)


def members_of_result(app: Any, request: Any, task_id: str) -> dict[str, Any]:
    """Return the member `parcel` of a result, if its task came from a parcel with a receipt."""
    parcel = parcel_of(request, task_id)
    return {'parcel': parcel} if parcel else {}


def prepare_worker() -> None:
    """Let movers start in each worker that is ready."""
    import_module('celery_couchdb.contrib.parcels.mover').connect_signals()


def start_in_worker(worker: Any) -> None:
    """Start the movers in a worker that is ready."""
    prepare_worker()
    import_module('celery_couchdb.contrib.parcels.mover').on_worker_ready(worker)
