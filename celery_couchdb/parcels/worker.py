"""The thread of a worker that moves parcels. Importing this module starts it in each worker whose transport has the option.

The `celery` program imports it when it starts a worker, and the result backend when a worker is ready. A program that makes a
worker by `app.Worker()` with another result backend imports this module itself.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from celery import signals

from kombu_couchdb.errors import RETRIED, CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.leases.leader import RENEWAL_SECONDS
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport import Transport

from .mover import Mover

__all__ = ['MovingThread', 'start']

logger = get_logger(__name__)

#: How long a worker that stops waits for the page of parcels that is moved just now, in seconds.
_PATIENCE_SECONDS = 5.0


class MovingThread:
    """Moves the parcels of an app until it is stopped, whatever happens to the server."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wake, self._stopped, self._said = threading.Event(), False, ''
        self._thread = threading.Thread(target=self._run, name='celery-couchdb-parcels', daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for the end of what is under way."""
        self._stopped = True
        self._wake.set()
        self._thread.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        mover: Mover | None = None
        with self._app.connection_for_write() as connection:
            while not self._stopped:
                try:
                    # A connection that is established once reaches the server again by itself.
                    mover = mover or Mover(self._app, connection.connection, self._wake.set)
                    mover.step()
                    self._said = ''
                except CouchDBError as exc:
                    self._say(exc)
                except Exception:
                    logger.exception('parcels are not moved just now')
                self._wake.wait(RENEWAL_SECONDS)
                self._wake.clear()
            if mover is not None:
                mover.close()

    def _say(self, exc: CouchDBError) -> None:
        hint = '; run "celery -A your_app couchdb setup"' if isinstance(exc, (DatabaseMissing, NotFound)) else ''
        if self._said != str(exc):
            self._said = str(exc)
            say = logger.warning if isinstance(exc, RETRIED) and not hint else logger.error
            say('parcels are not moved just now: %s%s', exc, hint)


_threads: WeakKeyDictionary[Any, MovingThread] = WeakKeyDictionary()


def start(app: Any) -> None:
    """Start the thread for an app whose broker is CouchDB and has the option `parcels`, unless it was started."""
    if app in _threads or not (app.conf.broker_transport_options or {}).get('parcels'):
        return
    with app.connection_for_write() as connection:
        if issubclass(connection.get_transport_cls(), Transport):
            _threads[app] = MovingThread(app)


@signals.worker_ready.connect
def _on_worker_ready(sender: Any = None, **_: Any) -> None:
    if sender is not None:
        start(sender.app)


@signals.worker_shutdown.connect
def _on_worker_shutdown(sender: Any = None, **_: Any) -> None:
    if sender is not None and (thread := _threads.pop(sender.app, None)):
        thread.stop()
