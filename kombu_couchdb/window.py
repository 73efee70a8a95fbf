"""What one queue is known to hold that could be claimed: read ahead from the view, or told by the feed.

No message that is planned for later is kept here, only the date of the next one. Where several consumers serve a queue,
each item has one that goes first (`workitem.turn`); the others look at it again before they try it.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from . import workitem
from .client import Document, Row
from .store import HORIZON, Store

__all__ = ['Window']

#: How long a consumer leaves a new item to each of those that go before it, in seconds.
_STAGGER = 0.1

#: How long a consumer reads on in a long queue before it looks at its head again, in seconds: a message of higher
#: priority waits no longer than this.
_LOOK = 1.0

#: How many rows of the head it looks at.
_HEAD = 16

#: So many items of others are looked at one by one.
_FEW = 32

#: How many items are read at first, and at least; who takes them fast reads more at a time.
_LEAST = 128


@dataclass(order=True)
class _Candidate:
    order: tuple[int, int, float, str]
    at: float = field(compare=False)  # not before this monotonic time
    doc: Document | None = field(compare=False, default=None)  # None: to be read before it is claimed
    seen: float = field(compare=False, default_factory=time.monotonic)

    @property
    def foreign(self) -> bool:
        return self.order[1] > 0


class Window:
    """The candidates of one queue, next first."""

    def __init__(self, store: Store, queue: str, read_ahead: int) -> None:
        self._store, self._queue, self._read_ahead = store, queue, read_ahead
        self._candidates: dict[str, _Candidate] = {}
        self._taken = 0
        self._last: Row | None = None  # where to read on
        self._looked = self._sifted = float('-inf')
        self._share_only = False  # whether what others go first for is left to them
        self._place = (0, 1)
        self._quiet_until = float('-inf')
        #: Whether the view may hold more than this window knows.
        self.dirty = True
        #: When the next item that is planned for later is due: the server's time, or None.
        self.next_due: float | None = None

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def outdated(self) -> bool:
        """Whether the view should be read before anything more is claimed."""
        return self.dirty and (not self._candidates or time.monotonic() - self._looked > _LOOK)

    def settle(self, place: tuple[int, int]) -> None:
        """Note that this consumer is at `place`: its position and how many serve the queue."""
        if place != self._place:
            # Who goes first for an item has changed. All must know it, and look again, before they claim on.
            self._place, self._quiet_until = place, time.monotonic() + _STAGGER
            for candidate in self._candidates.values():
                rank, _, date, doc_id = candidate.order
                candidate.order, candidate.doc = (rank, workitem.turn(doc_id, *place), date, doc_id), None

    def refill(self) -> None:
        """Read the view; `dirty` tells whether it holds still more.

        A long queue is read on from where the last read ended, since its head is what was claimed just now.
        """
        alone = self._place[1] <= 1
        limit = min(self._read_ahead, max(_LEAST * self._place[1], 4 * self._taken))
        if self._last is not None and time.monotonic() - self._looked > _LOOK:
            self._look_at_head()
            if self._candidates:
                return
        rows = self._store.ready(self._queue, limit, docs=alone, after=self._last)
        if self._last is None:
            self._looked = time.monotonic()
            self.dirty = len(rows) >= limit
            self.next_due = None if self.dirty else self._store.next_due(
                self._queue, self._store.client.clock.now() + HORIZON)
        self._candidates, self._taken = {}, 0
        self._last = rows[-1] if len(rows) >= limit else None
        for row in rows:
            doc = row.get('doc') if alone else None
            if doc is not None or not alone:
                self._add(row['id'], int(row['key'][1]), float(row['key'][2]), doc)
        self._share_only = self._last is not None and any(not c.foreign for c in self._candidates.values())

    def _look_at_head(self) -> None:
        self._looked = time.monotonic()
        rows = self._store.ready(self._queue, _HEAD, docs=False)
        new = [row for row in rows if row['id'] not in self._candidates]
        for row in new:
            self._add(row['id'], int(row['key'][1]), float(row['key'][2]), None)
        if len(new) == _HEAD:
            self._candidates, self._last = {}, None  # more is new there than was looked at: read from the head again

    def offer(self, doc: Document) -> None:
        """Take in an item that the feed told of."""
        date = doc.get('date')
        if isinstance(date, (int, float)) and date > self._store.client.clock.now() + HORIZON:
            self.next_due = date if self.next_due is None else min(date, self.next_due)
            return
        self._offer(doc)

    def _offer(self, doc: Document) -> None:
        date = doc.get('date')
        rank = workitem.rank(doc['priority']) if isinstance(doc.get('priority'), int) else workitem.HIGHEST
        key = date if date is not None else doc.get('published')
        self._add(doc['_id'], rank, key if isinstance(key, (int, float)) else 0.0, doc)

    def take(self, count: int) -> list[Document]:
        """Return up to `count` documents to be claimed now, next first; they are no candidates any more."""
        now, taken = time.monotonic(), list[Document]()
        while len(taken) < count and self._candidates and now >= self._quiet_until:
            eligible = sorted(c for c in self._candidates.values() if c.at <= now and not (self._share_only and c.foreign))
            chosen = list(itertools.takewhile(lambda c: not c.foreign, eligible))[:count - len(taken)]
            if not chosen and not taken:
                # Nothing of its own: a few of those that others left lying, which they may be after themselves just now.
                eligible = self._still_there(eligible)
                chosen = eligible[:max(1, count // self._place[1])]
            if not chosen:
                break
            for candidate in chosen:
                del self._candidates[candidate.order[3]]
            # What stood here for a while may have been taken by those that go next for it.
            unread = [c for c in chosen if c.doc is None or (self._place[1] > 1 and now - c.seen > _STAGGER)]
            for candidate, doc in zip(unread, self._store.client.fetch([c.order[3] for c in unread]), strict=True):
                candidate.doc = doc
            for doc in (c.doc for c in chosen if c.doc):
                if not workitem.is_waiting(doc):
                    continue
                date = doc.get('date')
                if isinstance(date, (int, float)) and date > self._store.client.clock.now():
                    self._offer(doc)
                else:
                    taken.append(doc)
        self._taken += len(taken)
        return taken

    def _still_there(self, others: list[_Candidate]) -> list[_Candidate]:
        """Return those of many candidates that others went first for and did not take; the rest are no candidates any more.

        One read of the view (12 µs a row, measured) instead of their documents (185 µs each), a few at a time.
        """
        now = time.monotonic()
        if len(others) <= _FEW or now - self._sifted < _STAGGER:
            return others
        self._sifted = now
        rows = self._store.ready(self._queue, self._read_ahead, docs=False)
        if len(rows) >= self._read_ahead:
            return others  # the queue is too long for that
        there = {row['id'] for row in rows}
        for candidate in others:
            if candidate.order[3] not in there:
                del self._candidates[candidate.order[3]]
                self.dirty = True  # in a cluster the view may lack what is new: it is read once more in the end
        return [candidate for candidate in others if candidate.order[3] in there]

    def clear(self) -> None:
        """Forget everything: it must be read anew."""
        self._candidates, self._last, self.dirty, self.next_due = {}, None, True, None

    def wake_at(self) -> float | None:
        """Return the monotonic time at which something may become claimable without news, or None."""
        times = [c.at for c in self._candidates.values() if not (self._share_only and c.foreign)]
        times = [max(at, self._quiet_until) for at in times]
        if self.next_due is not None:
            times.append(time.monotonic() + self.next_due - self._store.client.clock.now())
        return min(times, default=None)

    @property
    def is_due(self) -> bool:
        """Whether something that was planned for later is due by now, and must be read."""
        return self.next_due is not None and self.next_due <= self._store.client.clock.now()

    def _add(self, doc_id: str, rank: int, date: float, doc: Document | None) -> None:
        turn = workitem.turn(doc_id, *self._place)
        due: Any = doc.get('date') if doc else None
        wait = due - self._store.client.clock.now() if isinstance(due, (int, float)) else 0.0
        at = time.monotonic() + max(wait, 0.0) + turn * _STAGGER
        self._candidates[doc_id] = _Candidate((rank, turn, date, doc_id), at, None if turn else doc)
