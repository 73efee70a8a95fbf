"""The region in which a task was first sent: the tasks that it sends, and its result, belong to that region, too.

The header `x-from-region` of a message names it. A result that has to return gets the member `to`, by which CouchDB
replicates it.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from celery._state import get_current_worker_task

from kombu_couchdb.documents.region import FROM_REGION, origin

__all__ = ['destination']


def destination(app: Any, request: Any) -> str | None:
    """Return the region to which the result of a task is returned, or None if the task was sent in this region."""
    own = (app.conf.broker_transport_options or {}).get('region')
    return origin({FROM_REGION: _home_of(request)}, own) if own and request is not None else None


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    """Give a task that another task sends the region of that task. With the first protocol tasks have no headers."""
    if isinstance(headers, dict) and (task := get_current_worker_task()) and (home := _home_of(task.request)):
        headers.setdefault(FROM_REGION, home)


def _home_of(request: Any) -> Any:
    return getattr(request, FROM_REGION, None) or (getattr(request, 'headers', None) or {}).get(FROM_REGION)
