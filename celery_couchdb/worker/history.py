"""Celery hooks for the history of jobs: `keep_done` of tasks, the name of the worker, and the error of a retry.

`startup.prepare` calls `install`. Nothing here is used if the broker is not CouchDB.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from celery import current_task, signals

from kombu_couchdb.consumer.worker_hooks import keep_done_of, on_removed
from kombu_couchdb.documents.workitem import KEEP_DONE
from kombu_couchdb.leases.lease import set_worker
from kombu_couchdb.transport import Transport
from kombu_couchdb.values import storable

#: The header of a retry with the exception of the attempt before: `{'type', 'text'}`.
LAST_ERROR = 'last_error'

#: The maximum length of the type and of the text of an exception, in characters; longer ones are cut.
_MAX_TYPE, _MAX_TEXT = 200, 500


def install(app: Any, worker: str | None) -> None:
    """Note the history of the jobs that the worker with the name `worker` runs, if the app's broker is CouchDB.

    It may be called more than once.
    """
    with app.connection_for_read() as connection:
        if not issubclass(connection.get_transport_cls(), Transport):
            return
    set_worker(worker)
    keep_done_of(lambda task: getattr(app.tasks.get(task), KEEP_DONE, None))
    on_removed(_revoke)
    signals.before_task_publish.connect(_on_publish)


def error_of(exc: BaseException) -> dict[str, str]:
    """Return the type and the text of an exception, as text that CouchDB can store."""
    try:
        text = str(exc)
    except Exception:  # an exception of the application whose own text fails
        text = ''
    return {'type': storable(type(exc).__qualname__, _MAX_TYPE), 'text': storable(text, _MAX_TEXT)}


def _revoke(task_id: str) -> None:
    """Do what the remote control command `revoke` does: the worker does not start the task."""
    import_module('celery.worker.state').revoked.add(task_id)


def _on_publish(headers: dict[str, Any] | None = None, properties: dict[str, Any] | None = None, **_: Any) -> None:
    """Complete the message of a retry: a task publishes a message with its own id, for a later attempt."""
    request = current_task.request if current_task else None
    if request is None or not headers or headers.get('id') != request.id:
        return
    if (headers.get('retries') or 0) <= (request.retries or 0):
        return
    headers.pop(LAST_ERROR, None)  # that of an earlier attempt: Celery copies the headers
    if (exc := sys.exc_info()[1]) is not None:
        headers[LAST_ERROR] = error_of(exc)
    kept = getattr(request, 'properties', None)
    if properties is not None and isinstance(kept, Mapping) and KEEP_DONE in kept:
        properties.setdefault(KEEP_DONE, kept[KEEP_DONE])
