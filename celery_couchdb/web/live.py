"""The live status of a broker's database, which is read once for all browsers of a user, and the event of its changes.

While a browser watches, one thread follows the changes feed: it waits for one change, reads the status, and pauses, so
that it sends at most two requests a second on average, however many messages there are. While nobody watches, nothing
is read but for a page that is opened.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple, cast

from kombu_couchdb.admin.status import Status, status
from kombu_couchdb.couchdb.changes import Longpoll
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import CouchDBError, ServerUnavailable
from kombu_couchdb.log import get_logger
from kombu_couchdb.outage import Outage

from .recent_history import RecentHistory

logger = get_logger(__name__)

#: The seconds between two readings while the database changes. A reading takes six requests, and the feed two.
_PAUSE_SECONDS = 4.2

#: How long the sizes of the databases count, in seconds: they need up to four requests more.
_SIZES_SECONDS = 60.0

#: A reading is repeated after this time even if nothing has changed: scheduled messages become due.
_STALE_SECONDS = 20.0

#: For how long a reading, or an error, counts for pages while nobody watches, in seconds.
_FRESH_SECONDS = 1.5

#: For so many queues and priorities with messages, the first page has the ages of the oldest ones. Each takes CouchDB
#: about a millisecond.
_MAX_AGES = 100

#: For how long the thread goes on when the last browser has left, in seconds: it may be on its way to another page.
_LINGER_SECONDS = 5.0


class StatusReading(NamedTuple):
    """What was read of the database."""

    status: Status
    #: The server's time of the reading, in seconds since the epoch.
    date: float
    #: The monotonic time of the reading, and how many seconds it took.
    at: float
    seconds: float
    #: Whether the ages of the oldest messages are in it.
    is_full: bool


def _has_ages(found: Status) -> bool:
    return all(queue['oldest'] is not None for queue in found['queues'].values() if queue['ready'])


class Problem(NamedTuple):
    """Why the database cannot be read just now."""

    error: CouchDBError
    #: Since when, in seconds since the epoch.
    since: float
    #: The monotonic time of the last attempt.
    at: float


class BrowserWatch:
    """One browser that wants to know about changes. Its coroutine waits, and the thread of `Live` wakes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Tell the coroutine that something has changed; from any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    async def wait(self, seconds: float) -> bool:
        """Wait for a change, and return whether there was one within `seconds`."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        found = self._changed.is_set()
        self._changed.clear()
        return found


class Live:
    """The status of a broker's database as one CouchDB user sees it. Thread-safe."""

    def __init__(self, broker: Client, results: Client | None) -> None:
        self._broker, self._results = broker, results
        self._longpoll = Longpoll(broker)
        #: The history of tasks and queues.
        self.history = RecentHistory(broker)
        self._lock = threading.Condition()
        self._reading, self._pinging = threading.Lock(), threading.Lock()
        self._pinged_at, self._ping_error = float('-inf'), cast('CouchDBError | None', None)
        self._snapshot: StatusReading | None = None
        #: The monotonic time when the sizes of the databases were read.
        self._sized_at = float('-inf')
        self._problem: Problem | None = None
        self._watches: set[BrowserWatch] = set()
        self._left_at = float('-inf')
        self._thread: threading.Thread | None = None
        self._is_following = False

    @property
    def problem(self) -> Problem | None:
        """Why CouchDB cannot be read just now; None if it can."""
        return self._problem

    @property
    def last(self) -> StatusReading | None:
        """What was read last, however long ago."""
        return self._snapshot

    def ping(self) -> None:
        """Check that CouchDB responds and the database can be read; at most two requests in three seconds.

        *Raises* the errors of `Client`.
        """
        with self._pinging:
            if time.monotonic() - self._pinged_at >= _FRESH_SECONDS:
                self._ping_error = None
                try:
                    self._broker.info()
                except CouchDBError as exc:
                    self._ping_error = copy.copy(exc)
                self._pinged_at = time.monotonic()
            if self._ping_error:
                raise copy.copy(self._ping_error)

    def snapshot(self, *, fully: bool = False) -> StatusReading:
        """Return what was read last, if that is recent or is kept up to date; otherwise read now.

        Unless `fully`, it may lack the ages of the oldest messages, if many queues and priorities have some. *Raises*
        the errors of `Client` if nothing was read yet.
        """
        return self._known(fully) or self._read(fully=fully)

    def recent(self) -> StatusReading | None:
        """Return what was read in the last seconds; otherwise read now, unless CouchDB cannot be read just now."""
        found = self._snapshot
        if self._problem or (found and time.monotonic() - found.at < _STALE_SECONDS):
            return found
        with suppress(CouchDBError):
            return self.snapshot()
        return found

    def reread(self) -> None:
        """Read again before the next page is shown: its user has changed something. Watching browsers are told."""
        with self._lock:
            self._snapshot = None
        with suppress(CouchDBError):
            self._read(again=True, fully=True)  # what another thread reads just now may have begun before the change
        self._tell()

    def watch(self, watch: BrowserWatch) -> None:
        """Wake this watch after each change, until `leave` is called."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name='celery-couchdb-live', daemon=True)
                self._thread.start()

    def leave(self, watch: BrowserWatch) -> None:
        """Do not wake this watch any more."""
        with self._lock:
            self._watches.discard(watch)
            self._left_at = time.monotonic()

    def close(self) -> None:
        """Stop following, and close idle connections."""
        with self._lock:
            self._watches.clear()
            self._left_at = float('-inf')
            self._longpoll.interrupt()
            self._lock.notify_all()
        for client in filter(None, (self._broker, self._results)):
            client.close()

    # -- reading

    def _known(self, fully: bool) -> StatusReading | None:
        with self._lock:
            now, found, problem = time.monotonic(), self._snapshot, self._problem
            if found and found.is_full >= fully and (self._is_following or now - found.at < _FRESH_SECONDS):
                return found
        if problem and now - problem.at < _FRESH_SECONDS:
            raise copy.copy(problem.error)  # without the traceback
        return None

    def _read(self, *, fully: bool, again: bool = False) -> StatusReading:
        """Read the status; with `again` even if another thread has done so just now."""
        with self._reading:
            if not again and (found := self._known(fully)):
                return found
            begun = time.monotonic()
            try:
                earlier = self._snapshot if begun - self._sized_at < _SIZES_SECONDS else None
                # Only the first page is in a hurry: a browser without JavaScript has the ages on the second one.
                is_first = self._snapshot is None or begun - self._snapshot.at >= _STALE_SECONDS
                most = _MAX_AGES if is_first and not fully else inf
                read = status(self._broker, self._results, earlier=earlier and earlier.status, max_ages=most)
            except CouchDBError as exc:
                self._note(exc)
                raise
            now = time.monotonic()
            self._sized_at = self._sized_at if earlier else now
            found = StatusReading(read, self._broker.clock.now(), now, now - begun, _has_ages(read))
            with self._lock:
                self._snapshot, self._problem = found, None
            return found

    def _note(self, error: CouchDBError) -> None:
        with self._lock:
            since = self._problem.since if self._problem else time.time()
            self._problem = Problem(copy.copy(error), since, time.monotonic())

    # -- following, in the thread

    def _follow(self) -> None:
        outage = Outage(logger, 'the page cannot read the database: %s', level=logging.DEBUG)
        try:
            while self._is_watched():
                had_problem = self._problem is not None
                try:
                    since = self._broker.sequence()
                    self._read(again=True, fully=True)
                    self._is_following = True
                    outage.recovered()
                    self._tell()
                    self._wait(_PAUSE_SECONDS)
                    self._wait_for_change(since)
                except CouchDBError as exc:
                    self._note(exc)
                    if not had_problem:
                        self._tell()
                    self._wait(outage.failed(exc))
        except Exception as exc:
            logger.exception('the page cannot follow the database')
            self._note(ServerUnavailable(f'{self._broker.address.url} cannot be followed: {exc!r}'))
            self._tell()
            with self._lock:
                self._thread, self._is_following = None, False

    def _is_watched(self) -> bool:
        with self._lock:
            is_watched = bool(self._watches) or time.monotonic() < self._left_at + _LINGER_SECONDS
            if not is_watched:  # the next watch starts a thread
                self._thread, self._is_following = None, False
            return is_watched

    def _wait_for_change(self, since: Any) -> None:
        until = time.monotonic() + _STALE_SECONDS

        def is_wanted() -> bool:
            now = time.monotonic()
            return now < until and (bool(self._watches) or now < self._left_at + _LINGER_SECONDS)

        generation = self._longpoll.generation
        if is_wanted():
            self._longpoll.wait(generation, since, {}, docs=False, limit=1, is_wanted=is_wanted)

    def _wait(self, seconds: float) -> None:
        """Wait, but not once nobody watches any more."""
        end = time.monotonic() + seconds
        with self._lock:
            while (left := end - time.monotonic()) > 0 and (
                self._watches or time.monotonic() < self._left_at + _LINGER_SECONDS
            ):
                self._lock.wait(min(left, 1.0))

    def _tell(self) -> None:
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.wake()
