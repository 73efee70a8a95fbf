"""The messages of one queue that could be claimed: read ahead from the view, or told by the feed. No I/O.

No message that is planned for later is kept here, only the date of the next one. Where several consumers serve a queue,
each item has one that goes first (`peers.Turns`); the others look at it again before they try it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from ..design.rows import WaitingRow
from ..documents import workitem
from ..leases.peers import Turns
from ..queues.waiting import HORIZON_SECONDS, Page
from .paging import Paging, Reading
from .probes import STAGGER_SECONDS, Candidate, Probes

__all__ = ['Candidate', 'QueueCandidates']

#: How many of the consumers that come before have a whole `STAGGER_SECONDS`, and how long each further one has, in seconds. So not
#: all further consumers try a message at once.
_MAX_STAGGERED, _MOMENT_SECONDS = 5, 0.01

#: At most this many further consumers have their moment: any member may write Consumer documents without a consumer.
_MAX_MOMENTS = 30

#: After a consumer came or went, all consumers pause for `STAGGER_SECONDS`, but not again within this time, in seconds.
_MIN_PAUSE_INTERVAL_SECONDS = 1.0

#: In a queue with more consumers than this, those that were never seen to claim anything count as busy.
_MANY_CONSUMERS = 64

#: If more messages of other consumers than this are left, the head is read again to find those that still exist.
_MANY_LEFT = 32


class QueueCandidates:
    """The candidates of one queue, next first."""

    def __init__(self, clock: ServerClock, queue: str, read_ahead: int) -> None:
        self._clock, self._read_ahead, self._paging = clock, read_ahead, Paging(clock, queue, read_ahead)
        self._candidates: dict[str, Candidate] = {}
        self._sorted: list[Candidate] | None = []
        self._taken = 0
        self._sifted = float('-inf')
        self._sifting = False  # whether the head is read to see which of many candidates are still there
        self._share_only = False  # whether what others go first for is left to them
        self._turns = Turns()
        #: Those of the others that were seen to claim something.
        self._seen: set[str] = set()
        self._probes = Probes()
        self._quiet_until = float('-inf')
        self._stale = True
        #: When the next item that is planned for later is due: the server's time, or None.
        self.next_due: float | None = None

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def outdated(self) -> bool:
        """Whether the view should be read before anything more is claimed."""
        return self._stale and (not self._candidates or self._paging.is_old)

    @property
    def is_short(self) -> bool:
        """Whether the view should be read now: it is outdated, or nothing of what was read can be claimed."""
        return self.outdated or (self._stale and not self.has_claimable and time.monotonic() >= self._quiet_until)

    @property
    def is_stale(self) -> bool:
        """Whether the view may hold candidates that are not known here."""
        return self._stale

    def mark_stale(self) -> None:
        """Note that the view may hold candidates that are not known here."""
        self._stale = True

    # -- the other consumers

    def settle(self, own: str, names: Sequence[str]) -> None:
        """Note who consumes the queue, this consumer included."""
        if (own, tuple(names)) == (self._turns.own, self._turns.names):
            return
        if len(names) <= len(self._turns) and self._turns.own:
            self._paging.forget()  # somebody is gone: what was left to it is found at the head only
        alone_before = len(self._turns) == 1
        self._seen &= {*names}
        unseen = {*names} - self._seen if len(names) > _MANY_CONSUMERS else set[str]()
        self._turns = Turns(names, own, self._turns.busy | unseen)
        if len(names) > 1 or not alone_before:
            # Who goes first for an item has changed. All must know it, and look again, before they claim on.
            now = time.monotonic()
            for candidate in self._candidates.values():
                candidate.doc = None
            # Somebody who comes and goes all the time must not keep all from claiming.
            is_news = now - self._quiet_until >= _MIN_PAUSE_INTERVAL_SECONDS
            self._quiet_until = now + STAGGER_SECONDS if is_news else self._quiet_until
            self._order(since=now if is_news else None)

    def won(self, doc_id: str) -> None:
        """Note that an item was claimed here: whoever went before has left it."""
        if len(self._turns) > 1:
            first = self._probes.won(doc_id)
            if self._turns.note(busy=self._turns.before(doc_id) if first is None else [first]):
                self._order()

    def lost(self, doc_id: str, to: str | None = None) -> None:
        """Note that another consumer has claimed an item, `to` if that is known: it is not busy, then."""
        self._probes.lost(doc_id)
        before = [to] if to else self._turns.before(doc_id)
        # Of many it may be any: one of them is given its turn again, and the next item of those that claim shows who it was.
        idle = before if len(before) <= _MAX_STAGGERED else before[:1]
        self._seen.update(idle)
        if len(self._turns) > 1 and self._turns.note(idle=idle):
            self._order()

    def _order(self, since: float | None = None) -> None:
        for candidate in self._candidates.values():
            candidate.turn = self._turns.idle_before(candidate.id)
            if since is not None:
                candidate.since = max(candidate.since, since)
            candidate.at = candidate.since + self._wait(candidate.id)
        self._sorted = None

    def _wait(self, doc_id: str) -> float:
        turn = self._turns.idle_before(doc_id)
        if not turn:
            # One that is taken for busy, and is not, has a moment, so that it is seen to claim.
            return _MOMENT_SECONDS if self._turns.busy and self._turns.first(doc_id) in self._turns.busy else 0.0
        return (
            min(turn, _MAX_STAGGERED) * STAGGER_SECONDS + max(0, turn - _MAX_STAGGERED) % _MAX_MOMENTS * _MOMENT_SECONDS
        )

    # -- reading

    def reading(self) -> Reading:
        """Return what to read next."""
        return self._paging.next(self._turns, self._taken)

    def absorb(self, reading: Reading, page: Page) -> bool:
        """Take in what was read; tell whether that will do: if not, another page is to be read."""
        rows = self._paging.read(reading, page)
        if reading.is_look:
            new = [row for row in rows if row.id not in self._candidates]
            for row in new:
                self._add_row(row)
            if self._paging.is_flooded(len(new)):
                self._candidates, self._sorted = {}, None
                self._paging.last = None
            return bool(self._candidates)
        if reading.is_head:
            # What is gone of those that are sifted may be what this copy of the index lacks: the queue is read once more.
            gone = self._sifting and not self._candidates.keys() <= {row.id for row in page.rows}
            self._stale, self._sifting, self.next_due = page.last is not None or gone, False, page.next_due
        before, self._candidates, self._sorted, self._taken = self._candidates, {}, None, 0
        if self._share_only and self._probes.wants_more:
            for candidate in before.values():
                if candidate.turn:
                    self._probes.note(self._turns.first_idle(candidate.id), candidate)
        for row in rows:
            self._add_row(row, before[row.id].since if row.id in before else None)
        self._share_only = page.last is not None and any(not c.turn for c in self._candidates.values())
        return True

    # -- candidates

    def offer(self, doc: Document) -> None:
        """Take in an item that the feed told of."""
        date = doc.get('date')
        due = float(date) if isinstance(date, (int, float)) else None
        if due is not None and due > self._clock.now() + HORIZON_SECONDS:
            self.next_due = due if self.next_due is None else min(due, self.next_due)
            return
        rank = workitem.rank(doc['priority']) if isinstance(doc.get('priority'), int) else workitem.HIGHEST
        key = date if date is not None else doc.get('published')
        self._add(doc['_id'], rank, key if isinstance(key, (int, float)) else 0.0, due=due, doc=doc)

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
    ) -> None:
        now = time.monotonic()
        if since is None or due is not None:
            since = now + max(0.0, due - self._clock.now()) if due is not None else now
        wait = self._wait(doc_id)
        self._candidates[doc_id] = Candidate(
            doc_id, rank, date, self._turns.idle_before(doc_id), since, since + wait, now, None if wait else doc
        )
        self._sorted = None

    def choose(self, count: int, *, others: bool) -> list[Candidate]:
        """Take out up to `count` candidates to be claimed now, next first.

        If there is none of its own, and `others` is true: a few of those that others left, which they may be after just now.
        """
        now = time.monotonic()
        if count <= 0 or not self._candidates or now < self._quiet_until:
            return []
        chosen = self._probes.take(count)
        chosen += itertools.islice(self._own(), count - len(chosen))
        if not chosen and others:
            eligible = list(self._eligible())
            if (
                len(eligible) > _MANY_LEFT
                and now - self._sifted >= STAGGER_SECONDS
                and len(self._candidates) < self._read_ahead
            ):
                self._sifted = now
                self._sifting = self._stale = True
                self._paging.restart()
                return []
            chosen = eligible[: max(1, count // self._turns.idle)]
        for candidate in chosen:
            self._candidates.pop(candidate.id, None)
        if chosen:
            out = set(map(id, chosen))
            self._sorted = [candidate for candidate in self._line() if id(candidate) not in out]
        return chosen

    def unread(self, count: int) -> list[Candidate]:
        """Return up to `count` of those whose documents are needed next, and not known."""
        return list(itertools.islice((candidate for candidate in self._own() if candidate.doc is None), count))

    def is_conflicted(self, candidate: Candidate) -> bool:
        """Tell whether others may have claimed a candidate since its document was read: it stood here for a while."""
        return len(self._turns) > 1 and not self._share_only and time.monotonic() - candidate.seen > STAGGER_SECONDS

    def accept(self, chosen: Iterable[Candidate]) -> list[Document]:
        """Return the documents of those that can be claimed now; what is planned anew is a candidate again."""
        taken: list[Document] = []
        for doc in (candidate.doc for candidate in chosen if candidate.doc):
            if not workitem.is_waiting(doc):
                if (by := workitem.claimant(doc)) is not None:
                    self.lost(doc['_id'], by)
            elif workitem.is_due(doc, self._clock.now()):
                taken.append(doc)
            else:
                self.offer(doc)
        self._taken += len(taken)
        return taken

    @property
    def has_claimable(self) -> bool:
        """Whether something could be claimed now."""
        return time.monotonic() >= self._quiet_until and next(self._eligible(), None) is not None

    def _eligible(self) -> Iterator[Candidate]:
        """Yield what could be claimed now, next first."""
        now = time.monotonic()
        return (c for c in self._line() if c.at <= now and not (self._share_only and c.turn))

    def _line(self) -> list[Candidate]:
        if self._sorted is None:
            self._sorted = sorted(self._candidates.values(), key=lambda candidate: candidate.order)
        return self._sorted

    def _own(self) -> Iterator[Candidate]:
        """Yield of that what comes before the first item that another consumer goes first for."""
        return itertools.takewhile(lambda candidate: not candidate.turn, self._eligible())

    def clear(self) -> None:
        """Forget everything: it must be read anew."""
        self._candidates, self._sorted, self._stale, self.next_due = {}, [], True, None
        self._probes.clear()
        self._paging.forget()

    def wake_at(self) -> float | None:
        """Return the monotonic time at which something may become claimable without news, or None."""
        times = [max(c.at, self._quiet_until) for c in self._candidates.values() if not (self._share_only and c.turn)]
        if self.next_due is not None:
            times.append(time.monotonic() + self.next_due - self._clock.now())
        if self._stale and time.monotonic() < self._quiet_until:
            times.append(self._quiet_until)
        return min(times, default=None)

    @property
    def is_due(self) -> bool:
        """Whether something that was planned for later is due by now, and must be read."""
        return self.next_due is not None and self.next_due <= self._clock.now()
