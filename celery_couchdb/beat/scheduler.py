"""The scheduler for `celery beat -S couchdb`, and for workers with `-B --scheduler couchdb`.

Celery's loop calls `tick`, which leads or looks who leads, does the leader's duty (`due_tasks`), and goes on after any
error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery import signals
from celery.beat import Scheduler

from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.leases.leader import Led
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport import Transport

from .due_tasks import DueTasks
from .entries import CodeEntry, code_entries

logger = get_logger(__name__)

#: The pause after an error, in seconds.
_RETRY_SECONDS = 1.0


class CouchDBScheduler(Scheduler):
    """A scheduler of which any number may run: one of them, the leader, sends the tasks.

    `schedule` has the entries in the code of the app. The other entries are only in the database, see `Schedules`.
    """

    #: How long a call of `tick` waits at most, in seconds.
    max_interval = 1.0

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._led: Led | None = None
        self._ticking = False
        #: The entries in the code of the app; those with an error, too.
        self.code: dict[str, CodeEntry] = {}
        #: The process that must not end before this one; None if there is none.
        self.parent: int | None = None
        super().__init__(app, *args, **kwargs)

    @property
    def info(self) -> str:
        """The line about this scheduler in the banner of `celery beat`."""
        option = (self.app.conf.broker_transport_options or {}).get('schedule')
        return f'    . schedule -> {option}' if option else '    . schedule -> in the database of the broker'

    def setup_schedule(self) -> None:
        """Take over the entries of the code. Malformed ones are logged and left out. No request is made here.

        *Raises* `ConfigurationError` if the broker is not CouchDB.
        """
        with self.app.connection_for_write() as connection:
            if not issubclass(connection.get_transport_cls(), Transport):
                raise ConfigurationError(
                    'the scheduler couchdb needs a broker_url with couchdb://; other brokers need another scheduler'
                )
        self.data: dict[str, Any] = {}
        self.install_default_entries(self.app.conf.beat_schedule)
        self.code = code_entries(self.app, self.data)
        self.data = {name: entry.entry for name, entry in self.code.items() if entry.error is None}
        for name, entry in self.code.items():
            if entry.error is not None:
                logger.error('schedule entry %s of the app is malformed and not used: %s', name, entry.error)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due, wait up to a second for a change, and return 0: call it again at once."""
        if self.parent is not None and os.getppid() != self.parent:
            logger.warning('the worker of this beat has ended without stopping it; beat ends, too')
            raise SystemExit
        self._led = self._led or self._new_led(self.app.connection_for_write())
        self._ticking = True
        try:
            self._led.turn(min(self.max_interval, 1.0))
        finally:
            self._ticking = False
        return 0.0

    def close(self) -> None:
        """Release the lead, so that another process can start at once. The scheduler can be used again."""
        if self._ticking:
            return  # in a signal handler that interrupts `tick`. Celery calls this again when the tick has ended.
        led, self._led = self._led, None
        if led is not None:
            led.close()
            logger.info('this beat has stopped')
        super().close()

    def _new_led(self, connection: Any) -> Led:
        def duty(connection: Any, wake: Callable[[], None]) -> DueTasks:
            return DueTasks(self.app, connection, self.code, wake)

        return Led(connection, duty, 'no tasks are scheduled', _RETRY_SECONDS)


@signals.beat_embedded_init.connect
def _on_embedded_init(sender: Any = None, **_: Any) -> None:
    """Remember the worker of `celery worker -B`: if it is killed, its beat must not go on for ever."""
    if isinstance(scheduler := getattr(sender, 'scheduler', None), CouchDBScheduler):
        scheduler.parent = os.getppid()
