"""The scheduler for `celery beat -S couchdb`, and for workers with `-B --scheduler couchdb`.

The loop around the leader's duty: wait for the turn to lead, do the duty, and go on after any error. The feed thread
wakes it when an entry is changed, or when another leader stops.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from typing import Any

from celery import signals
from celery.beat import Scheduler
from kombu.exceptions import OperationalError

from kombu_couchdb.couchdb.changes import ContinuousFeed
from kombu_couchdb.couchdb.client import Client, Document, Row
from kombu_couchdb.documents.ids import LEADER
from kombu_couchdb.errors import RETRIED, ConfigurationError, CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.leases.leader import Leader
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport import Transport

from .code import code_entries
from .duty import Duty, LeadLost
from .entries import CodeEntry, Names
from .messages import Messages

__all__ = ['CouchDBScheduler']

logger = get_logger(__name__)

#: The pause after an error, in seconds.
_RETRY_SECONDS = 1.0


class _Site:
    """A connection of the scheduler to its database, with what uses it."""

    def __init__(self, app: Any, wake: threading.Event) -> None:
        """Connect; *raises* the errors of the client."""
        self._wake = wake
        self._connection = app.connection_for_write()
        try:
            transport = self._connection.connection
        except BaseException:
            self._connection.release()
            raise
        # After an outage it reaches the server again by itself.
        self.client: Client = transport.couchdb
        self.names = Names.of(transport.options.schedule)
        self.leader = Leader(self.client, self.names.leader)
        self.messages = Messages(app, self._connection)
        #: What the feed reported since the last look: changes with the sequence after them.
        self.news: deque[tuple[list[Row], Any]] = deque()
        self._feed: ContinuousFeed | None = None
        self._watched: tuple[Any, Document] | None = None
        self._is_watching = False

    def watch(self, since: Any, selector: Document) -> None:
        """Wait for changes of documents that match, unless that is what is being waited for."""
        if self._is_watching and self._watched == (since, selector):
            return
        if self._feed is None:
            self._feed = ContinuousFeed(self.client, self._on_rows, self._on_error, 'celery-couchdb-beat-feed')
        self._watched, self._is_watching = (since, selector), True
        self._feed.watch(since, selector)

    def _on_rows(self, rows: list[Row], last: Any) -> None:
        self._is_watching = False
        self.news.append((rows, last))
        self._wake.set()

    def _on_error(self, exc: CouchDBError) -> None:
        logger.debug('the changes of schedule entries cannot be followed just now: %s', exc)
        self._is_watching = False

    def close(self) -> None:
        """Release the lead to another process, and close the connection."""
        if self._feed is not None:
            self._feed.close()
        self.leader.release()
        self._connection.release()


class CouchDBScheduler(Scheduler):
    """A scheduler of which any number may run: one of them, the leader, sends the tasks.

    `schedule` has the entries in the code of the app. The other entries are only in the database, see `Schedules`.
    """

    #: How long a call of `tick` waits at most, in seconds.
    max_interval = 1.0

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._site: _Site | None = None
        self._duty: Duty | None = None
        self._since: Any = None  # the sequence up to which the duty knows the entries
        self._wake = threading.Event()
        self._look_at = 0.0  # the monotonic time of the next `Leader.step`
        self._last_error = ''
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
        self._ticking = True
        try:
            seconds = self._step()
            self._last_error = ''
        except LeadLost:
            logger.warning('this beat does not lead any more: it could not renew its lease in time')
            self._duty, seconds = None, 0.0
        except Exception as exc:
            seconds = self._failed(exc)
        finally:
            self._ticking = False
        self._wake.wait(max(0.0, min(seconds, self.max_interval, 1.0)))
        self._wake.clear()
        return 0.0

    def close(self) -> None:
        """Release the lead, so that another process can start at once. The scheduler can be used again."""
        if self._ticking:
            return  # in a signal handler that interrupts `tick`. Celery calls this again when the tick has ended.
        site, self._site, self._duty = self._site, None, None
        if site is not None:
            site.close()
            logger.info('this beat has stopped')
        super().close()

    # -- one step

    def _step(self) -> float:
        """Lead or look who leads, and send what is due; return the seconds until the next step."""
        if self._site is None:
            self._site = _Site(self.app, self._wake)
        site = self._site
        news = [site.news.popleft() for _ in range(len(site.news))]
        if self._duty is None and not news and time.monotonic() < self._look_at:
            return self._look_at - time.monotonic()
        term = site.leader.step()
        if self._duty is not None and self._duty.term is not term:
            raise LeadLost
        if term is None:
            return self._stand_by(site)
        if self._duty is None:
            duty = Duty(self.app, site.client, site.names, self.code, site.messages, site.leader)
            self._since = duty.start()
            site.news.clear()  # of the time as a standby
            self._duty, news = duty, []
            logger.info('this beat leads from now on, with %d schedule entries', len(duty))
        for rows, last in news:
            self._duty.apply(rows)
            self._since = last
        # The web interface, too, deletes a document without a body: only its id tells what it was.
        site.watch(self._since, {'_id': {'$regex': f'^{site.names.entries}'}})
        self._duty.round()
        return min(self._duty.next_in(), site.leader.next_in)

    def _stand_by(self, site: _Site) -> float:
        """Wait until the leader releases the lead; return the seconds until the next look at it."""
        self._look_at = time.monotonic() + site.leader.next_in
        site.watch('now', {'_id': LEADER + site.names.leader, 'holder': None})
        return site.leader.next_in

    def _failed(self, exc: Exception) -> float:
        """Log an error, unless it is the same as the last one, and return the pause in seconds."""
        self._duty = None  # what was stored is uncertain
        self._look_at = 0.0
        text = re.sub(r'\d+', '', repr(exc))  # it may count seconds
        if self._last_error == text:
            return _RETRY_SECONDS
        self._last_error = text
        if not isinstance(exc, (CouchDBError, OperationalError)):
            logger.error('no tasks are scheduled just now, because of an unexpected error', exc_info=exc)
        else:
            hint = '; run "celery -A your_app couchdb setup"' if isinstance(exc, (DatabaseMissing, NotFound)) else ''
            is_passing = isinstance(exc, (*RETRIED, OperationalError)) and not hint
            logger.log(
                logging.WARNING if is_passing else logging.ERROR, 'no tasks are scheduled just now: %s%s', exc, hint
            )
        return _RETRY_SECONDS


@signals.beat_embedded_init.connect
def _on_embedded_init(sender: Any = None, **_: Any) -> None:
    """Remember the worker of `celery worker -B`: if it is killed, its beat must not go on for ever."""
    if isinstance(scheduler := getattr(sender, 'scheduler', None), CouchDBScheduler):
        scheduler.parent = os.getppid()
