"""Candidates: the messages of one queue that could be claimed, read ahead or reported by the changes feed. No I/O.

A message that is due in more than `HORIZON_SECONDS` is no candidate; only the due date of the next one is kept. If
several consumers serve a queue, each message has one that may claim it first (see `claim_order`). The others wait, and
read the document, or the head of the queue, again before they claim it.

A long queue is read page by page: the messages at its head are claimed by now. Now and then a short *look* at the head
finds new messages there.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from ..design.rows import WaitingRow
from ..documents import workitem
from ..documents.rates import waits_for_slot
from ..documents.task_message import HIGHEST
from ..queues.waiting import BEGIN, HORIZON_SECONDS, Ask, Cursor, WaitingPage
from .claim_order import ClaimOrder

#: For how long a document that was read, or the head of a queue, counts as current if others may claim the same
#: messages, in seconds.
_CURRENT_SECONDS = 0.1

#: If other consumers serve the queue and its messages are all known, this consumer claims beyond its prefetch count
#: only while it leaves this many that are its own share: the others have as many, and need none of these soon.
_MIN_OWN_LEFT = 64

#: A consumer that reads a long queue page by page looks at the head again after this time, in seconds. CouchDB responds
#: from the index as it is, and updates it after that, if the look asks for it. So in a queue with one consumer a new
#: message of a higher priority may be found only by the second look, after up to two seconds.
_LOOK_SECONDS = 1.0

#: Of the looks of all consumers of a queue, about one in a second also updates the index: if every look did so, that
#: would cost as much as the claims. At most so many consumers are counted: some of the Consumer documents may have no
#: consumer.
_MAX_REFRESHING = 8

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

    def __init__(self, queue: str, read_ahead: int) -> None:
        self._queue, self._read_ahead = queue, read_ahead
        #: Where the next page starts; None: at the head.
        self.last: Cursor | None = None
        self._known: dict[str, float] = {}  # by id of a message: the monotonic time at which it was read
        self._looked_at = -inf

    @property
    def is_old(self) -> bool:
        """Whether the head was last read more than `_LOOK_SECONDS` ago."""
        return time.monotonic() - self._looked_at > _LOOK_SECONDS

    def restart(self) -> None:
        """Read from the head next."""
        self.last, self._looked_at = None, -inf

    def forget(self) -> None:
        """Read from the head next, and count all messages there as new."""
        self.last, self._known = None, {}

    def next(self, consumers: int, claimed: int) -> Reading:
        """Return what to read next.

        `consumers` share the messages. `claimed` is how many messages of the last page this one claimed.
        """
        limit = min(self._read_ahead, max(_MIN_ROWS * consumers, 4 * claimed))
        if self.last is not None and not self.is_old:
            return Reading(Ask(self._queue, limit, self.last), 'false')
        self._looked_at = time.monotonic()
        if self.last is None:
            return Reading(Ask(self._queue, limit), 'true')
        refreshes = random.random() * min(consumers, _MAX_REFRESHING) < 1.0
        return Reading(Ask(self._queue, _LOOK_ROWS), 'lazy' if refreshes else 'false', is_look=True)

    def read(self, reading: Reading, page: WaitingPage) -> list[WaitingRow]:
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


@dataclass(eq=False)
class Candidate:
    """A message that may be claimed; `doc` is None until the document is read."""

    id: str
    #: The priority's rank: 0 is claimed first.
    rank: int
    date: float
    #: What its turn follows from: the number of consumers that may claim the message before this one.
    key: str
    turn: int
    #: The monotonic time at which it was found, or is due if that is later; and at which this consumer may claim it.
    since: float
    at: float
    #: The monotonic time at which `doc` was read, or, before that, at which the message was found.
    seen: float
    doc: Document | None = None

    @property
    def order(self) -> tuple[int, int, float, str]:
        """The key by which candidates are sorted."""
        return self.rank, self.turn, self.date, self.id

    @property
    def is_own(self) -> bool:
        """Whether no other consumer may claim the message before this one."""
        return self.at <= self.since

    def set_document(self, doc: Document | None) -> None:
        """Set the document, which was read just now."""
        self.doc, self.seen = doc, time.monotonic()


class QueueCandidates:
    """The candidates of one queue, sorted by `Candidate.order`."""

    def __init__(self, clock: ServerClock, queue: str, read_ahead: int) -> None:
        self._clock, self._paging, self._order = clock, Paging(queue, read_ahead), ClaimOrder()
        self._candidates: dict[str, Candidate] = {}
        #: `since` of the messages on the page of the head: other pages may be read before it is read again.
        self._at_head: dict[str, float] = {}
        self._sorted: list[Candidate] | None = []
        self._claimed = 0  # how many messages of the last page were claimed
        self._verified_at = -inf  # when the head was read last
        self._verifying = False  # whether the next read of the head is to show which candidates still exist
        #: Whether the view may have messages that are no candidates yet.
        self.is_stale = True
        #: Whether messages wait that no listener can take: then this consumer waits for nobody.
        self.hurries = False
        #: The due date of the next message that is scheduled for later, by the server's clock, or None.
        self.next_due: float | None = None

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def is_outdated(self) -> bool:
        """Whether the view should be read before anything more is claimed."""
        return self.is_stale and (not self._candidates or self._paging.is_old)

    @property
    def needs_page(self) -> bool:
        """Whether the view should be read now: it is outdated, or it is stale and no candidate can be claimed."""
        return self.is_outdated or (self.is_stale and not self.has_claimable)

    @property
    def reads_head_next(self) -> bool:
        """Whether the next read of the view is that of the head: after it, the candidates may be complete."""
        return self.is_stale and self._paging.last is None

    def mark_stale(self) -> None:
        """Note that the view may have messages that are no candidates yet."""
        self.is_stale = True

    def found_empty(self) -> None:
        """Note that the queue was read, and no message waits."""
        self._candidates, self._sorted, self.hurries = {}, None, False
        self.is_stale = False

    def first(self, count: int) -> list[str]:
        """Return the ids of up to `count` messages that are due, whoever may claim them first."""
        now = time.monotonic()
        return [each.id for each in itertools.islice((c for c in self._in_order() if c.since <= now), count)]

    def due_at(self) -> float:
        """Return the monotonic time at which a message becomes due, whoever may claim it first; -inf: read the view."""
        if self.is_stale and not self._candidates:
            return -inf
        now = time.monotonic()
        due = [now + self.next_due - self._clock.now()] if self.next_due is not None else []
        return min(due + [each.since for each in self._candidates.values() if each.since > now], default=inf)

    # -- the other consumers

    @property
    def is_contended(self) -> bool:
        """Whether all messages are known, and other consumers may need them."""
        return self._order.consumers > 1 and not self.is_stale

    def most_ahead(self, count: int) -> int:
        """Return how many of `count` messages may be claimed now if this consumer claims beyond its prefetch count."""
        if not self.is_contended:
            return count
        return len(list(itertools.islice(self._own(), count + _MIN_OWN_LEFT))) - _MIN_OWN_LEFT

    @property
    def leaves_none(self) -> bool:
        """Whether other consumers may find nothing to claim."""
        return self.is_contended and next(self._own(), None) is None

    def set_consumers(self, own: str, consumers: Sequence[str], listeners: Sequence[str]) -> None:
        """Set the ids of the consumers of the queue, this one (`own`) among them, and of its listeners, both sorted."""
        before = self._order.consumers
        if not self._order.set_consumers(own, consumers, listeners):
            return
        if len(consumers) <= before:
            # A consumer has left. The messages that it had, or could claim first, are at the head of the queue.
            self._paging.forget()
        for candidate in self._candidates.values():
            candidate.doc = None  # others may not know of the change yet, and claim in the old order
        self._update_turns()

    def won(self, doc_id: str) -> None:
        """Note that this consumer claimed a message."""
        if self._order.won(doc_id):
            self._update_turns()

    def lost(self, doc_id: str, to: str | None = None) -> None:
        """Note that another consumer (`to`, if it is known) claimed a message."""
        if self._order.lost(doc_id, to):
            self._update_turns()

    def _update_turns(self) -> None:
        for candidate in self._candidates.values():
            candidate.turn, wait = self._order.turn_of(candidate.key)
            candidate.at = candidate.since + wait
        self._sorted = None

    # -- reading

    def next_reading(self) -> Reading:
        """Return what to read next."""
        consumers = self._order.consumers if self._order.is_shared else 1
        return self._paging.next(consumers, self._claimed)

    def add_page(self, reading: Reading, page: WaitingPage) -> bool:
        """Add the messages of a page; return False if another page must be read."""
        now = time.monotonic()
        rows = self._paging.read(reading, page)
        if reading.is_look:
            for row in page.rows:
                if row.id in self._candidates:
                    self._open(self._candidates[row.id], now)
            new = [row for row in rows if row.id not in self._candidates]
            for row in new:
                self._add_row(row, row.id)
            if self._paging.is_flooded(len(new)):
                self._candidates, self._sorted = {}, None
                self._paging.last = None
            # If all candidates are left to others, read the next page in the same cycle.
            return self.has_claimable
        if reading.is_head:
            # The page lacks some of the candidates: they were claimed, or this copy of the index does not have them
            # yet. The queue stays stale, so it is read again.
            gone = self._verifying and not self._candidates.keys() <= {row.id for row in page.rows}
            self.is_stale, self._verifying, self.next_due = page.last is not None or gone, False, page.next_due
            self._verified_at = now  # what others have claimed is gone
        before, self._candidates, self._sorted, self._claimed = self._candidates, {}, None, 0
        for row, key in zip(rows, self._order.read(rows), strict=True):
            self._add_row(row, key, before.get(row.id))
            if reading.is_head:
                self._open(self._candidates[row.id], now)
        if reading.is_head:
            self._at_head = {row.id: self._candidates[row.id].since for row in rows}
        return True

    def _open(self, candidate: Candidate, now: float) -> None:
        """Let this consumer claim a message that others could claim first, and have left for long enough.

        If all messages are known, it keeps its turn: otherwise all consumers without a share would choose the same.
        """
        is_left = candidate.at <= now and self._paging.last is not None
        if candidate.turn and (is_left or self.hurries):
            candidate.at, self._sorted = min(candidate.at, now), None
            # After a bell, all consumers that find no message of their share choose at this moment: each another one.
            candidate.turn = random.randrange(1, 1 + self._order.consumers) if self.hurries else 0

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
        rank = workitem.rank(doc['priority']) if isinstance(doc.get('priority'), int) else HIGHEST
        key = date if date is not None else doc.get('published')
        self._add(doc['_id'], rank, key if isinstance(key, (int, float)) else 0.0, due=due, doc=doc, own=own)

    def _add_row(self, row: WaitingRow, key: str, before: Candidate | None = None) -> None:
        """Add a message of a page; what was known of it (`before`) holds, also its document if that has not changed."""
        since = before.since if before else self._at_head.get(row.id)
        self._add(row.id, row.rank, row.date, due=row.date if row.planned else None, since=since, key=key)
        if before and before.doc and before.doc['_rev'] == row.rev:
            self._candidates[row.id].doc = before.doc

    def _add(
        self,
        doc_id: str,
        rank: int,
        date: float,
        *,
        due: float | None,
        doc: Document | None = None,
        since: float | None = None,
        key: str | None = None,
        own: bool = False,
    ) -> None:
        now = time.monotonic()
        since = now if since is None else since
        if due is not None:
            since = max(since, now + (due - self._clock.now()))
        key = key or doc_id
        turn, wait = (0, 0.0) if own else self._order.turn_of(key)
        self._candidates[doc_id] = Candidate(
            doc_id, rank, date, key, turn, since, since + wait, now, None if wait else doc
        )
        self._sorted = None

    def choose(self, count: int, *, others: bool) -> list[Candidate]:
        """Remove and return up to `count` candidates to be claimed now: first those that are this one's share.

        If there are none, and `others` is true: some of those that other consumers could claim first and have left.
        Those consumers may be claiming them at this moment.
        """
        now = time.monotonic()
        if count <= 0 or not self._candidates:
            return []
        chosen = list(itertools.islice(self._own(), count))
        if not chosen and others:
            eligible = list(self._eligible())
            if self._order.is_shared and eligible and now - self._verified_at >= _CURRENT_SECONDS:
                # One read of the head is cheaper than a read of each document.
                self._verifying = self.is_stale = True
                self._paging.restart()
                return []
            chosen = eligible[:count]
            if chosen and not self.hurries:  # other consumers choose at this moment, too: each chooses other messages
                alike = [each for each in eligible if each.rank == eligible[0].rank]
                some = random.sample(alike, max(1, min(count, len(alike) // self._order.consumers)))
                chosen = sorted(some, key=lambda candidate: candidate.order)
        for candidate in chosen:
            self._candidates.pop(candidate.id, None)
        self._sorted = [candidate for candidate in self._in_order() if candidate.id in self._candidates]
        return chosen

    def without_doc(self, count: int) -> list[Candidate]:
        """Return up to `count` candidates whose documents are needed next and have not been read."""
        return list(itertools.islice((candidate for candidate in self._own() if candidate.doc is None), count))

    def may_be_claimed(self, candidate: Candidate) -> bool:
        """Tell whether other consumers may have claimed a candidate since its document was read.

        In a shared queue they leave it to this one, if it is its share or there are further pages.
        """
        is_left = self._order.is_shared and (self.is_stale or candidate.is_own)
        return self._order.consumers > 1 and not is_left and time.monotonic() - candidate.seen > _CURRENT_SECONDS

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
        return bool(self._candidates) and next(self._eligible(), None) is not None

    def _eligible(self) -> Iterator[Candidate]:
        """Yield the candidates that could be claimed now, sorted by `Candidate.order`."""
        now, reads_on = time.monotonic(), self._reads_on
        return (each for each in self._in_order() if each.at <= now and not (reads_on and each.turn))

    @property
    def _reads_on(self) -> bool:
        """Whether the next pages are read before messages are claimed that others may claim first."""
        return self._order.is_shared and self._paging.last is not None and not self.hurries

    def _in_order(self) -> list[Candidate]:
        if self._sorted is None:
            self._sorted = sorted(self._candidates.values(), key=lambda candidate: candidate.order)
        return self._sorted

    def _own(self) -> Iterator[Candidate]:
        """Yield the candidates that could be claimed now, up to the first that another consumer may claim first."""
        return itertools.takewhile(lambda candidate: not candidate.turn, self._eligible())

    def clear(self) -> None:
        """Forget everything: the queue must be read again."""
        self._candidates, self._sorted, self.is_stale, self.next_due = {}, [], True, None
        self._at_head, self.hurries = {}, False
        self._order.clear()
        self._paging.forget()

    def wake_at(self) -> float | None:
        """Return the monotonic time at which, without any change in the database, a message may become claimable."""
        reads_on = self._reads_on
        times = [each.at for each in self._candidates.values() if not (reads_on and each.turn)]
        if self.next_due is not None:
            times.append(time.monotonic() + self.next_due - self._clock.now())
        return min(times, default=None)

    @property
    def is_due(self) -> bool:
        """Whether a message that was scheduled for later is due now, and must be read."""
        return self.next_due is not None and self.next_due <= self._clock.now()
