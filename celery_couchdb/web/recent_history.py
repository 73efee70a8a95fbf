"""The history of tasks and queues of the last day, as pages show it; the room `metrics` reads and writes it."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import CouchDBError

from ..resources.columns import Row
from ..rooms import rooms

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0

#: For how long a reading, or a failed attempt, counts, in seconds.
_FRESH_SECONDS = 60.0

#: How far a reading goes back before the last one, in seconds: a late leader adds to what was read already.
_OVERLAP_SECONDS = 600.0

#: If the newest minute is not older than this, in seconds, the minutes after it are not written yet, and not empty.
_LATE_SECONDS = 180.0


class RecentHours(NamedTuple):
    """What was read of the history."""

    #: The minutes of the last day in which something happened, the oldest first; see `room.Room.read_history`.
    minutes: Sequence[Row]
    #: Up to when the history goes, in seconds since the epoch.
    end: float

    def step(self, minute: Row, seconds: float, count: int) -> int | None:
        """Return in which of the last `count` steps of so many seconds a minute is; None if it was before them."""
        found = count - 1 - int((self.end - MINUTE - minute['date']) // seconds)
        return found if 0 <= found < count else None

    def mean_seconds(self) -> dict[str, float]:
        """Return how long a run of each task took on average."""
        sums = defaultdict[str, Counter[str]](Counter)
        for minute in self.minutes:
            for task, numbers in minute['tasks'].items():
                sums[task].update(numbers)
        runs = {task: found.total() - found['seconds'] for task, found in sums.items()}
        return {task: sums[task]['seconds'] / count for task, count in runs.items() if count}

    def ready(self) -> dict[str, list[float]]:
        """Return the ready messages of each queue at the end of each minute of the last hour."""
        found: dict[str, list[float]] = {}
        for minute in self.minutes:
            if (at := self.step(minute, MINUTE, 60)) is not None:
                for name, numbers in minute['queues'].items():
                    found.setdefault(name, [0.0] * 60)[at] = numbers.get('ready', 0.0)
        return found


class RecentHistory:
    """Reads the history of a broker's database, at most once a minute, and only when a page asks. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._known: RecentHours | None = None
        self._date = 0.0  # the server's time of the last reading
        self._tried_at = float('-inf')

    def read(self) -> RecentHours:
        """Return the history of the last day; without the room, nothing. One request a minute.

        *Raises* the errors of `Client` if nothing was read yet.
        """
        with self._lock:
            if self._known is None or time.monotonic() - self._tried_at >= _FRESH_SECONDS:
                self._tried_at = time.monotonic()
                try:
                    self._known = self._read(self._known.minutes if self._known else ())
                except CouchDBError:
                    if self._known is None:
                        raise
            return self._known

    def _read(self, before: Sequence[Row]) -> RecentHours:
        """Return what was read `before`, and what is new."""
        now = self._client.clock.now()
        hours = min(DAY, now - self._date + _OVERLAP_SECONDS) / HOUR
        minutes = {minute['date']: minute for minute in before}
        for room in rooms():
            minutes |= {minute['date']: minute for minute in room.read_history(self._client, hours)}
        self._date = now
        known = [minutes[date] for date in sorted(minutes) if now - DAY < date <= now]
        newest = known[-1]['date'] if known else 0.0
        end = newest + MINUTE if now - newest < _LATE_SECONDS else now // MINUTE * MINUTE
        # The queues of earlier hours are not shown, and they are the larger part.
        return RecentHours([each if each['date'] > now - 2 * HOUR else {**each, 'queues': {}} for each in known], end)
