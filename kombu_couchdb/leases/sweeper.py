"""The sweep: what dead consumers held is given back to its queues.

A sweeper that has seen a consumer silent for the whole lease (`watch`) deletes the consumer's document *by its revision*, and
then releases its claims. It also removes unused queues, keeps the limits of queues, and resolves conflicts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from math import inf

from .. import design
from ..couchdb.bulk import deletion
from ..couchdb.client import Document
from ..couchdb.conflicts import ConflictResolver
from ..documents import conflict_rules
from ..errors import NestedTooDeeply
from ..log import get_logger
from ..queues.limits import limit_in
from ..queues.store import Store
from ..queues.topology import Topology
from .janitor import Janitor
from .peers import queues_of
from .temporary import UnusedQueues
from .unproven import UnprovenClaims
from .watch import GRACE, Overdue, Watch, mark_of

__all__ = ['Sweeper']

logger = get_logger(__name__)

#: How long a sweep may delete messages, in seconds: meanwhile nothing is claimed, and no heartbeat is written. The next sweep
#: goes on, after a pause as long.
_DELETING = 0.5

#: How often what was left behind by killed processes is tidied away, in seconds, and how many documents of a kind at a time.
_TIDY, _TIDIED = 3600.0, 200


class Sweeper:
    """Gives back what dead consumers held, and removes queues that nobody uses any more."""

    def __init__(self, store: Store, topology: Topology, timeout: float) -> None:
        self._store, self._topology, self._timeout = store, topology, timeout
        self._watch = Watch(store.client.clock, timeout)
        self._overdue = Overdue(timeout / 3)
        #: What becomes of queues without consumers.
        self.unused = UnusedQueues(store, topology)
        #: Claims of this consumer that a cluster did not prove.
        self.unproven = UnprovenClaims()
        self._resolver = ConflictResolver(
            store.client,
            design.conflicted(),
            {
                'WorkItem': store.heal,
                **dict.fromkeys(
                    ('Queue', 'Binding', 'Exchange', 'Broadcast', 'Leader'),
                    lambda leaves, living: conflict_rules.keep_winner(leaves),
                ),
            },
        )
        self._janitor = Janitor(store.client)
        self._tidy_at = time.monotonic() + random.uniform(0.2, 1.0) * _TIDY
        # The first sweep is soon: a worker that is started again should find what it left behind.
        self._next = time.monotonic() + random.uniform(0.2, 1.0)
        #: A sweep that begins after this monotonic time shows that this process was stalled.
        self._expected = inf

    @property
    def due(self) -> float:
        """The monotonic time of the next sweep."""
        return min(self._next, self._resolver.due, self.unproven.due)

    def interrupted(self, seconds: float) -> None:
        """Note that the server did not answer for so many seconds up to now: others may have been cut off as well."""
        self._watch.interrupted(seconds)
        self._expected += seconds

    def sweep(self, own: str, held: Collection[str], on_orphans: Callable[[], None]) -> set[str]:
        """Sweep once and return the ids of the consumers that live.

        `own` is the sweeper's id and `held` the items it knows to be claimed by it; `on_orphans` is called if the database
        has more of them. One request where nothing is to be done.
        """
        asked = time.monotonic()
        if asked > self._expected:
            self._watch.interrupted(asked - self._next)  # others on this machine were probably stalled as well
        leases = self._store.leases()
        now = self._store.client.clock.now()
        consumers = {name: float(stats['max']) for name, stats in leases['consumer'].items()}
        self._watch.look(
            {name: mark for name, mark in consumers.items() if name != own}, asked, self._store.client.fetch
        )
        dead = self._fence(self._watch.silent())
        # The view may be older than the claims that name a consumer: only the primary index can say that it is gone.
        unknown = [name for name in leases['claim'] if name not in consumers and name != own]
        alive = self._store.alive(unknown)
        missing = [name for name in unknown if name not in alive]
        gone = [doc['_id'] for doc in dead] + missing
        conflicted = self._resolver.conflicted() if gone and self._store.client.replicas > 1 else {}
        for name in gone:
            # Of a conflicted one the claim that is seen may be unproven, and another one be held.
            count = self._store.release(doc for doc in self._store.claims(name) if doc['_id'] not in conflicted)
            if count:
                logger.warning(
                    '%d messages of a consumer that is gone (%s) were given back to their queues', count, name
                )
        living = set(consumers) - {doc['_id'] for doc in dead}
        ends = {name: float(stats['max']) for name, stats in leases['queue'].items()}
        overdue = self._overdue.proven({name: end for name, end in ends.items() if end + GRACE < now}, asked)
        self.unused.left |= {queue for doc in dead for queue in queues_of(doc)}
        pause = min(_DELETING, self._timeout / 6)
        until = time.monotonic() + pause
        dropped = self.unused.remove(overdue, now, until) if overdue or self.unused else 0
        dropped += self._keep_limits(leases, now, until)
        unfinished = bool(dropped) and time.monotonic() >= until
        if leases['claim'].get(own, {}).get('count', 0) > len({*held, *self.unproven}):
            on_orphans()
        self.unproven.decide(lambda doc_id, rev: self._decide_unproven(doc_id, rev, living))
        if time.monotonic() >= self._resolver.due:
            self._resolver.resolve(living)
        if time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + random.uniform(0.8, 1.2) * _TIDY
            self._janitor.tidy(_TIDIED)
        wait = min(self._watch.next_in(), self._overdue.next_in(), self._timeout)
        self._next = time.monotonic() + (
            pause if unfinished else max(wait, self._timeout / 10) + random.uniform(0.1, 1.0)
        )
        # Whoever is stalled for less is far from being silent for its whole lease, even just before its heartbeat.
        self._expected = self._next + max(self._timeout / 3, GRACE)
        return living

    def _decide_unproven(self, doc_id: str, rev: str, living: set[str]) -> bool:
        try:
            return self._store.settle_unproven(doc_id, rev, living)
        except NestedTooDeeply as exc:
            logger.error('the leaf revisions of %s stay as they are: %s', doc_id, exc)
            return True

    def _fence(self, silent: list[str]) -> list[Document]:
        """Delete the documents of silent consumers by their revision and return those whose deletion was proven."""
        # The view may be older than the last heartbeat.
        client, docs = self._store.client, list[Document]()
        for name, doc in zip(silent, self._store.client.fetch(silent), strict=True):
            if doc and mark_of(doc) == self._watch.mark(name):
                docs.append(doc)
            elif doc is None and client.unusable.has(name, None) and (rev := client.rev(name)):
                docs.append({'_id': name, '_rev': rev})  # no consumer of ours has written what cannot be read
        if not docs:
            return []
        results = self._store.client.bulk([deletion(doc) for doc in docs])
        gone = [doc for doc, result in zip(docs, results, strict=True) if result.is_proven]
        for doc in gone:
            logger.warning(
                'consumer %s on %s (pid %s) has not been heard of since its lease ended',
                doc['_id'],
                doc.get('host'),
                doc.get('pid'),
            )
        return gone

    def _keep_limits(self, leases: Mapping[str, Mapping[str, Document]], now: float, until: float) -> int:
        """Drop what has expired, or is more than its queue may hold: nobody need take it, or publish, for that to happen."""
        dropped = 0
        if any(float(stats['min']) <= now for stats in leases['expiry'].values()):
            dropped += self._store.drop_expired(until)
        for doc in self._topology.queues(sorted(leases['limit'])):
            limit = limit_in(doc)
            if limit.ttl is not None:
                dropped += self._store.drop_older(doc['name'], limit.ttl, until)
            if limit.length is not None:
                dropped += self._store.trim(doc['name'], limit.length, until)
        if dropped:
            logger.info('%d messages were dropped: they had expired, or were more than their queues may hold', dropped)
        return dropped
