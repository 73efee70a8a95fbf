"""Candidates: the messages of one queue that could be claimed, read ahead or reported by the changes feed. No I/O.

A message that is due in more than `HORIZON_SECONDS` is no candidate; only the due date of the next one is kept. If
several consumers serve a queue, each message has one consumer that may claim it first (`peers.Turns`). The others wait,
and read the document again before they claim it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from ..design.rows import WaitingRow
from ..documents import workitem
from ..documents.rates import waits_for_slot
from ..queues.waiting import HORIZON_SECONDS, Page
from .claim_order import ClaimOrder
from .ending import MANY_LEFT, Ending
from .paging import Paging, Reading
from .probes import STAGGER_SECONDS, Candidate, Probes

__all__ = ['Candidate', 'QueueCandidates']

#: After a consumer joined or left a queue, the others claim nothing for `STAGGER_SECONDS`. They do not pause again
#: until this number of seconds after the end of the last pause.
_MIN_PAUSE_INTERVAL_SECONDS = 1.0

#: If other consumers serve the queue and its messages are all known, this consumer claims beyond its prefetch count
#: only while it leaves this many that are its own share: the others have as many, and need none of these soon.
_MIN_OWN_LEFT = 64


class QueueCandidates:
    """The candidates of one queue, sorted by `Candidate.order`."""

    def __init__(self, clock: ServerClock, queue: str, read_ahead: int) -> None:
        self._clock, self._read_ahead, self._paging = clock, read_ahead, Paging(clock, queue, read_ahead)
        self._candidates: dict[str, Candidate] = {}
        self._sorted: list[Candidate] | None = []
        self._claimed = 0  # how many messages of the last page were claimed
        self._verified_at = float('-inf')
        self._verifying = False  # whether the next read of the head is to show which candidates still exist
        self._share_only = False  # whether this consumer leaves to the others what they may claim first
        self._order, self._ending = ClaimOrder(), Ending()
        self._probes = Probes()
        self._paused_until = float('-inf')
        self._stale = True
        #: The due date of the next message that is scheduled for later, by the server's clock, or None.
        self.next_due: float | None = None

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def is_outdated(self) -> bool:
        """Whether the view should be read before anything more is claimed."""
        return self._stale and (not self._candidates or self._paging.is_old)

    @property
    def needs_page(self) -> bool:
        """Whether the view should be read now: it is outdated, or it is stale and no candidate can be claimed."""
        may_read = time.monotonic() >= self._paused_until and not self._ending.rests
        return self.is_outdated or (self._stale and may_read and not self.has_claimable)

    @property
    def reads_head_next(self) -> bool:
        """Whether the next read of the view is that of the head: after it, the candidates may be complete."""
        return self._stale and self._paging.last is None

    @property
    def is_stale(self) -> bool:
        """Whether the view may have messages that are no candidates yet."""
        return self._stale

    def mark_stale(self) -> None:
        """Note that the view may have messages that are no candidates yet."""
        self._stale = True

    # -- the other consumers

    @property
    def is_contended(self) -> bool:
        """Whether all messages are known, and other consumers that are not known to be busy may need them."""
        return self._order.turns.idle > 1 and not self._stale

    def most_ahead(self, count: int) -> int:
        """Return how many of `count` messages may be claimed now if this consumer claims beyond its prefetch count."""
        if not self.is_contended:
            return count
        return len(list(itertools.islice(self._own(), count + _MIN_OWN_LEFT))) - _MIN_OWN_LEFT

    @property
    def leaves_none(self) -> bool:
        """Whether consumers that are not known to be busy may find nothing to claim."""
        return self.is_contended and next(self._own(), None) is None

    def set_consumers(self, own: str, names: Sequence[str]) -> None:
        """Set the consumers of the queue: `names`, with this consumer (`own`) among them."""
        turns = self._order.turns
        if (own, tuple(names)) == (turns.own, turns.names):
            return
        if len(names) <= len(turns) and turns.own:
            # A consumer has left. The messages that it had, or could claim first, are at the head of the queue.
            self._paging.forget()
        alone_before = len(turns) == 1
        self._order.set_consumers(own, names)
        if len(names) > 1 or not alone_before:
            # The claim order has changed. Some consumers may not know that yet and claim in the old order: pause, and
            # read the documents again.
            now = time.monotonic()
            for candidate in self._candidates.values():
                candidate.doc = None
            # A consumer that comes and goes all the time must not stop the others from claiming.
            is_news = now - self._paused_until >= _MIN_PAUSE_INTERVAL_SECONDS
            self._paused_until = now + STAGGER_SECONDS if is_news else self._paused_until
            self._update_turns(since=now if is_news else None)

    def won(self, doc_id: str) -> None:
        """Note that this consumer claimed a message: the consumers that could claim it first count as busy."""
        if len(self._order.turns) > 1 and self._order.won(doc_id, self._probes.won(doc_id)):
            self._update_turns()

    def lost(self, doc_id: str, to: str | None = None) -> None:
        """Note that another consumer (`to`, if it is known) claimed a message: it no longer counts as busy."""
        self._probes.lost(doc_id)
        if self._order.lost(doc_id, to):
            self._update_turns()

    def _update_turns(self, since: float | None = None) -> None:
        for candidate in self._candidates.values():
            candidate.turn, wait = self._order.of(candidate.id)
            if since is not None:
                candidate.since = max(candidate.since, since)
            candidate.at = candidate.since + wait
        self._sorted = None

    # -- reading

    def next_reading(self) -> Reading:
        """Return what to read next."""
        return self._paging.next(self._order.turns, self._claimed)

    def add_page(self, reading: Reading, page: Page) -> bool:
        """Add the messages of a page; return False if another page must be read."""
        rows = self._paging.read(reading, page)
        if reading.is_look:
            new = [row for row in rows if row.id not in self._candidates]
            for row in new:
                self._add_row(row)
            if self._paging.is_flooded(len(new)):
                self._candidates, self._sorted = {}, None
                self._paging.last = None
            # If all candidates are left to others, read the next page in the same cycle.
            return self.has_claimable if self._share_only else bool(self._candidates)
        if reading.is_head:
            # The page lacks some of the candidates: they were claimed, or this copy of the index does not have them
            # yet. The queue stays stale, so it is read again.
            gone = self._verifying and not self._candidates.keys() <= {row.id for row in page.rows}
            self._stale, self._verifying, self.next_due = page.last is not None or gone, False, page.next_due
        before, self._candidates, self._sorted, self._claimed = self._candidates, {}, None, 0
        if self._share_only and self._probes.wants_more:
            for candidate in before.values():
                if candidate.turn:
                    self._probes.note(self._order.first_idle(candidate.id), candidate)
        self._order.read(rows)
        for row in rows:
            self._add_row(row, before[row.id].since if row.id in before else None)
        self._share_only = page.last is not None and any(not c.turn for c in self._candidates.values())
        if reading.is_head:
            self._verified_at = time.monotonic()  # what others have claimed is gone
        left_before, left = (sum(c.turn > 0 for c in each.values()) for each in (before, self._candidates))
        self._stale |= self._ending.read(left_before, left, is_end=page.last is None)
        return True

    # -- candidates

    def offer(self, doc: Document, *, own: bool = False) -> None:
        """Add a message with its document: the feed reported it, it was released here, or it is not due yet.

        If it is this consumer's `own`, it waits for no other consumer.
        """
        date = doc.get('date')
        due = float(date) if isinstance(date, (int, float)) else None
        if due is not None and due > self._clock.now() + HORIZON_SECONDS:
            self.next_due = due if self.next_due is None else min(due, self.next_due)
            return
        rank = workitem.rank(doc['priority']) if isinstance(doc.get('priority'), int) else workitem.HIGHEST
        key = date if date is not None else doc.get('published')
        self._add(doc['_id'], rank, key if isinstance(key, (int, float)) else 0.0, due=due, doc=doc, own=own)

    def _add_row(self, row: WaitingRow, since: float | None = None) -> None:
        self._add(row.id, row.rank, row.date, due=row.date if row.planned else None, since=since)

    def _add(
        self,
        doc_id: str,
        rank: int,
        date: float,
        *,
        due: float | None,
        doc: Document | None = None,
        since: float | None = None,
        own: bool = False,
    ) -> None:
        now = time.monotonic()
        if since is None or due is not None:
            since = now + max(0.0, due - self._clock.now()) if due is not None else now
        turn, wait = (0, 0.0) if own else self._order.of(doc_id)
        self._candidates[doc_id] = Candidate(doc_id, rank, date, turn, since, since + wait, now, None if wait else doc)
        self._sorted = None

    def choose(self, count: int, *, others: bool) -> list[Candidate]:
        """Remove and return up to `count` candidates to be claimed now: probes, then those that are this one's share.

        If there are none, and `others` is true: a few candidates that other consumers could claim first and have left.
        Those consumers may be claiming them at this moment.
        """
        now = time.monotonic()
        if count <= 0 or not self._candidates or now < self._paused_until:
            return []
        chosen = self._probes.take(count)
        chosen += itertools.islice(self._own(), count - len(chosen))
        if not chosen and others:
            eligible = list(self._eligible())
            if (
                len(eligible) > MANY_LEFT
                and now - self._verified_at >= STAGGER_SECONDS
                and len(self._candidates) < self._read_ahead
            ):
                self._verified_at = now
                self._verifying = self._stale = True
                self._paging.restart()
                return []
            chosen = eligible[: max(1, count // self._order.turns.idle)]
        for candidate in chosen:
            self._candidates.pop(candidate.id, None)
        if chosen:
            out = set(map(id, chosen))
            self._sorted = [candidate for candidate in self._in_order() if id(candidate) not in out]
        return chosen

    def without_doc(self, count: int) -> list[Candidate]:
        """Return up to `count` candidates whose documents are needed next and have not been read."""
        return list(itertools.islice((candidate for candidate in self._own() if candidate.doc is None), count))

    def may_be_claimed(self, candidate: Candidate) -> bool:
        """Tell whether other consumers may have claimed a candidate since its document was read."""
        return (
            len(self._order.turns) > 1 and not self._share_only and time.monotonic() - candidate.seen > STAGGER_SECONDS
        )

    def claimable(self, chosen: Iterable[Candidate]) -> list[Document]:
        """Return the documents that can be claimed now; messages that are not due yet are passed to `offer` again."""
        taken: list[Document] = []
        for doc in (candidate.doc for candidate in chosen if candidate.doc):
            if not workitem.is_waiting(doc):
                if (by := workitem.claimant(doc)) is not None:
                    self.lost(doc['_id'], by)
            elif waits_for_slot(doc):
                pass  # the index was older than the document
            elif workitem.is_due(doc, self._clock.now()):
                taken.append(doc)
            else:
                self.offer(doc)
        self._claimed += len(taken)
        return taken

    @property
    def has_claimable(self) -> bool:
        """Whether a candidate could be claimed now."""
        return time.monotonic() >= self._paused_until and next(self._eligible(), None) is not None

    def _eligible(self) -> Iterator[Candidate]:
        """Yield the candidates that could be claimed now, sorted by `Candidate.order`."""
        now, own_only = time.monotonic(), self._own_only
        return (c for c in self._in_order() if c.at <= now and not (own_only and c.turn))

    @property
    def _own_only(self) -> bool:
        return self._share_only or self._ending.leaves

    def _in_order(self) -> list[Candidate]:
        if self._sorted is None:
            self._sorted = sorted(self._candidates.values(), key=lambda candidate: candidate.order)
        return self._sorted

    def _own(self) -> Iterator[Candidate]:
        """Yield the candidates that could be claimed now, up to the first that another consumer may claim first."""
        return itertools.takewhile(lambda candidate: not candidate.turn, self._eligible())

    def clear(self) -> None:
        """Forget everything: the queue must be read again."""
        self._candidates, self._sorted, self._stale, self.next_due = {}, [], True, None
        self._probes.clear()
        self._order.clear()
        self._paging.forget()

    def wake_at(self) -> float | None:
        """Return the monotonic time at which, without any change in the database, a message may become claimable."""
        own_only = self._own_only
        times = [max(c.at, self._paused_until) for c in self._candidates.values() if not (own_only and c.turn)]
        if self.next_due is not None:
            times.append(time.monotonic() + self.next_due - self._clock.now())
        if self._stale and time.monotonic() < (again := max(self._paused_until, self._ending.until)):
            times.append(again)
        return min(times, default=None)

    @property
    def is_due(self) -> bool:
        """Whether a message that was scheduled for later is due now, and must be read."""
        return self.next_due is not None and self.next_due <= self._clock.now()
