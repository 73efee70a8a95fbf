"""The sweep: releases the messages of consumers whose leases expired, and does the housekeeping of the database.

Each consumer sweeps. A sweeper that has seen a consumer silent for its whole lease (see `lease`) deletes the
consumer's heartbeat document *by its revision*, and then releases its messages and frees its concurrency slots. If the
consumer writes a heartbeat meanwhile, the deletion is in conflict, and the lease goes on. The sweep also deletes unused
queues, enforces the limits of queues, decides about unproven claims, resolves conflicts, and cleans up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from math import inf
from typing import Any

from .. import design
from ..couchdb.bulk import deletion
from ..couchdb.call import urgent
from ..couchdb.client import Document
from ..couchdb.conflicts import SYNC, ConflictResolver
from ..documents import concurrency, conflict_rules, rates
from ..documents.queue import limit_of
from ..errors import NotFound, ServerUnavailable
from ..log import get_logger
from ..options import heartbeat_interval
from ..queues.store import LeaseStats, Store
from ..queues.topology import Topology
from ..rooms import rooms
from .housekeeping import Janitor, UnusedQueues
from .lease import GRACE_SECONDS, Unchanged, Watch, expires_of, queues_of

logger = get_logger(__name__)

#: The longest time for which one sweep deletes messages: meanwhile the consumer claims nothing and writes no heartbeat.
#: The next sweep goes on after a pause of the same length.
_MAX_DELETING_SECONDS = 0.5

#: The most messages of failed tasks that are kept: about 200 MB. The oldest are deleted first.
_MAX_FAILED = 100_000

#: All consumers that rest (see `fleet.attention`) together sweep about once in this time, in seconds; but each at
#: least once in this number of leases.
_FLEET_SECONDS, _REST_LEASES = 5.0, 10.0

#: The interval at which a sweep cleans up after killed processes and lets CouchDB update the index of failures, in
#: seconds; and the most documents of a kind that it deletes.
_CLEAN_UP_INTERVAL_SECONDS, _MAX_CLEAN_UP_DOCS = 3600.0, 200

#: Takes what a sweep has read, the id of this consumer, and the ids of those whose leases have just ended.
SweepLimits = Callable[[LeaseStats, str, Collection[str]], None]


class UnprovenClaims:
    """The unproven claims of one consumer: those that a cluster stored on fewer nodes than a quorum.

    CouchDB may have confirmed another consumer's claim of the same message. So an unproven claim is not delivered.
    After `SYNC` seconds, in which the nodes replicate to each other, the sweeper reads all leaf revisions of the
    message and decides about the claim; see `documents.conflict_rules`. Only the consumer's I/O thread may use the
    claims.
    """

    def __init__(self) -> None:
        self._claims: dict[str, tuple[str, float]] = {}  # by message id: the claim's revision, and a monotonic time

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the messages."""
        return iter(self._claims)

    def add(self, doc_id: str, rev: str) -> None:
        """Note the claim that was stored as revision `rev` of a message."""
        self._claims[doc_id] = rev, time.monotonic()

    def proven(self, doc_id: str, rev: str) -> None:
        """Note that a quorum has stored this revision of a message: the consumer holds the message."""
        if self._claims.get(doc_id, ('', 0.0))[0] == rev:
            del self._claims[doc_id]

    @property
    def due(self) -> float:
        """The monotonic time at which the first claim can be decided; infinite if there is none."""
        return min([since + SYNC for _, since in self._claims.values()], default=inf)

    def decide(self, decide: Callable[[str, str], bool]) -> None:
        """Call `decide(doc_id, rev)` for each claim that is due; forget the claims for which it returns True."""
        for doc_id, (rev, since) in list(self._claims.items()):
            if time.monotonic() - since > SYNC:
                self._claims[doc_id] = rev, time.monotonic()
                if decide(doc_id, rev):
                    del self._claims[doc_id]


class Sweeper:
    """Sweeps one database, for one consumer. Only the consumer's I/O thread may use it."""

    def __init__(
        self, store: Store, topology: Topology, timeout: float, sweep_limits: SweepLimits = lambda *leases: None
    ) -> None:
        """Create a sweeper; `timeout` is the visibility timeout in seconds, and `sweep_limits` a part of each sweep."""
        self._store, self._topology, self._timeout, self._sweep_limits = store, topology, timeout, sweep_limits
        self._watch = Watch(store.client.clock, timeout)
        #: Queues whose lifetime has passed by the server's time, by name, with the time at which it had.
        self._overdue = Unchanged(heartbeat_interval(timeout))
        #: Deletes queues without consumers.
        self.unused = UnusedQueues(store, topology)
        #: Whether this consumer rests, and listeners sweep, too.
        self.rests = False
        #: Claims of this consumer that a cluster did not prove.
        self.unproven = UnprovenClaims()
        self._resolver = ConflictResolver(
            store.client,
            design.conflicted(),
            {
                **dict.fromkeys(
                    ('WorkItem', 'DoneItem', *chain(*(room.item_types for room in rooms()))), self._resolve_item
                ),
                'Slot': lambda leaves, living: concurrency.resolve_slot(
                    leaves, {*living, *store.alive({str(leaf.get('by')) for leaf in leaves} - {*living})}
                ),
                'Rate': lambda leaves, living: conflict_rules.keep_winner(leaves, rates.order),
                **dict.fromkeys(
                    ('Queue', 'Binding', 'Exchange', 'Broadcast', 'Leader', 'Pause', 'Schedule', 'ScheduleState'),
                    lambda leaves, living: conflict_rules.keep_winner(leaves),
                ),
            },
        )
        self._janitor = Janitor(store.client, topology.broadcasts)
        self._clean_up_at = time.monotonic() + random.uniform(0.2, 1.0) * _CLEAN_UP_INTERVAL_SECONDS
        #: The id of this consumer, and the ids of the messages that it knows to have claimed, as of this sweep.
        self._own, self._claimed = '', frozenset[str]()
        # The first sweep is early: a restarted worker finds the messages of its predecessor soon.
        self._next = self._next_at_rest = time.monotonic() + random.uniform(0.2, 1.0)

    @property
    def due(self) -> float:
        """The monotonic time of the next sweep."""
        return min(self._next_at_rest if self.rests else self._next, self._resolver.due, self.unproven.due)

    def abandon(self, queue: str) -> None:
        """Check soon whether a temporary queue still has consumers. Any thread may call it."""
        self.unused.abandoned.add(queue)

    def interrupted(self, seconds: float) -> None:
        """Note that for the last `seconds` others may have written no heartbeat, although they live.

        The server did not respond to this process, or this process was stalled, and others of its machine, too. A claim
        that got no response may be hidden behind the leaf of another consumer: only the conflicts show it.
        """
        self._watch.interrupted(seconds)
        self._resolver.expect()

    def sweep(self, own: str, held: Collection[str], on_orphans: Callable[[], None]) -> set[str]:
        """Sweep once and return the ids of the living consumers; one request if there is nothing to do.

        `own` is the id of this consumer, and `held` has the ids of the messages that it knows to have claimed. If the
        database has more of its claims, the sweep calls `on_orphans`. *Raises* the errors of `Client`; the next sweep
        does the rest.
        """
        asked = time.monotonic()
        leases = self._store.leases()
        now = self._store.client.clock.now()
        expired = self._end_expired_leases(leases, own, asked)
        self._release_messages(leases, own, expired)
        if leases['slot'] or leases['parked']:
            self._sweep_limits(leases, own, {doc['_id'] for doc in expired})
        living = set(leases['consumer']) - {doc['_id'] for doc in expired}
        self.unused.abandoned |= {queue for doc in expired for queue in queues_of(doc)}
        pause = min(_MAX_DELETING_SECONDS, heartbeat_interval(self._timeout) / 2)
        until = time.monotonic() + pause
        deleted = self._delete_unused_queues(leases, now, asked, until)
        deleted += self._enforce_limits(leases, now, until)
        unfinished = bool(deleted) and time.monotonic() >= until
        self._own, self._claimed = own, frozenset([*held, *self.unproven])
        if has_orphans := leases['claim'].get(own, {}).get('count', 0) > len(self._claimed):
            on_orphans()
        if has_orphans or self.unproven:
            self._resolver.expect()
        # Another claim of this consumer that it does not hold got no response either: it is nobody's.
        self.unproven.decide(
            lambda doc_id, rev: self._store.decide_unproven(doc_id, rev, living, ended=() if doc_id in held else (own,))
        )
        if time.monotonic() >= self._resolver.due:
            self._resolver.resolve(living)
        self._clean_up(has_failures=bool(leases['failed']))
        self._schedule(pause if unfinished else None, len(living))
        return living

    def _end_expired_leases(self, leases: LeaseStats, own: str, asked: float) -> list[Document]:
        """Delete the heartbeats of silent consumers; return those whose deletion was proven."""
        expires = {name: stats['max'] for name, stats in leases['consumer'].items() if name != own}
        self._watch.observe(expires, asked, self._store.client.fetch, {*leases['claim'], *leases['slot']})
        expired = self._delete_heartbeats(self._watch.silent())
        for doc in expired:
            logger.warning(
                'consumer %s on %s (pid %s) wrote no heartbeat for longer than its lease',
                doc['_id'],
                doc.get('host'),
                doc.get('pid'),
            )
        return expired

    def _delete_heartbeats(self, silent: list[str]) -> list[Document]:
        """Delete these consumers' documents by their revision; return those whose deletion was proven."""
        client, docs = self._store.client, list[Document]()
        for name, doc in zip(silent, client.fetch(silent), strict=True):
            # The view may be older than the last heartbeat: only a document as the watch saw it is deleted.
            if doc and expires_of(doc) == self._watch.expires(name):
                docs.append(doc)
        if not docs:
            return []
        asked = time.monotonic()
        try:
            with urgent(heartbeat_interval(self._timeout)):
                results = client.bulk([deletion(doc) for doc in docs])
        except ServerUnavailable as exc:
            if exc.status != 429:
                raise
            # The service refuses all writes, heartbeats too: the silence proves nothing.
            self.interrupted(time.monotonic() - asked)
            return []
        return [doc for doc, result in zip(docs, results, strict=True) if result.is_proven]

    def _release_messages(self, leases: LeaseStats, own: str, expired: list[Document]) -> None:
        """Release the messages of the `expired` consumers, and of claimants that have no heartbeat document."""
        # The view may show a claim and not the claimant's heartbeat yet: only a read of the document proves that there
        # is none.
        unknown = [name for name in leases['claim'] if name not in leases['consumer'] and name != own]
        alive = self._store.alive(unknown)
        names = [doc['_id'] for doc in expired] + [name for name in unknown if name not in alive]
        conflicted = self._resolver.conflicted() if names and self._store.client.replicas > 1 else {}
        for name in names:
            # The claim that CouchDB shows of a conflicted message may be an unproven one, while another consumer has a
            # proven claim. The conflict resolution decides about such messages.
            count = self._store.release(doc for doc in self._store.claims(name) if doc['_id'] not in conflicted)
            if count:
                logger.warning('%d messages of consumer %s, which has no lease any more, were released', count, name)

    def _delete_unused_queues(self, leases: LeaseStats, now: float, asked: float, until: float) -> int:
        """Delete unused queues; return the number of deleted messages."""
        ends = {name: stats['max'] for name, stats in leases['queue'].items()}
        overdue = self._overdue.observe({name: end for name, end in ends.items() if end + GRACE_SECONDS < now}, asked)
        return self.unused.delete(overdue, now, until) if overdue or self.unused else 0

    def _enforce_limits(self, leases: LeaseStats, now: float, until: float) -> int:
        """Drop messages that have expired or were kept long enough, and those over a limit, of queues in use or not."""
        dropped = 0
        if any(stats['min'] <= now for stats in leases['expiry'].values()):
            dropped += self._store.drop_expired(until)
        if any(stats['count'] > _MAX_FAILED for stats in leases['failed'].values()):
            dropped += self._store.trim_failed(_MAX_FAILED)
        used = self._store.queues_in_use() if leases['limit'] else frozenset()
        for doc in self._topology.queues(sorted(leases['limit'].keys() & used)):
            limit = limit_of(doc)
            if limit.ttl is not None:
                dropped += self._store.drop_older(doc['name'], limit.ttl, until)
            if limit.length is not None:
                dropped += self._store.trim(doc['name'], limit.length, until)
        if dropped:
            logger.info('%d messages had expired or exceeded a limit, and were deleted', dropped)
        return dropped

    def _resolve_item(self, leaves: list[Document], living: Collection[str]) -> list[Mapping[str, Any]] | None:
        """Return the changes that resolve the conflict of a message; None if they cannot be decided yet.

        A claim of this consumer that it does not hold is nobody's, although this consumer lives: it has acknowledged
        another leaf, for example if an operator's edit was stored twice.
        """
        mine = leaves[0]['_id'] in self._claimed
        return self._store.resolve_conflict(leaves, living, ended=() if mine else (self._own,))

    def _clean_up(self, *, has_failures: bool) -> None:
        if time.monotonic() >= self._clean_up_at:
            self._clean_up_at = time.monotonic() + random.uniform(0.8, 1.2) * _CLEAN_UP_INTERVAL_SECONDS
            self._janitor.clean_up(_MAX_CLEAN_UP_DOCS)
            if has_failures and not self.rests:
                # Nobody but people reads this index. Let CouchDB update it, so that they need not wait for that.
                with suppress(NotFound):
                    self._store.client.view(design.JOBS, 'failures', reduce=False, limit=0, update='lazy')

    def _schedule(self, pause: float | None, living: int) -> None:
        """Set the time of the next sweep: after `pause` seconds, or when a lease or a queue may have expired.

        If many consumers (`living`) rest, each sweeps more rarely: the listeners sweep in time. If one of them finds
        that a heartbeat is missing, the listeners do not.
        """
        wait = max(min(self._watch.next_in(), *self._overdue.left(), self._timeout), self._timeout / 10)
        self._next = time.monotonic() + (wait + random.uniform(0.1, 1.0) if pause is None else pause)
        self._next_at_rest = self._next
        if pause is None and not self._watch.suspects:
            self._next_at_rest += max(0.0, min(_FLEET_SECONDS * living, _REST_LEASES * self._timeout) - wait)
