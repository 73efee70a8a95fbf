"""The messages of one queue that could be claimed: read ahead from the view, or told by the feed. No I/O.

No message that is planned for later is kept here, only the date of the next one. Where several consumers serve a queue,
each item has one that goes first (`peers.Turns`); the others look at it again before they try it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from ..design.rows import WaitingRow
from ..documents import workitem
from ..leases.peers import Turns
from ..queues.waiting import HORIZON, Page
from .paging import Paging, Reading

__all__ = ['Candidate', 'QueueCandidates']

#: How long a consumer leaves a new item to each of those that go before it, in seconds: to the first few so long, to each further
#: one a moment, lest all the others try it at once.
_STAGGER, _FEW_TURNS, _MOMENT = 0.1, 5, 0.01

#: To no more than so many further ones: a Consumer document is no proof of a consumer, and any member may write many of them.
_MOST_TURNS = 30

#: So long, in seconds, after all have waited for a consumer that came or went, nobody waits for the next one.
_PEACE = 1.0

#: Of more consumers than so many those that were never seen to claim anything are taken for busy.
_CROWD = 64

#: How often, in seconds, a consumer tries in a long queue whether the others claim what they go first for: one item of each.
_PROBE = 1.0

#: Of more items of others than so many those that are still there are found by reading the head anew.
_FEW = 32


@dataclass(eq=False)
class Candidate:
    """An item that may be claimed. Without `doc` it is read before that; `turn` is how many consumers go before this one."""

    id: str
    rank: int
    date: float
    turn: int
    since: float  # the monotonic time from which the others have their turns
    at: float  # not before this monotonic time
    seen: float
    doc: Document | None = None

    @property
    def order(self) -> tuple[int, int, float, str]:
        """What candidates are sorted by."""
        return self.rank, self.turn, self.date, self.id

    def note(self, doc: Document | None) -> None:
        """Take in the document as it was read just now."""
        self.doc, self.seen = doc, time.monotonic()


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
        #: Of each of the others an item that it goes first for, those that are tried just now, and when to try again.
        self._left: dict[str, Candidate] = {}
        self._probing: dict[str, str] = {}
        self._probe_at = float('-inf')
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
        return self.dirty and (not self._candidates or self._paging.is_old)

    @property
    def is_short(self) -> bool:
        """Whether the view should be read now: it is outdated, or nothing of what was read can be claimed."""
        return self.outdated or (self.dirty and not self.has_claimable and time.monotonic() >= self._quiet_until)

    # -- the other consumers

    def settle(self, own: str, names: Sequence[str]) -> None:
        """Note who consumes the queue, this consumer included."""
        if (own, tuple(names)) == (self._turns.own, self._turns.names):
            return
        if len(names) <= len(self._turns) and self._turns.own:
            self._paging.forget()  # somebody is gone: what was left to it is found at the head only
        alone_before = len(self._turns) == 1
        self._seen &= {*names}
        unseen = {*names} - self._seen if len(names) > _CROWD else set[str]()
        self._turns = Turns(names, own, self._turns.busy | unseen)
        if len(names) > 1 or not alone_before:
            # Who goes first for an item has changed. All must know it, and look again, before they claim on.
            now = time.monotonic()
            for candidate in self._candidates.values():
                candidate.doc = None
            # Somebody who comes and goes all the time must not keep all from claiming.
            is_news = now - self._quiet_until >= _PEACE
            self._quiet_until = now + _STAGGER if is_news else self._quiet_until
            self._order(since=now if is_news else None)

    def won(self, doc_id: str) -> None:
        """Note that an item was claimed here: whoever went before has left it."""
        if len(self._turns) > 1:
            first = self._probing.pop(doc_id, None)
            if first is not None:
                self._probe_at = float('-inf')  # others may be busy, too
            if self._turns.note(busy=self._turns.before(doc_id) if first is None else [first]):
                self._order()

    def lost(self, doc_id: str, to: str | None = None) -> None:
        """Note that another consumer has claimed an item, `to` if that is known: it is not busy, then."""
        self._probing.pop(doc_id, None)
        before = [to] if to else self._turns.before(doc_id)
        # Of many it may be any: one of them is given its turn again, and the next item of those that claim shows who it was.
        idle = before if len(before) <= _FEW_TURNS else before[:1]
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
            return _MOMENT if self._turns.busy and self._turns.first(doc_id) in self._turns.busy else 0.0
        return min(turn, _FEW_TURNS) * _STAGGER + max(0, turn - _FEW_TURNS) % _MOST_TURNS * _MOMENT

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
            self.dirty, self._sifting, self.next_due = page.last is not None or gone, False, page.next_due
        before, self._candidates, self._sorted, self._taken = self._candidates, {}, None, 0
        if self._share_only and time.monotonic() >= self._probe_at:
            for candidate in before.values():
                if candidate.turn:
                    self._left.setdefault(self._turns.first_idle(candidate.id), candidate)
        for row in rows:
            self._add_row(row, before[row.id].since if row.id in before else None)
        self._share_only = page.last is not None and any(not c.turn for c in self._candidates.values())
        return True

    # -- candidates

    def offer(self, doc: Document) -> None:
        """Take in an item that the feed told of."""
        date = doc.get('date')
        due = float(date) if isinstance(date, (int, float)) else None
        if due is not None and due > self._clock.now() + HORIZON:
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
        chosen = self._probes(count)
        chosen += itertools.islice(self._own(), count - len(chosen))
        if not chosen and others:
            eligible = list(self._eligible())
            if len(eligible) > _FEW and now - self._sifted >= _STAGGER and len(self._candidates) < self._read_ahead:
                self._sifted = now
                self._sifting = self.dirty = True
                self._paging.restart()
                return []
            chosen = eligible[: max(1, count // self._turns.idle)]
        for candidate in chosen:
            self._candidates.pop(candidate.id, None)
        if chosen:
            out = set(map(id, chosen))
            self._sorted = [candidate for candidate in self._line() if id(candidate) not in out]
        return chosen

    def _probes(self, count: int) -> list[Candidate]:
        """Return items of earlier pages to be tried, if those who go first for them have had the time to claim them."""
        now = time.monotonic()
        due = [(name, candidate) for name, candidate in self._left.items() if candidate.since + _STAGGER <= now][:count]
        if not due:
            return []
        self._left, self._probe_at = {}, now + _PROBE
        for name, candidate in due:
            candidate.doc = None
            self._probing[candidate.id] = name
        return [candidate for _, candidate in due]

    def unread(self, count: int) -> list[Candidate]:
        """Return up to `count` of those whose documents are needed next, and not known."""
        return list(itertools.islice((candidate for candidate in self._own() if candidate.doc is None), count))

    def is_conflicted(self, candidate: Candidate) -> bool:
        """Tell whether others may have claimed a candidate since its document was read: it stood here for a while."""
        return len(self._turns) > 1 and not self._share_only and time.monotonic() - candidate.seen > _STAGGER

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
        self._candidates, self._sorted, self.dirty, self.next_due, self._left, self._probing = (
            {},
            [],
            True,
            None,
            {},
            {},
        )
        self._paging.forget()

    def wake_at(self) -> float | None:
        """Return the monotonic time at which something may become claimable without news, or None."""
        times = [max(c.at, self._quiet_until) for c in self._candidates.values() if not (self._share_only and c.turn)]
        if self.next_due is not None:
            times.append(time.monotonic() + self.next_due - self._clock.now())
        if self.dirty and time.monotonic() < self._quiet_until:
            times.append(self._quiet_until)
        return min(times, default=None)

    @property
    def is_due(self) -> bool:
        """Whether something that was planned for later is due by now, and must be read."""
        return self.next_due is not None and self.next_due <= self._clock.now()
