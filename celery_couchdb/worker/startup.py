"""The start of a worker: what only workers import, the check that results can be stored, and the loops of rooms.

A worker runs the loops of optional rooms beside its tasks, each in a thread of its own.
"""

from __future__ import annotations

import uuid
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from celery import signals, states
from celery.exceptions import WorkerShutdown

from kombu_couchdb.errors import RETRIED, CouchDBError
from kombu_couchdb.leases.leader import Led
from kombu_couchdb.leases.lease import set_worker
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport import Transport

from ..patches import workers
from ..results.documents import stamp
from ..rooms import rooms

logger = get_logger(__name__)

#: The lifetime of the test result. It matters only if CouchDB stores the result and then refuses to delete it.
_LIFETIME_SECONDS = 60.0

#: The exit status of a worker that fails the check.
_EXIT_STATUS = 1

#: By app: the loops that run.
_running: WeakKeyDictionary[Any, list[Led]] = WeakKeyDictionary()


def prepare(app: Any, worker: str | None) -> None:
    """Install what a worker of an app with CouchDB has: commands of remote control, what optional rooms do, reports.

    `worker` is the worker's name. The `celery` program calls this when it starts a worker whose broker is CouchDB, and
    the result backend when a worker is ready.
    """
    import_module(f'{__package__}.control')
    for room in rooms():
        room.prepare_worker(app)
    _connect()
    import_module(f'{__package__}.history').install(app, worker)
    import_module(f'{__package__}.running').install(app)


@signals.beat_embedded_init.connect
def _on_embedded_beat(**_: Any) -> None:
    """Let the beat of `celery worker -B`, a forked child, count as a program: paused queues may refuse its messages."""
    set_worker(None)


def check(backend: Any) -> None:
    """Store a result and delete it again: two requests, or none if no task of the app has a result.

    *Raises* `WorkerShutdown` if CouchDB refuses the result, or if the configuration is wrong. If the server does not
    respond, the worker logs a warning and starts: it stores results when the server is available again.
    """
    if not _has_results(backend.app):
        return
    task_id = f'write-check-{uuid.uuid4()}'
    doc = backend.result_document(task_id, None, {'status': states.PENDING, 'result': None})
    try:
        backend.store.try_to_write(stamp(doc, backend.client.clock.now(), _LIFETIME_SECONDS))
    except RETRIED as exc:
        logger.warning('results cannot be stored just now: %s', exc)
    except CouchDBError as exc:
        logger.critical('results cannot be stored: %s', exc)
        raise WorkerShutdown(_EXIT_STATUS) from None


def _has_results(app: Any) -> bool:
    tasks = [task for name, task in app.tasks.items() if not name.startswith('celery.')]
    return any(not task.ignore_result for task in tasks) if tasks else not app.conf.task_ignore_result


# -- the loops of rooms


def _connect() -> None:
    """Start the loops in each worker of this process that is ready from now on, and stop them when it shuts down."""
    for signal in workers.READY:
        signal.connect(start_services)
    for signal in workers.SHUTDOWN:
        signal.connect(_stop_services)


def start_services(sender: Any = None, **_: Any) -> None:
    """Start the loops for the app of a worker that is ready, unless they run, if its broker is CouchDB."""
    if sender is None or sender.app in _running:
        return
    app, concurrency = sender.app, getattr(getattr(sender, 'controller', None), 'concurrency', None) or 1
    with app.connection_for_write() as connection:  # does not connect
        if not issubclass(connection.get_transport_cls(), Transport):
            return
    found = {name: loop for room in rooms() for name, loop in room.services(app, concurrency).items()}
    _running[app] = [*found.values()]
    for name, loop in found.items():
        loop.start(name)


def _stop_services(sender: Any = None, **_: Any) -> None:
    for loop in _running.pop(sender.app, ()) if sender is not None else ():
        loop.stop()
