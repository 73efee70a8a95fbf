"""The thread of a worker in which a `Mover` moves parcels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from kombu_couchdb.errors import RETRIED, CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.leases.leader import RENEWAL_SECONDS
from kombu_couchdb.log import get_logger

from .mover import Mover

__all__ = ['MovingThread']

logger = get_logger(__name__)

#: The longest time for which a worker that stops waits for the current batch of parcels, in seconds.
_STOP_SECONDS = 5.0


class MovingThread:
    """A thread that moves the parcels of an app until it is stopped. After any error it tries again."""

    def __init__(self, app: Any, moves: Callable[..., Mover]) -> None:
        self._app, self._moves = app, moves
        self._wake, self._stopped, self._last_error = threading.Event(), False, ''
        self._mover: Mover | None = None
        self._thread = threading.Thread(target=self._run, name='celery-couchdb-parcels', daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait up to 5 seconds for the current batch."""
        self._stopped = True
        if (mover := self._mover) is not None:
            mover.stop()
        self._wake.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        with self._app.connection_for_write() as connection:
            while not self._stopped:
                pause = RENEWAL_SECONDS
                try:
                    # Connect once: after an outage the connection reaches the server again by itself.
                    mover = self._mover or self._moves(self._app, connection.connection, self._wake.set)
                    self._mover = mover
                    mover.step()
                    self._last_error, pause = '', mover.next_in
                except CouchDBError as exc:
                    self._log(exc)
                except Exception:
                    logger.exception('parcels are not moved just now')
                self._wake.wait(pause)
                self._wake.clear()
            if self._mover is not None:
                self._close(self._mover)

    def _close(self, mover: Mover) -> None:
        try:
            mover.close()
        except CouchDBError as exc:
            self._log(exc)  # the lead ends by itself

    def _log(self, exc: CouchDBError) -> None:
        """Log an error, unless it is the same as the last one."""
        hint = '; run "celery -A your_app couchdb setup"' if isinstance(exc, (DatabaseMissing, NotFound)) else ''
        if self._last_error != str(exc):
            self._last_error = str(exc)
            level = logging.WARNING if isinstance(exc, RETRIED) and not hint else logging.ERROR
            logger.log(level, 'parcels are not moved just now: %s%s', exc, hint)
