"""Claims: which messages a consumer reads, and claims, drops (expired) or sets aside (delivery limit, malformed).

A message with a concurrency limit or a rate may have to wait. Before a consumer claims such a message, it asks its
`limits.gate.Gate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, NamedTuple

from ..couchdb.client import Client, Document
from ..couchdb.pacing import RequestKind
from ..couchdb.write_result import PendingWrite, WriteResult
from ..documents import dead_letter, validation, workitem
from ..documents.body import body_stub
from ..documents.concurrency import CONCURRENCY_KEY
from ..documents.dead_letter import DELIVERY_LIMIT
from ..documents.rates import RATE_KEY, waits_for_slot
from ..documents.task_message import headers_of
from ..fleet.attention import Attention
from ..fleet.candidates import Candidate, QueueCandidates
from ..leases.lease import Lease
from ..leases.sweeper import UnprovenClaims
from ..limits.gate import Gate
from ..log import get_logger
from ..options import Options
from ..queues import waiting
from ..queues.store import Store
from ..queues.topology import Topology
from .bodies import Body, read
from .delivery import Delivery, Pull, Subscription
from .unacked import Unacked

logger = get_logger(__name__)

_UNREAD = Body(None)

#: How many messages are read for one `basic_get`: some may be claimed by now, or CouchDB may refuse their claims. And
#: how many if none of these can be claimed: they may be over a limit, and are parked.
_PULL_CANDIDATES = (8, 100, 1000)

#: When this many messages were parked in one cycle, the next cycle goes on.
_MAX_PARKED = 100

#: How many documents one request reads, at first and at most, if it does not need more to claim them at once: it also
#: reads the candidates that follow, up to this number.
_FIRST_DOCS, _MAX_DOCS = 8, 128

#: The number of following candidates that a request reads is limited so that it has at most this many characters of
#: bodies, if each document is as large as the largest of the last request.
_MAX_CHARACTERS = 1_000_000

#: The most queues that one request reads.
_MAX_QUEUES = 50


class CandidateReader:
    """Reads the messages that can be claimed; for the I/O thread alone."""

    def __init__(self, client: Client, before_read: Callable[[], None] = lambda: None) -> None:
        """`before_read()` is called before each request."""
        self._client, self._before_read = client, before_read
        self._docs_per_read = _FIRST_DOCS

    def take_docs(
        self, candidates: Mapping[str, QueueCandidates], wanted: Mapping[str, int]
    ) -> dict[str, list[Document]]:
        """Return up to `wanted` documents of each queue, in the order of the claims, and remove their candidates."""
        taken: dict[str, list[Document]] = {queue: [] for queue in wanted}
        self._choose(candidates, wanted, taken)
        # The candidates were not enough, and the view may have more. The head is read in the next cycle, after the
        # notifier has noted an update sequence.
        lacking = [
            queue
            for queue, count in wanted.items()
            if len(taken[queue]) < count and candidates[queue].is_stale and not candidates[queue].reads_head_next
        ]
        if lacking:
            self.refill([candidates[queue] for queue in lacking])
            self._choose(candidates, {queue: wanted[queue] for queue in lacking}, taken)
        return taken

    def refill(self, candidates: list[QueueCandidates]) -> None:
        """Read the view for these queues in one request, and again for the queues that need a second page.

        Nothing is read if the request would have to wait for others, see `couchdb.pacing`: the next cycle reads it.
        """
        for _ in range(2):
            if not candidates:
                return
            if (pace := self._client.pace) and not pace.spare(RequestKind.QUERY):
                pace.want(RequestKind.QUERY)
                return
            candidates = self._read_pages(candidates)

    def _read_pages(self, candidates: list[QueueCandidates]) -> list[QueueCandidates]:
        """Read a page of each queue and return the queues that need another one."""
        again: list[QueueCandidates] = []
        readings = [(queue_candidates, queue_candidates.next_reading()) for queue_candidates in candidates]
        until = self._client.clock.now() + waiting.HORIZON_SECONDS
        for update in ('true', 'lazy', 'false'):
            alike = [(queue_candidates, reading) for queue_candidates, reading in readings if reading.update == update]
            for start in range(0, len(alike), _MAX_QUEUES):
                part = alike[start : start + _MAX_QUEUES]
                self._before_read()
                pages = waiting.read(self._client, [reading.ask for _, reading in part], until, update=update)
                again += [
                    queue_candidates
                    for (queue_candidates, reading), page in zip(part, map(self._usable, pages), strict=True)
                    if not queue_candidates.add_page(reading, page)
                ]
        return again

    def _usable(self, page: waiting.WaitingPage) -> waiting.WaitingPage:
        """Return a page without the messages whose claims CouchDB will always refuse."""
        return page._replace(rows=[row for row in page.rows if not self._client.unusable.has(row.id, row.rev)])

    def _choose(
        self, candidates: Mapping[str, QueueCandidates], wanted: Mapping[str, int], taken: dict[str, list[Document]]
    ) -> None:
        while True:
            chosen = {
                queue: found
                for queue, count in wanted.items()
                if (found := candidates[queue].choose(count - len(taken[queue]), others=not taken[queue]))
            }
            if not chosen:
                return
            self._read_documents(candidates, chosen)
            for queue, found in chosen.items():
                taken[queue] += [
                    doc
                    for doc in candidates[queue].claimable(found)
                    if not self._client.unusable.has(doc['_id'], doc['_rev'])
                ]

    def _read_documents(self, candidates: Mapping[str, QueueCandidates], chosen: Mapping[str, list[Candidate]]) -> None:
        """Read the chosen documents that are not read, or that others may have claimed, and some that follow."""
        unread = [
            candidate
            for queue, found in chosen.items()
            for candidate in found
            if candidate.doc is None or candidates[queue].may_be_claimed(candidate)
        ]
        if not unread:
            return
        self._before_read()
        count = self._docs_per_read
        spare = max(0, count - len(unread)) // len(chosen)
        for queue in chosen:
            unread += candidates[queue].without_doc(spare)
        self._docs_per_read = max(1, count // 2)  # if the request takes too long and fails, the next one reads fewer
        for candidate, doc in zip(unread, self._client.fetch([candidate.id for candidate in unread]), strict=True):
            candidate.set_document(doc)
        largest = max((workitem.size(candidate.doc) for candidate in unread if candidate.doc), default=0)
        self._docs_per_read = max(1, min(2 * max(count, len(unread)), _MAX_DOCS, _MAX_CHARACTERS // max(1, largest)))


class Recipient(NamedTuple):
    """Who receives a message: a subscription, from the candidates of its queue; or that of a `basic_get`."""

    subscription: Subscription
    candidates: QueueCandidates | None = None
    pull: Pull | None = None


class Taking(PendingWrite):
    """A write that takes a message out of its queue. As it delivers nothing, the credit is free again at its end.

    This one drops an expired message. If a claim that was stored gets no response, `Commits` releases it.
    """

    def __init__(self, claims: Claims, message: Document, recipient: Recipient, doc: Mapping[str, Any]) -> None:
        super().__init__(doc)
        self.claims, self.message, self.recipient = claims, message, recipient

    def stored(self, result: WriteResult) -> None:
        """Return the credit."""
        self.claims.unacked.unreserve(self.recipient.subscription)

    def unknown(self, result: WriteResult) -> None:
        """Return the credit."""
        self.claims.unacked.unreserve(self.recipient.subscription)

    def conflict(self, result: WriteResult) -> None:
        """Note that another consumer was faster, or somebody has changed the message."""
        self.claims.unacked.unreserve(self.recipient.subscription)
        if self.recipient.candidates is not None:
            self.recipient.candidates.lost(result.id)
            self.claims.attention.lost()

    def refused(self, result: WriteResult) -> None:
        """Log the reason. A message whose claim is refused for ever is set aside, see `queues.quarantine`."""
        self.claims.unacked.unreserve(self.recipient.subscription)
        text = 'message %s in queue %r cannot be claimed: %s'
        logger.error(text, result.id, self.message.get('queue'), result.reason)
        if self.recipient.pull is not None:
            self.recipient.pull.refused.add(result.id)
        if result.is_permanent:
            self.claims.unusable.add(result.id, self.message['_rev'], result.reason)


class SetAside(Taking):
    """The write that makes a dead letter of a message instead of claiming it."""

    def __init__(self, claims: Claims, message: Document, recipient: Recipient, reason: str) -> None:
        dead = dead_letter.made_of(message, reason, claims.now())
        *self.copies, doc = dead_letter.apart(dead)
        super().__init__(claims, message, recipient, doc)
        self._reason = reason

    def stored(self, result: WriteResult) -> None:
        """Log the reason; if another consumer was faster, it logs that."""
        super().stored(result)
        text = 'message %s in queue %r was made a dead letter: %s'
        logger.error(text, result.id, self.message.get('queue'), self._reason)


class Claim(Taking):
    """The claim of a message; a quorum of the nodes must have stored it."""

    #: The body that was read before the claim, for a `basic_get`.
    body: bytes | None = None

    def stored(self, result: WriteResult) -> None:
        """Deliver the message."""
        subscription, candidates, pull = self.recipient
        unacked, doc = self.claims.unacked, {**self.doc, '_rev': result.rev}
        # An earlier try without a response may have stored the same revision on fewer nodes.
        self.claims.unproven.proven(result.id, result.rev)
        logger.debug('claimed message %s of queue %s, attempt %d', doc['_id'], doc['queue'], doc['attempts'])
        delivery = Delivery(doc, subscription, body=self.body)
        if candidates is not None:
            candidates.won(result.id)
            self.claims.attention.won(len(candidates))
        if pull is None:
            unacked.add_claimed(delivery)
        else:
            unacked.hold(delivery)
            unacked.answer(pull, delivery)

    def unproven(self, result: WriteResult) -> None:
        """Deliver nothing: the claim may have lost against another one on other nodes. A sweep decides about it."""
        self.claims.unproven.add(result.id, result.rev)
        self.claims.unacked.unreserve(self.recipient.subscription)


class FinalClaim(Taking):
    """The deletion of a message that a `basic_get` with `no_ack` receives."""

    def __init__(self, claims: Claims, message: Document, recipient: Recipient, pull: Pull, body: bytes | None) -> None:
        super().__init__(claims, message, recipient, workitem.acked(message, claims.now()))
        self._pull, self._body = pull, body

    def stored(self, result: WriteResult) -> None:
        """Deliver the message: it cannot be released. If it is unproven, another consumer may receive it, too."""
        delivery = Delivery(self.message, self.recipient.subscription, final=True, body=self._body)
        logger.debug('claimed and deleted message %s of queue %s', result.id, self.message['queue'])
        self.claims.unacked.answer(self._pull, delivery)


class Claims:
    """Makes the writes that claim candidates, and delivers the messages whose claims CouchDB stored."""

    def __init__(
        self,
        store: Store,
        options: Options,
        unacked: Unacked,
        lease: Lease,
        unproven: UnprovenClaims,
        topology: Topology,
        gate: Gate,
        attention: Attention,
        before_read: Callable[[], None],
    ) -> None:
        self._store, self._options, self._lease = store, options, lease
        self._topology, self._gate = topology, gate
        #: What the writes use that this object makes.
        self.unacked, self.unproven, self.attention, self.unusable = unacked, unproven, attention, store.client.unusable
        self.reader, self._rotation = CandidateReader(store.client, before_read), itertools.count()

    def claim_for_credit(
        self,
        credit: Mapping[str, int],
        candidates: Mapping[str, QueueCandidates],
        writes: list[PendingWrite],
        pending: int,
    ) -> None:
        """Add claims to `writes`, for as many messages as there is credit for, including what may be claimed ahead.

        There are no more than can be written at once, with `pending` other writes, see `couchdb.pacing`. Claims that
        wait would let acknowledgements and the heartbeat wait.
        """
        served = [queue for queue, free in credit.items() if free > 0 and queue in candidates]
        pace = self._store.client.pace
        most = pace.spare(RequestKind.WRITE) - len(writes) - pending if pace else inf
        if pace and most <= 0:
            if any(candidates[queue].has_claimable for queue in served):
                pace.want(RequestKind.WRITE)
            return
        self.reader.refill([candidates[queue] for queue in served if candidates[queue].needs_page])
        if self._gate.is_used:
            for doc in self._gate.ready(self.unacked.credit()):
                if doc['queue'] in served:
                    candidates[doc['queue']].offer(doc, own=True)
        claimable = [queue for queue in served if candidates[queue].has_claimable]
        if not claimable:
            return
        # Each queue gets an equal share of the claims, and another queue is served first each time: a long queue does
        # not starve a short one.
        share = max(1, int(min(self._options.claim_batch, most)) // len(claimable))
        first = next(self._rotation) % len(claimable)
        reserved: dict[str, list[Subscription]] = {queue: [] for queue in claimable[first:] + claimable[:first]}
        for ahead in (False, True):
            for queue, found in reserved.items():
                known = candidates[queue]
                count = share if known.is_stale else min(share, len(known))
                count = known.most_ahead(count) if ahead else count
                found += self.unacked.reserve(queue, count - len(found), ahead=ahead)
        docs: dict[str, list[Document]] = {}
        try:
            docs = self._take(candidates, {queue: len(found) for queue, found in reserved.items() if found}, writes)
        finally:
            for queue, found in reserved.items():
                for subscription in found[len(docs.get(queue, ())) :]:
                    self.unacked.unreserve(subscription)
        for queue, found in reserved.items():
            writes += [
                self._claim(doc, Recipient(subscription, candidates[queue]))
                for doc, subscription in zip(docs.get(queue, ()), found, strict=False)
            ]

    def _take(
        self, candidates: Mapping[str, QueueCandidates], wanted: Mapping[str, int], writes: list[PendingWrite]
    ) -> dict[str, list[Document]]:
        """Return up to `wanted` messages of each queue to be claimed; park those that get no slot or no start."""
        docs: dict[str, list[Document]] = {queue: [] for queue in wanted}
        missing, most = dict(wanted), len(writes) + _MAX_PARKED
        while missing:
            taken = self.reader.take_docs(candidates, missing)
            for queue, admitted in self._admit(taken, writes).items():
                docs[queue] += admitted
                if len(writes) >= most or len(admitted) == len(taken[queue]):
                    del missing[queue]
                else:
                    missing[queue] = wanted[queue] - len(docs[queue])
        return docs

    def _admit(
        self, taken: dict[str, list[Document]], writes: list[PendingWrite], *, needs_slot: bool = True
    ) -> dict[str, list[Document]]:
        """Return those of the messages that may be claimed, by queue; add to `writes` what parks the others."""
        if any(_has_limit(doc) for docs in taken.values() for doc in docs):
            return self._gate.admit(taken, writes, needs_slot=needs_slot)
        return taken

    def now(self) -> float:
        """Return the time of the server."""
        return self._store.client.clock.now()

    def _claim(self, doc: Document, recipient: Recipient, body: Body = _UNREAD) -> PendingWrite:
        """Return the write that claims a message, or the one in place of it."""
        now = self.now()
        if reason := validation.malformed_reason(doc) or body.reason:
            return SetAside(self, doc, recipient, reason)
        limit = self._topology.known.limit(doc['queue'])
        expired = workitem.has_expired(doc, now) and not workitem.delivers_expired(doc)
        if expired or (limit.ttl is not None and workitem.ready_since(doc) + limit.ttl <= now):
            logger.debug('dropped expired message %s of queue %s (not stored yet)', doc['_id'], doc['queue'])
            return Taking(self, doc, recipient, workitem.dropped(doc, now))
        max_attempts = self._options.delivery_limit if limit.deliveries is None else limit.deliveries
        if max_attempts and doc['attempts'] >= max_attempts:
            reason = f'{DELIVERY_LIMIT}: delivered {doc["attempts"]} times and never acknowledged'
            return SetAside(self, doc, recipient, reason)
        if recipient.pull is not None and recipient.pull.no_ack:
            return FinalClaim(self, doc, recipient, recipient.pull, body.content)
        claimed = workitem.claim(validation.checked(doc), self._lease.id, now)
        if self._topology.is_temporary(doc['queue']):
            claimed['temporary'] = True  # also if the publisher did not know that
        claim = Claim(self, doc, recipient, claimed)
        claim.body = body.content
        return claim

    def claim_for_pulls(self, pulls: list[Pull], writes: list[PendingWrite]) -> None:
        """Add a claim to `writes` for each `basic_get`, or end it without a message if the queue has none."""
        for pull in pulls:
            writes += self._claim_for_pull(pull)

    def _claim_for_pull(self, pull: Pull) -> list[PendingWrite]:
        if delivery := self.unacked.take_broadcast(pull):
            self.unacked.answer(pull, delivery)
            return []
        now = self._store.client.clock.now()
        docs: Iterable[Document] = ()
        if pull.queue not in self._topology.paused:
            ready = self._store.each_ready(pull.queue, _PULL_CANDIDATES)
            docs = itertools.chain(self._gate.ready({pull.queue: 1}) if self._gate.is_used else (), ready)
        parked: list[PendingWrite] = []
        for doc in (doc for doc in docs if doc['_id'] not in pull.refused and not waits_for_slot(doc)):
            if validation.malformed_reason(doc) or (workitem.is_waiting(doc) and workitem.is_due(doc, now)):
                # With `no_ack` the message is done when it is delivered: it needs no slot.
                if not self._admit({pull.queue: [doc]}, parked, needs_slot=not pull.no_ack)[pull.queue]:
                    continue
                # The body is read before the claim: with `no_ack`, the claim deletes the document.
                body = read(self._store.client, [doc])[0] if body_stub(doc) else _UNREAD
                self.unacked.wakeup.set()  # if the claim fails, the next cycle tries another message
                return [*parked, self._claim(doc, Recipient(pull.subscription, pull=pull), body)]
        self.unacked.answer(pull, None)
        return parked


def _has_limit(doc: Document) -> bool:
    headers = headers_of(doc)
    return CONCURRENCY_KEY in headers or RATE_KEY in headers
