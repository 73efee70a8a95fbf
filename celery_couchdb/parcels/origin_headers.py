"""The headers that say where a task came from: the tasks that a task sends inherit them.

* `x-parcel` has the document id of a parcel with a receipt, and the id of its task. The result of this task names the
  parcel, so that the receipt can have it. Other tasks inherit the header, because one of them may store the result
  under the id of the first: a retry, or what replaces it.
* `x-from-region` names the region in which a task was first sent. Its result returns there: it gets the member `to`, by
  which CouchDB replicates it.

A task with the first version of Celery's message protocol has no headers and passes nothing on.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from celery._state import get_current_worker_task

from kombu_couchdb.documents.region import FROM_REGION, origin

#: Publishers cannot set this header: the mover sets or removes it.
PARCEL = 'x-parcel'


def parcel_of(request: Any, task_id: str) -> str | None:
    """Return the document id of the parcel whose task has this id; None if it came from no parcel with a receipt.

    `request` is the task's request or None.
    """
    found = _header_of(request, PARCEL)
    is_valid = isinstance(found, (list, tuple)) and len(found) == 2 and all(isinstance(part, str) for part in found)
    return found[0] if is_valid and found[1] == task_id else None


def destination(app: Any, request: Any) -> str | None:
    """Return the region to which the result of a task is returned, or None if the task was sent in this region."""
    own = (app.conf.broker_transport_options or {}).get('region')
    return origin({FROM_REGION: _header_of(request, FROM_REGION)}, own) if own else None


def pass_on(signature: Any) -> None:
    """Give a signature the headers of the running task, if there is one, because no task runs when it is sent."""
    headers = dict(signature.options.get('headers') or {})
    _inherit(headers)
    if headers:
        signature.options['headers'] = headers


def _header_of(request: Any, name: str) -> Any:
    return getattr(request, name, None) or (getattr(request, 'headers', None) or {}).get(name)


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict) and (task := get_current_worker_task()):
        for name in (FROM_REGION, PARCEL):
            if value := _header_of(task.request, name):
                headers.setdefault(name, value)
