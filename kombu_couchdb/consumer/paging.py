"""Paging: which part of a queue is read next: the head, the next page, or a short look at the head of a long queue."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..couchdb.clock import ServerClock
from ..design.rows import WaitingRow
from ..queues.waiting import BEGIN, Ask, Cursor, Page

__all__ = ['Paging', 'Reading']

#: A consumer that reads a long queue page by page looks at the head again after this time, in seconds. CouchDB responds
#: from the index as it is, and updates it after that, if the look asks for it. So in a queue with one consumer a new
#: message of a higher priority may be found only by the second look, after up to two seconds.
_LOOK_SECONDS = 1.0

#: The consumers of a queue take turns to update its index, one in each second. A consumer also does so out of turn if
#: its last update is older than this number of seconds times the number of consumers: turns may be missed.
_REFRESH_SECONDS = 1.5

#: Turns are counted for at most this many consumers. With more, several update the index in the same second: some of
#: the Consumer documents may have no consumer.
_MAX_REFRESH_TURNS = 8

#: For how many seconds a message of an earlier page does not count as new when a look finds it at the head: other
#: consumers may not have claimed it yet, or the index may not show yet that it is claimed.
_KNOWN_SECONDS = 5.0

#: How many rows a look at the head reads.
_LOOK_ROWS = 16

#: How many rows a page has at least for each consumer, but not more than `read_ahead` in all. A consumer that claims
#: many messages reads larger pages.
_MIN_ROWS = 128


@dataclass(frozen=True)
class Reading:
    """A page to be read. `update` is CouchDB's option; `is_look`: only new messages at the head are of interest."""

    ask: Ask
    update: str
    is_look: bool = False

    @property
    def is_head(self) -> bool:
        """Whether the page replaces everything that is known of the queue."""
        return not self.is_look and self.ask.after == BEGIN


class Paging:
    """How far one queue was read. A long queue is read page by page: the messages at its head are claimed by now."""

    def __init__(self, clock: ServerClock, queue: str, read_ahead: int) -> None:
        self._clock, self._queue, self._read_ahead = clock, queue, read_ahead
        #: Where the next page starts; None: at the head.
        self.last: Cursor | None = None
        self._known: dict[str, float] = {}  # by id of a message: the monotonic time at which it was read
        self._looked_at = self._refreshed_at = float('-inf')

    @property
    def is_old(self) -> bool:
        """Whether the head was last read more than `_LOOK_SECONDS` ago."""
        return time.monotonic() - self._looked_at > _LOOK_SECONDS

    def restart(self) -> None:
        """Read from the head next."""
        self.last, self._looked_at = None, float('-inf')

    def forget(self) -> None:
        """Read from the head next, and count all messages there as new."""
        self.last, self._known = None, {}

    def next(self, position: int, consumers: int, claimed: int) -> Reading:
        """Return what to read next.

        `consumers` share the messages, and this one has this `position` among them. `claimed` is how many messages of
        the last page it claimed.
        """
        if self.last is not None and self.is_old:
            return self._look(position, consumers)
        limit = min(self._read_ahead, max(_MIN_ROWS * consumers, 4 * claimed))
        if self.last is None:
            self._looked_at = self._refreshed_at = time.monotonic()
            return Reading(Ask(self._queue, limit), 'true')
        return Reading(Ask(self._queue, limit, self.last), 'false')

    def _look(self, position: int, consumers: int) -> Reading:
        self._looked_at = time.monotonic()
        # One consumer in each second updates the index: if every look did so, that would cost as much as the claims.
        count = min(consumers, _MAX_REFRESH_TURNS)
        refresh = (
            int(self._clock.now()) % count == position % count
            or self._looked_at - self._refreshed_at > _REFRESH_SECONDS * count
        )
        if refresh:
            self._refreshed_at = self._looked_at
        return Reading(Ask(self._queue, _LOOK_ROWS), 'lazy' if refresh else 'false', is_look=True)

    def read(self, reading: Reading, page: Page) -> list[WaitingRow]:
        """Note that a page was read; return its new rows."""
        if reading.is_look:
            self._remember(())
            new = [row for row in page.rows if row.id not in self._known]
        else:
            # The index may not show yet that a scheduled message is claimed.
            new = [row for row in page.rows if reading.is_head or not (row.planned and row.id in self._known)]
            self.last = page.last
            self._remember(row.id for row in page.rows)
        return new

    def is_flooded(self, new: int) -> bool:
        """Tell whether a look found so many new messages that there may be more behind them."""
        return new >= _LOOK_ROWS

    def _remember(self, ids: Iterable[str]) -> None:
        """Note that these messages were read just now, and forget those that count as new again."""
        now = time.monotonic()
        self._known = {
            doc_id: since for doc_id, since in self._known.items() if now - since <= _KNOWN_SECONDS
        } | dict.fromkeys(ids, now)
