"""Celery hooks for the history of jobs: `keep_done` of tasks, the name of the worker, and the tries before a retry.

`startup.prepare` calls `install`. Nothing here is used if the broker is not CouchDB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from celery import current_task, signals

from kombu_couchdb.consumer.worker_hooks import keep_done_of, on_removed
from kombu_couchdb.documents.workitem import KEEP_DONE
from kombu_couchdb.leases.lease import set_worker
from kombu_couchdb.transport import Transport
from kombu_couchdb.values import storable

#: The header of a retry with the tries before it, the first one first: `{'date', 'worker', 'type', 'text'}`, when each
#: ended, and its exception. The most tries that it has; the first ones are left out.
TRIES, _MAX_TRIES = 'tries', 10

#: The maximum length of the type and of the text of an exception, in characters; longer ones are cut.
_MAX_TYPE, _MAX_TEXT = 200, 500


def tries_in(headers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tries that the headers of a message tell of, which may be anything."""
    found = headers.get(TRIES)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


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


def _try_of(request: Any, exc: BaseException) -> dict[str, Any]:
    """Return the try of a task that ends now; the exception as text that CouchDB can store."""
    try:
        text = str(exc)
    except Exception:  # an exception of the application whose own text fails
        text = ''
    error = {'type': storable(type(exc).__qualname__, _MAX_TYPE), 'text': storable(text, _MAX_TEXT)}
    return {'date': round(time.time(), 3), 'worker': request.hostname, **error}


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
    if (exc := sys.exc_info()[1]) is not None:
        # Celery copies the headers, and with them the tries before this one.
        headers[TRIES] = [*tries_in(headers), _try_of(request, exc)][-_MAX_TRIES:]
    kept = getattr(request, 'properties', None)
    if properties is not None and isinstance(kept, Mapping) and KEEP_DONE in kept:
        properties.setdefault(KEEP_DONE, kept[KEEP_DONE])
