"""What one queue is known to hold that could be claimed: read ahead from the view, or told by the feed.

No message that is planned for later is kept here, only the date of the next one. Where several consumers serve a queue,
each item has one that goes first (`workitem.turn`); the others look at it again before they try it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from . import workitem
from .client import Document, Row
from .store import HORIZON, Store

__all__ = ['Window']

#: How long a consumer leaves a new item to each of those that go before it, in seconds.
_STAGGER = 0.1

#: How long a consumer reads on in a long queue before it looks at its head again, in seconds. It sees the index as it stands, and
#: has it brought up to date for the next look. Several take turns in that; should the others be busy, it does so when the
#: second has passed for each of them. So alone a message of higher priority waits for two seconds.
_LOOK, _OLD = 1.0, 1.5

#: What was read is no news at the head for so long, in seconds, though others may not have claimed their share of it yet, and
#: though the index may not know that it is claimed.
_STALE = 5.0

#: How many rows of the head it looks at.
_HEAD = 16

#: So many items of others are looked at one by one.
_FEW = 32

#: How many items are read at first, and at least; who takes them fast reads more at a time.
_LEAST = 128

#: So many documents are read in one request, for those that are claimed next: at first, and at the most, if they are small: no
#: more than so many characters of bodies, if they are as large as those read last.
_FIRST, _DOCUMENTS, _CHARACTERS = 8, 128, 1_000_000


@dataclass
class _Candidate:
    order: tuple[int, int, float, str]
    at: float  # not before this monotonic time
    doc: Document | None = None  # None: to be read before it is claimed
    seen: float = field(default_factory=time.monotonic)

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
        self._looked = self._sifted = self._refreshed = float('-inf')
        self._share_only = False  # whether what others go first for is left to them
        self._place = (0, 1)
        self._documents = _FIRST
        self._known: dict[str, float] = {}  # ids that were read a short time ago, with the monotonic time
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
            if place[1] <= self._place[1]:
                self._last, self._known = None, {}  # somebody is gone: what was left to him is found at the head only
            self._place, self._quiet_until = place, time.monotonic() + _STAGGER
            for candidate in self._candidates.values():
                rank, _, date, doc_id = candidate.order
                candidate.order, candidate.doc = (rank, workitem.turn(doc_id, *place), date, doc_id), None

    def refill(self) -> None:
        """Read the view; `dirty` tells whether it holds still more.

        A long queue is read on from where the last read ended, since its head is what was claimed just now.
        """
        limit = min(self._read_ahead, max(_LEAST * self._place[1], 4 * self._taken))
        if self._last is not None and time.monotonic() - self._looked > _LOOK:
            self._look_at_head()
            if self._candidates:
                return
        rows = self._store.ready(self._queue, limit, after=self._last, update='true' if self._last is None else 'false')
        if self._last is None:
            self._looked = self._refreshed = time.monotonic()
            self.dirty = len(rows) >= limit
            self.next_due = None if self.dirty else self._store.next_due(
                self._queue, self._store.client.clock.now() + HORIZON)
        self._candidates, self._taken = {}, 0
        self._last = rows[-1] if len(rows) >= limit else None
        for row in rows:
            self._add(row['id'], int(row['key'][1]), float(row['key'][2]), None)
        self._remember(row['id'] for row in rows)
        self._share_only = self._last is not None and any(not c.foreign for c in self._candidates.values())

    def _look_at_head(self) -> None:
        self._looked = time.monotonic()
        # The index is brought up to date by one consumer a second: it costs as much as the claims if each does so.
        position, members = self._place
        refresh = (int(self._store.client.clock.now()) % members == position
                   or self._looked - self._refreshed > _OLD * members)
        if refresh:
            self._refreshed = self._looked
        rows = self._store.ready(self._queue, _HEAD, update='lazy' if refresh else 'false')
        self._remember(())
        known = self._known.keys() | self._candidates.keys()
        new = [row for row in rows if row['id'] not in known]
        for row in new:
            self._add(row['id'], int(row['key'][1]), float(row['key'][2]), None)
        if len(new) == _HEAD:
            self._candidates, self._last = {}, None  # more is new there than was looked at: read from the head again

    def _remember(self, ids: Iterable[str]) -> None:
        """Note that these were read just now, and forget what is no news no more."""
        now = time.monotonic()
        self._known = {doc_id: since for doc_id, since in self._known.items() if now - since <= _STALE} | dict.fromkeys(ids, now)

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
            eligible = sorted((c for c in self._candidates.values() if c.at <= now and not (self._share_only and c.foreign)),
                              key=lambda candidate: candidate.order)
            own = list(itertools.takewhile(lambda c: not c.foreign, eligible))
            chosen, own = own[:count - len(taken)], own[count - len(taken):]
            if not chosen and not taken:
                # Nothing of its own: a few of those that others left lying, which they may be after themselves just now.
                eligible = self._still_there(eligible)
                chosen = eligible[:max(1, count // self._place[1])]
            if not chosen:
                break
            for candidate in chosen:
                del self._candidates[candidate.order[3]]
            self._read(chosen, own)
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

    def _read(self, chosen: list[_Candidate], following: list[_Candidate]) -> None:
        """Read the documents that are claimed now, as far as they are not known, and of some that follow in the same request."""
        now = time.monotonic()
        # What stood here for a while may have been taken by those that go next for it.
        contested = self._place[1] > 1 and not self._share_only
        unread = [c for c in chosen if c.doc is None or (contested and now - c.seen > _STAGGER)]
        if not unread:
            return
        count = self._documents
        unread += itertools.islice((c for c in following if c.doc is None), max(0, count - len(unread)))
        self._documents = max(1, count // 2)  # should it take longer than a request may, the next try reads fewer
        found = self._store.client.fetch([candidate.order[3] for candidate in unread])
        for candidate, doc in zip(unread, found, strict=True):
            candidate.doc, candidate.seen = doc, now
        largest = max((workitem.size(doc) for doc in found if doc), default=0)
        self._documents = max(1, min(2 * max(count, len(unread)), _DOCUMENTS, _CHARACTERS // max(1, largest)))

    def _still_there(self, others: list[_Candidate]) -> list[_Candidate]:
        """Return those of many candidates that others went first for and did not take; the rest are no candidates any more.

        One read of the view instead of their documents, a few at a time: a row costs the server an eighth of a document.
        """
        now = time.monotonic()
        if len(others) <= _FEW or now - self._sifted < _STAGGER:
            return others
        self._sifted = now
        rows = self._store.ready(self._queue, self._read_ahead)
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
        self._candidates, self._known, self._last, self.dirty, self.next_due = {}, {}, None, True, None

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
