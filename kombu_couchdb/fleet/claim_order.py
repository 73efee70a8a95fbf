"""The claim order of one queue: how many consumers may claim a message before this one, and for how long. No I/O.

The number is the *turn* of this consumer for the message. It follows from the id of the message: nobody is asked, and
nothing is written for it. Consumers that know of different consumers may claim the same message; the revision of its
document decides then, and the losers have made a request in vain.

A few messages are for the listeners (see `attention`), since the others do not know of them. If there are more, all
consumers of the queue share them. In a long queue, messages that lie side by side have the same order: to claim and to
delete them together costs CouchDB a fifth less than messages that are scattered over its B-trees (0.79 and 0.98 ms each
with eight consumers, measured on CouchDB 3.5).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from math import log2
from zlib import crc32

from ..design.rows import WaitingRow

#: A page with at least this number of messages is shared among all consumers.
_SHARED = 8

#: The order of a message opens with time: this many seconds after a consumer first saw it, twice as many consumers may
#: claim it; after the same time again, twice as many as then. If it is for the listeners, and if it is for all.
_LISTENER_SECONDS, _SHARE_SECONDS = 0.1, 0.25

#: If the listener that comes first has left messages to others before, it gets only this time to show that it claims
#: again, in seconds.
_MOMENT_SECONDS = 0.01

#: The average number of messages side by side that have the same order. 8 to 64 cost the server the same. With fewer,
#: the shares of the consumers are more equal.
_RUN = 8

#: A queue becomes long with this number of messages for each consumer, and stays long down to the second: consumers
#: that read its end at different times should agree.
_LONG, _SHORT = 32, 8


class ClaimOrder:
    """The order for one consumer of a queue, for its I/O thread alone."""

    def __init__(self) -> None:
        self._own = ''
        self._consumers: Sequence[str] = ('',)
        self._listeners: Sequence[str] = ('',)
        self._busy: set[str] = set()
        #: Whether the messages are shared among all consumers, not only the listeners.
        self.is_shared = False
        self._is_long = False

    def set_consumers(self, own: str, consumers: Sequence[str], listeners: Sequence[str]) -> bool:
        """Set the ids of all consumers of the queue, and of its listeners, both sorted; tell whether that is news.

        `own` is the id of this consumer: one of the consumers, and perhaps one of the listeners.
        """
        before = self._own, self._consumers, self._listeners
        self._own, self._consumers, self._listeners = own, tuple(consumers), tuple(listeners)
        self._busy &= {*listeners}
        return before != (self._own, self._consumers, self._listeners)

    @property
    def position(self) -> int:
        """The place of this consumer among all consumers of the queue."""
        return self._consumers.index(self._own)

    @property
    def consumers(self) -> int:
        """The number of consumers of the queue."""
        return len(self._consumers)

    def read(self, rows: Sequence[WaitingRow]) -> list[str]:
        """Take in the rows of a page, in the order of delivery; return the key of the turn of each (see `turn_of`).

        In a long queue, messages side by side have the same key.
        """
        self.is_shared = len(self._consumers) > 1 and len(rows) >= _SHARED
        self._is_long = len(rows) >= (_SHORT if self._is_long else _LONG) * len(self._consumers)
        keys = [row.id for row in rows]
        end = ''
        # The ids tell where runs end: consumers that read the queue at different times see the same runs.
        for place in reversed(range(len(keys) if self._is_long and self.is_shared else 0)):
            if _hash(keys[place]) >> 16 & _RUN - 1 == 0:
                end = keys[place]
            keys[place] = end or keys[place]
        return keys

    def clear(self) -> None:
        """Forget how many messages there are."""
        self.is_shared = self._is_long = False

    def turn_of(self, key: str) -> tuple[int, float]:
        """Return how many consumers may claim a message before this one, and the seconds until this one may, too.

        `key` is the id of the message, or, if it was read with others, what `read` returned for it.
        """
        if self.is_shared:
            turn = (self.position - _hash(key)) % len(self._consumers)
            return turn, _SHARE_SECONDS * log2(1 + turn)
        before = self._before(key)
        # Consumers that listen without being listeners by rank do not know of each other.
        moment = 0.0 if not before or self._own in self._listeners else random.uniform(0.0, 2 * _MOMENT_SECONDS)
        turn = sum(name not in self._busy for name in before)
        if before and not turn:
            return 0, moment or _MOMENT_SECONDS
        return turn, _LISTENER_SECONDS * log2(1 + turn) + moment

    def won(self, doc_id: str) -> bool:
        """Note that this consumer claimed a message: those that could do so first are busy. Tell if that is news."""
        return not self.is_shared and self._note(busy=self._before(doc_id))

    def lost(self, doc_id: str, to: str | None) -> bool:
        """Note that another consumer (`to`, if it is known) claimed a message: it is not busy. Tell if that is news."""
        return self._note(idle=[to] if to else self._before(doc_id))

    def _note(self, *, busy: Collection[str] = (), idle: Collection[str] = ()) -> bool:
        before = set(self._busy)
        self._busy = (self._busy | {*busy} & {*self._listeners}) - {*idle, self._own}
        return self._busy != before

    def _before(self, doc_id: str) -> list[str]:
        """Return the listeners that may claim a message before this consumer, in order."""
        if not self._listeners:
            return []
        start = _hash(doc_id) % len(self._listeners)
        order = [*self._listeners[start:], *self._listeners[:start]]
        return order[: order.index(self._own)] if self._own in order else order


def _hash(text: str) -> int:
    return crc32(text.encode())
