"""Claims of messages, and the handling of CouchDB's answers to them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..couchdb.client import Document
from ..couchdb.write_result import WriteResult
from ..documents import dead_letter, workitem
from ..documents.body import stub
from ..documents.reasons import DELIVERY_LIMIT
from ..leases.lease import Lease
from ..leases.unproven import UnprovenClaims
from ..log import get_logger
from ..options import Options
from ..queues.limits import Limits
from ..queues.store import Store
from .bodies import Body, read
from .candidate_reader import CandidateReader
from .candidates import QueueCandidates
from .delivery import Credit, Delivery, Subscription
from .pending_writes import Change
from .pull import Pull
from .unacked import Unacked

__all__ = ['Claims']

logger = get_logger(__name__)


_UNREAD = Body(None)

#: How many messages are looked at for one that is asked for.
_LOOKED_AT = 8


class Claims:
    """Makes claims of candidates, as changes to be written by the I/O thread, and delivers what was won."""

    def __init__(
        self,
        store: Store,
        options: Options,
        unacked: Unacked,
        lease: Lease,
        unproven: UnprovenClaims,
        limits: Limits,
    ) -> None:
        self._store, self._options, self._unacked, self._lease, self._unproven = (
            store,
            options,
            unacked,
            lease,
            unproven,
        )
        self._limits = limits
        self.reader, self._rotation = CandidateReader(store.client), itertools.count()
        #: Those who wait for one message.
        self.pulls = unacked.pulls

    def wanted(
        self, credit: Mapping[str, int], candidates: Mapping[str, QueueCandidates], changes: list[Change]
    ) -> None:
        """Add to `changes` claims for as many messages as there is credit for."""
        served = [queue for queue, free in credit.items() if free > 0 and queue in candidates]
        self.reader.refill([candidates[queue] for queue in served if candidates[queue].is_short])
        wanted = [queue for queue in served if candidates[queue].has_claimable]
        # An equal share each, and each in turn the first, so that a full queue does not starve a small one.
        share, first = (
            max(1, self._options.claim_batch // max(1, len(wanted))),
            next(self._rotation) % max(1, len(wanted)),
        )
        reserved: dict[str, list[Subscription]] = {}
        for queue in wanted[first:] + wanted[:first]:
            while len(reserved.get(queue, ())) < share and (subscription := self._unacked.reserve(queue)):
                reserved.setdefault(queue, []).append(subscription)
        docs: dict[str, list[Document]] = {}
        try:
            docs = self.reader.take(candidates, {queue: len(found) for queue, found in reserved.items()})
        finally:
            for queue, found in reserved.items():
                for subscription in found[len(docs.get(queue, ())) :]:
                    self._unacked.unreserve(subscription)
        for queue, found in reserved.items():
            changes += [
                self._claim(doc, s.credit, s, queue_candidates=candidates[queue])
                for doc, s in zip(docs[queue], found, strict=False)
            ]

    def _body(self, doc: Document) -> Body:
        """Read the body of what is claimed next, if it is an attachment: a deletion takes it along."""
        return _UNREAD if stub(doc) is None else read(self._store.client, [doc])[0]

    def _claim(
        self,
        doc: Document,
        credit: Credit,
        subscription: Subscription | None = None,
        pull: Pull | None = None,
        queue_candidates: QueueCandidates | None = None,
        body: Body = _UNREAD,
    ) -> Change:
        """Return the claim of an item, for which credit was taken; if it is pulled without acknowledgement, its deletion."""
        final = pull is not None and pull.no_ack

        def failed(result: WriteResult) -> None:
            self._unacked.spend(credit, -1)
            if queue_candidates is not None and result.is_conflict:
                queue_candidates.lost(doc['_id'])
            if result.is_refused:
                logger.error(
                    'message %s in queue %r cannot be claimed: %s', doc['_id'], doc.get('queue'), result.reason
                )
                if pull is not None:
                    pull.refused.add(doc['_id'])
                if result.is_permanent:
                    self._store.client.unusable.note(doc['_id'], doc['_rev'], result.reason)

        def set_aside(reason: str) -> Change:
            logger.error(
                'message %s in queue %r was set aside as a dead letter: %s', doc['_id'], doc.get('queue'), reason
            )
            return dead_letter.made_of(doc, reason, now), failed

        now = self._store.client.clock.now()
        if reason := workitem.flaw(doc) or body.reason:
            return set_aside(reason)
        limit = self._limits.of(doc['queue'])
        expired = workitem.has_expired(doc, now) and not workitem.delivers_expired(doc)
        if expired or (limit.ttl is not None and workitem.ready_since(doc) + limit.ttl <= now):
            return workitem.acked(doc, now), failed
        most = self._options.delivery_limit if limit.deliveries is None else limit.deliveries
        if most and doc['attempts'] >= most:
            return set_aside(f'{DELIVERY_LIMIT}: delivered {doc["attempts"]} times and never done')
        claimed = workitem.acked(doc, now) if final else workitem.claim(workitem.checked(doc), self._lease.id, now)

        def answered(result: WriteResult) -> None:
            # Only a clean answer proves the claim: an accepted one may have lost to another on other nodes. What was deleted
            # with its claim nobody could give back, and so it is delivered, though another one may have it, too.
            if not (result.is_proven or (result.is_stored and final)):
                if result.is_unproven:
                    self._unproven.add(doc['_id'], result.rev)
                failed(result)
                return
            if queue_candidates is not None:
                queue_candidates.won(doc['_id'])
            kept = doc if final else {**claimed, '_rev': result.rev}
            delivery = Delivery(
                kept,
                credit,
                subscription,
                final=final,
                body=body.content,
                unread=body.content is None and stub(kept) is not None,
            )
            if pull is None:
                self._unacked.arrive(delivery)
            else:
                self._unacked.keep(delivery)
                self.pulls.remove(pull)
                pull.answer(delivery)

        return claimed, answered

    def pulled(self, pulls: list[Pull], changes: list[Change]) -> None:
        """Add to `changes` claims for those who asked for one message; who cannot have one is told so."""
        for pull in pulls:
            changes += self._pulled(pull)

    def _pulled(self, pull: Pull) -> list[Change]:
        now = self._store.client.clock.now()
        docs = [row.doc for row in self._store.ready(pull.queue, _LOOKED_AT) if row.doc]
        for doc in (doc for doc in docs if doc['_id'] not in pull.refused):
            if workitem.flaw(doc) or (workitem.is_waiting(doc) and workitem.is_due(doc, now)):
                body = self._body(doc)  # who waits for this message has to wait for its body in any case
                self._unacked.wakeup.set()  # should the claim fail, the next turn looks again
                self._unacked.spend(pull.credit)
                return [self._claim(doc, pull.credit, pull=pull, body=body)]
        self.pulls.remove(pull)
        pull.answer(None)
        return []
