"""The pages of a queue that a consumer reads: from the head, further on, or a look at the head of a long queue."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..couchdb.clock import ServerClock
from ..design.rows import WaitingRow
from ..leases.peers import Turns
from ..queues.waiting import BEGIN, Ask, Cursor, Page

__all__ = ['Paging', 'Reading']

#: How long a consumer reads on in a long queue before it looks at its head again, in seconds. It sees the index as it stands, and
#: has it brought up to date for the next look. Several take turns in that; should the others be busy, it does so when the
#: second has passed for each of them. So alone a message of higher priority waits for two seconds.
_LOOK, _OLD = 1.0, 1.5

#: Of more consumers than so many several bring the index up to date in the same second: some may only be said to be there.
_REFRESHING = 8

#: What was read is no news at the head for so long, in seconds, though others may not have claimed their share of it yet, and
#: though the index may not know that it is claimed.
_STALE = 5.0

#: How many rows of the head it looks at.
_HEAD = 16

#: How many items are read at first, and at least; who takes them fast reads more at a time.
_LEAST = 128


@dataclass(frozen=True)
class Reading:
    """A page to be read, from the head or further on; `is_look` if only for what is new at the head. `update` is CouchDB's."""

    ask: Ask
    update: str
    is_look: bool = False

    @property
    def is_head(self) -> bool:
        """Whether it replaces all that is known of the queue."""
        return not self.is_look and self.ask.after == BEGIN


class Paging:
    """How far one queue was read. A long queue is read on from where the last page ended: its head was claimed just now."""

    def __init__(self, clock: ServerClock, queue: str, read_ahead: int) -> None:
        self._clock, self._queue, self._read_ahead = clock, queue, read_ahead
        #: Where to read on; None: from the head.
        self.last: Cursor | None = None
        self._known: dict[str, float] = {}  # ids that were read a short time ago, with the monotonic time
        self._looked = self._refreshed = float('-inf')

    @property
    def is_old(self) -> bool:
        """Whether the head was last looked at too long ago."""
        return time.monotonic() - self._looked > _LOOK

    def restart(self) -> None:
        """Read from the head next."""
        self.last, self._looked = None, float('-inf')

    def forget(self) -> None:
        """Read from the head next, and take nothing there for known."""
        self.last, self._known = None, {}

    def next(self, turns: Turns, taken: int) -> Reading:
        """Return what to read; `taken` is how many items of the last page were claimed."""
        if self.last is not None and self.is_old:
            return self._look(turns)
        limit = min(self._read_ahead, max(_LEAST * len(turns), 4 * taken))
        if self.last is None:
            self._looked = self._refreshed = time.monotonic()
            return Reading(Ask(self._queue, limit), 'true')
        return Reading(Ask(self._queue, limit, self.last), 'false')

    def _look(self, turns: Turns) -> Reading:
        self._looked = time.monotonic()
        # The index is brought up to date by one consumer a second: it costs as much as the claims if each does so.
        count = min(len(turns), _REFRESHING)
        refresh = (
            int(self._clock.now()) % count == turns.position % count or self._looked - self._refreshed > _OLD * count
        )
        if refresh:
            self._refreshed = self._looked
        return Reading(Ask(self._queue, _HEAD), 'lazy' if refresh else 'false', is_look=True)

    def read(self, reading: Reading, page: Page) -> list[WaitingRow]:
        """Note that a page was read; return those of its rows that are news."""
        if reading.is_look:
            self._remember(())
            news = [row for row in page.rows if row.id not in self._known]
        else:
            # Of what is planned, the index may not know yet that it was claimed.
            news = [row for row in page.rows if reading.is_head or not (row.planned and row.id in self._known)]
            self.last = page.last
            self._remember(row.id for row in page.rows)
        return news

    def is_flooded(self, news: int) -> bool:
        """Tell whether a look found so much news that there is more behind it."""
        return news >= _HEAD

    def _remember(self, ids: Iterable[str]) -> None:
        """Note that these were read just now, and forget what is no news no more."""
        now = time.monotonic()
        self._known = {doc_id: since for doc_id, since in self._known.items() if now - since <= _STALE} | dict.fromkeys(
            ids, now
        )
