"""Inherited headers: the tasks that a task sends get them, too.

A task with the first version of Celery's message protocol has no headers and passes nothing on.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from celery._state import get_current_worker_task

from kombu_couchdb.documents.region import FROM_REGION

__all__ = ['PARCEL', 'header_of', 'pass_on']

#: The document id of a parcel with a receipt, and the id of its task. Publishers cannot set this header: the mover sets
#: or removes it.
PARCEL = 'x-parcel'


def header_of(request: Any, name: str) -> Any:
    """Return a header of the message of a task, None if it has none; `request` is the task's request or None."""
    return getattr(request, name, None) or (getattr(request, 'headers', None) or {}).get(name)


def pass_on(signature: Any) -> None:
    """Give a signature the headers of the running task, if there is one, because no task runs when it is sent."""
    headers = dict(signature.options.get('headers') or {})
    _inherit(headers)
    if headers:
        signature.options['headers'] = headers


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict) and (task := get_current_worker_task()):
        for name in (FROM_REGION, PARCEL):
            if value := header_of(task.request, name):
                headers.setdefault(name, value)
