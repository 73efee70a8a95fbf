"""The check at a worker's start that its results can be stored."""

from __future__ import annotations

import uuid
from typing import Any

from celery import states
from celery.exceptions import WorkerShutdown

from kombu_couchdb.errors import RETRIED, CouchDBError
from kombu_couchdb.log import get_logger

from .results.documents import pack, stamp

__all__ = ['check']

logger = get_logger(__name__)

#: How long the result that is tried to be stored is kept, in seconds, if CouchDB stores it and then refuses to delete it.
_LIFETIME_SECONDS = 60.0

#: The status with which a worker ends.
_FAILURE = 1


def check(backend: Any) -> None:
    """Store a result and delete it: two requests. *Raises* `WorkerShutdown` if CouchDB, or the configuration, refuses it.

    A server that does not answer refuses nothing: results are stored when it is back. Nothing is tried if no task has a result.
    """
    if not _has_results(backend.app):
        return
    task_id = f'write-check-{uuid.uuid4()}'
    payload = backend.encode({'task_id': task_id, 'status': states.PENDING, 'result': None})
    doc = {
        '_id': backend.get_key_for_task(task_id),
        'type': 'Result',
        'status': states.PENDING,
        'task': None,
        **pack(payload, backend.content_type),
    }
    try:
        backend.store.try_to_write(stamp(doc, backend.client.clock.now(), _LIFETIME_SECONDS))
    except RETRIED as exc:
        logger.warning('results cannot be stored just now: %s', exc)
    except CouchDBError as exc:
        logger.critical('results cannot be stored: %s', exc)
        raise WorkerShutdown(_FAILURE) from None


def _has_results(app: Any) -> bool:
    tasks = [task for name, task in app.tasks.items() if not name.startswith('celery.')]
    return any(not task.ignore_result for task in tasks) if tasks else not app.conf.task_ignore_result
