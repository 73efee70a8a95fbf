"""Claims: which messages a consumer claims, and what it does with the result of each claim."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from ..couchdb.client import Document
from ..couchdb.write_result import WriteResult
from ..documents import dead_letter, validation, workitem
from ..documents.body import stub
from ..documents.dead_letter import DELIVERY_LIMIT
from ..documents.rates import waits_for_slot
from ..leases.lease import Lease
from ..leases.sweeper import UnprovenClaims
from ..limits.gate import Gate
from ..log import get_logger
from ..options import Options
from ..queues.store import Store
from ..queues.topology import Topology
from .attention import Attention
from .bodies import Body, read
from .candidate_reader import CandidateReader
from .candidates import QueueCandidates
from .credit import Credit, Subscription
from .delivery import Delivery, Pull
from .pending_writes import PendingWrite
from .unacked import Unacked

__all__ = ['Claims']

logger = get_logger(__name__)

_UNREAD = Body(None)

#: How many messages are read for one `basic_get`: some may be claimed by now, or CouchDB may refuse their claims. And
#: how many if none of these can be claimed: they may be over a limit, and are parked.
_PULL_CANDIDATES = (8, 100, 1000)

#: When this many messages were parked in one cycle, the next cycle goes on.
_MAX_PARKED = 100


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
    ) -> None:
        self._store, self._options, self._unacked, self._lease, self._unproven = (
            store,
            options,
            unacked,
            lease,
            unproven,
        )
        self._topology, self._gate, self._attention = topology, gate, attention
        self.reader, self._rotation = CandidateReader(store.client), itertools.count()
        #: The `basic_get` calls that wait for one message each.
        self.pulls = unacked.pulls

    def claim_for_credit(
        self, credit: Mapping[str, int], candidates: Mapping[str, QueueCandidates], writes: list[PendingWrite]
    ) -> int:
        """Add claims to `writes`, for as many messages as there is credit for, including what may be claimed ahead.

        Return how many there are.
        """
        served = [queue for queue, free in credit.items() if free > 0 and queue in candidates]
        self.reader.refill([candidates[queue] for queue in served if candidates[queue].needs_page])
        for doc in self._gate.ready(self._unacked.credit()):
            if doc['queue'] in served:
                candidates[doc['queue']].offer(doc, own=True)
        claimable = [queue for queue in served if candidates[queue].has_claimable]
        # Each queue gets an equal share of the claims, and another queue is served first each time: a long queue does
        # not starve a short one.
        share, first = (
            max(1, self._options.claim_batch // max(1, len(claimable))),
            next(self._rotation) % max(1, len(claimable)),
        )
        reserved: dict[str, list[Subscription]] = {}
        in_turn = claimable[first:] + claimable[:first]
        for queue, most, ahead in [
            *((each, share, False) for each in in_turn),
            *((each, candidates[each].most_ahead(share), True) for each in in_turn),
        ]:
            while len(reserved.get(queue, ())) < most and (s := self._unacked.reserve(queue, ahead=ahead)):
                reserved.setdefault(queue, []).append(s)
        docs: dict[str, list[Document]] = {}
        try:
            docs = self._take(candidates, {queue: len(found) for queue, found in reserved.items()}, writes)
        finally:
            for queue, found in reserved.items():
                for subscription in found[len(docs.get(queue, ())) :]:
                    self._unacked.unreserve(subscription)
        for queue, found in reserved.items():
            writes += [
                self._claim(doc, s.credit, s, queue_candidates=candidates[queue])
                for doc, s in zip(docs[queue], found, strict=False)
            ]
        return sum(map(len, docs.values()))

    def _take(
        self, candidates: Mapping[str, QueueCandidates], wanted: Mapping[str, int], writes: list[PendingWrite]
    ) -> dict[str, list[Document]]:
        """Return up to `wanted` messages of each queue to be claimed; park those that get no slot or no start."""
        docs: dict[str, list[Document]] = {queue: [] for queue in wanted}
        missing, most = dict(wanted), len(writes) + _MAX_PARKED
        while missing:
            taken = self.reader.take(candidates, missing)
            for queue, admitted in self._gate.admit(taken, writes).items():
                docs[queue] += admitted
                if len(writes) >= most or len(admitted) == len(taken[queue]):
                    del missing[queue]
                else:
                    missing[queue] = wanted[queue] - len(docs[queue])
        return docs

    def _body(self, doc: Document) -> Body:
        """Read an attached body before the claim of a `basic_get`: with `no_ack`, the claim deletes the document."""
        return _UNREAD if stub(doc) is None else read(self._store.client, [doc])[0]

    def _claim(
        self,
        doc: Document,
        credit: Credit,
        subscription: Subscription | None = None,
        pull: Pull | None = None,
        queue_candidates: QueueCandidates | None = None,
        body: Body = _UNREAD,
    ) -> PendingWrite:
        """Return the write that claims a message, or that deletes it for a `basic_get` with `no_ack`."""
        final = pull is not None and pull.no_ack

        def failed(result: WriteResult) -> None:
            self._unacked.return_credit(credit)
            if queue_candidates is not None and result.is_conflict:
                queue_candidates.lost(doc['_id'])
                self._attention.lost()
            if result.is_refused:
                logger.error(
                    'message %s in queue %r cannot be claimed: %s', doc['_id'], doc.get('queue'), result.reason
                )
                if pull is not None:
                    pull.refused.add(doc['_id'])
                if result.is_permanent:
                    self._store.client.unusable.note(doc['_id'], doc['_rev'], result.reason)

        def set_aside(reason: str) -> PendingWrite:
            def decided(result: WriteResult) -> None:
                if result.is_stored:  # otherwise another consumer has made it one, and logs that
                    logger.error(
                        'message %s in queue %r was made a dead letter: %s', doc['_id'], doc.get('queue'), reason
                    )
                failed(result)  # also if it is stored: no message is delivered, so the credit must be returned

            return dead_letter.made_of(doc, reason, now), decided

        now = self._store.client.clock.now()
        if reason := validation.flaw(doc) or body.reason:
            return set_aside(reason)
        limit = self._topology.limits.of(doc['queue'])
        expired = workitem.has_expired(doc, now) and not workitem.delivers_expired(doc)
        if expired or (limit.ttl is not None and workitem.ready_since(doc) + limit.ttl <= now):
            logger.debug('dropped expired message %s of queue %s (not stored yet)', doc['_id'], doc['queue'])
            return workitem.dropped(doc, now), failed
        max_attempts = self._options.delivery_limit if limit.deliveries is None else limit.deliveries
        if max_attempts and doc['attempts'] >= max_attempts:
            return set_aside(f'{DELIVERY_LIMIT}: delivered {doc["attempts"]} times and never acknowledged')
        claimed = workitem.acked(doc, now) if final else workitem.claim(validation.checked(doc), self._lease.id, now)
        if not final and self._topology.is_temporary(doc['queue']):
            claimed = {**claimed, 'temporary': True}  # also if the publisher did not know that

        def on_result(result: WriteResult) -> None:
            # An unproven claim may have lost against another one on other nodes, so it is not delivered. But a message
            # that is deleted with its claim cannot be released: it is delivered, although another consumer may have
            # received it, too.
            if not (result.is_proven or (result.is_stored and final)):
                if result.is_unproven:
                    self._unproven.add(doc['_id'], result.rev)
                failed(result)
                return
            if queue_candidates is not None:
                queue_candidates.won(doc['_id'])
                self._attention.won(len(queue_candidates))
            logger.debug(
                'claimed and deleted message %s of queue %s, attempt %d'
                if final
                else 'claimed message %s of queue %s, attempt %d',
                doc['_id'],
                doc['queue'],
                doc['attempts'] + 1,
            )
            kept = doc if final else {**claimed, '_rev': result.rev}
            delivery = Delivery(
                kept,
                credit,
                subscription,
                final=final,
                body=body.content,
                needs_body=body.content is None and stub(kept) is not None,
            )
            if pull is None:
                self._unacked.add_claimed(delivery)
            else:
                self._unacked.hold(delivery)
                self.pulls.remove(pull)
                pull.set_result(delivery)

        return claimed, on_result

    def claim_for_pulls(self, pulls: list[Pull], writes: list[PendingWrite]) -> None:
        """Add a claim to `writes` for each `basic_get`, or end it without a message if the queue has none."""
        for pull in pulls:
            writes += self._claim_for_pull(pull)

    def _claim_for_pull(self, pull: Pull) -> list[PendingWrite]:
        if delivery := self._unacked.take_broadcast(pull):
            self.pulls.remove(pull)
            pull.set_result(delivery)
            return []
        now = self._store.client.clock.now()
        docs: Iterable[Document] = ()
        if pull.queue not in self._topology.paused:
            ready = self._store.each_ready(pull.queue, _PULL_CANDIDATES)
            docs = itertools.chain(self._gate.ready({pull.queue: 1}), ready)
        parked: list[PendingWrite] = []
        for doc in (doc for doc in docs if doc['_id'] not in pull.refused and not waits_for_slot(doc)):
            if validation.flaw(doc) or (workitem.is_waiting(doc) and workitem.is_due(doc, now)):
                # With `no_ack` the message is done when it is delivered: it needs no slot.
                if not self._gate.admit({pull.queue: [doc]}, parked, needs_slot=not pull.no_ack)[pull.queue]:
                    continue
                body = self._body(doc)  # the `basic_get` has to wait for the body in any case
                self._unacked.wakeup.set()  # if the claim fails, the next cycle tries another message
                self._unacked.take_credit(pull.credit)
                return [*parked, self._claim(doc, pull.credit, pull=pull, body=body)]
        self.pulls.remove(pull)
        pull.set_result(None)
        return parked
