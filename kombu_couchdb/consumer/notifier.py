"""The notifier: what is new in the database, from the changes feed for an idle consumer, by polling for a busy one.

The changes feed of a busy database is expensive: CouchDB filters every change for every feed (80 µs each, measured on
CouchDB 3.5), while one range read of the heartbeats and broadcasts costs 2 ms. So a busy consumer polls four times a
second, and an idle one follows the feed, which costs no requests while nothing changes. Here *busy* means that the
consumer has credit for a queue that may have more messages; in `peers` it means that a consumer claims nothing. The
costs do not grow with the number of queues that other processes have declared.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..couchdb.changes import LIMIT, ContinuousFeed
from ..couchdb.client import Client, Document, Row
from ..documents.concurrency import is_parked, parked_key
from ..documents.ids import BINDING, BROADCAST, BROKER, CONSUMER, PAUSE, QUEUE
from ..documents.workitem import is_waiting
from ..errors import CouchDBError
from ..leases.peers import Peers
from ..queues.fanout import Listener
from ..queues.routing import exchange_in, exchange_prefix
from ..queues.topology import Topology
from .broadcast_feed import BroadcastFeed
from .candidates import QueueCandidates

__all__ = ['Notifier']

#: How often a busy consumer polls for broadcasts, bindings, pauses and other consumers, in seconds.
_POLL_SECONDS = 0.25

#: How often it reads the declarations of its queues, for changed limits, in seconds.
_QUEUE_POLL_SECONDS = 1.0

#: The same while the consumer follows the broadcasts database: it polls for other consumers, and for everything as a
#: safety net. In seconds.
_PEERS_POLL_SECONDS, _SAFETY_POLL_SECONDS = 1.0, 10.0

#: How long a consumer still polls after it was busy, before it follows the feed; and how long the feed still reports
#: the messages of a queue after the last credit for it is used. In seconds.
_LINGER_SECONDS = 1.0


class Notifier:
    """What is new in one database, for the I/O thread of one connection.

    It keeps `listener`, `peers`, and what `topology` knows of bindings, limits and pauses up to date.
    """

    def __init__(
        self, client: Client, topology: Topology, listener: Listener, broadcasts: BroadcastFeed, name: str
    ) -> None:
        self.listener, self.peers, self.broadcasts = listener, Peers(), broadcasts
        self._client, self._name = client, name
        self._topology, self._routes, self._limits = topology, topology.routes, topology.limits
        self._feed: ContinuousFeed | None = None
        #: The least seconds between two looks at the feed, if they are more than its own.
        self.feed_interval = 0.0
        self._received: deque[tuple[list[Row], Any] | CouchDBError] = deque()
        #: The revisions of the polled documents, by id.
        self._known_revs: dict[str, str] = {}
        #: The exchanges whose bindings are in `_known_revs`.
        self._polled_exchanges: set[str] = set()
        #: Is called with the `parked_key` of each message that changed, or None if it has none.
        self.on_waiting: Callable[[str | None], None] = lambda parked: None
        #: By queue: the monotonic time at which there was last credit for it.
        self._credit_at: dict[str, float] = {}
        #: The update sequence from which the feed is followed; None: it is not followed.
        self._since: Any = None
        #: The queues whose messages the feed reports.
        self._followed: frozenset[str] = frozenset()
        #: An update sequence from before the queues were last read, or None.
        self._checkpoint: Any = None
        self._polled_at = self._polled_all_at = self._queues_polled_at = self._busy_at = float('-inf')

    def start(self, on_change: Callable[[], None]) -> None:
        """Start the feed's thread; it calls `on_change()` when `take` has something to return."""

        def receive(item: tuple[list[Row], Any] | CouchDBError) -> None:
            self._received.append(item)
            on_change()

        self._feed = ContinuousFeed(self._client, lambda rows, seq: receive((rows, seq)), receive, f'{self._name}-feed')
        self.broadcasts.start(on_change)

    def close(self) -> None:
        """End the feed's thread."""
        self._routes.follow(0.0)
        if self._feed is not None:
            self._feed.close()
        self.broadcasts.close()

    def on_outage(self) -> None:
        """Forget everything: CouchDB did not respond, or the database may be a new one."""
        self._routes.follow(0.0)
        self._stop_feed()
        self._known_revs.clear()
        self._polled_exchanges.clear()
        self._received.clear()
        self._checkpoint = None
        self._polled_at = self._polled_all_at = self._queues_polled_at = float('-inf')
        self.broadcasts.on_outage()

    def due_at(self) -> float | None:
        """Return the monotonic time of the next poll; None while the feed is followed."""
        at = self.broadcasts.due_at()
        if self._since is None:
            at = min(at, self._polled_at + self._poll_seconds)
        return at if at < math.inf else None

    @property
    def _poll_seconds(self) -> float:
        return _PEERS_POLL_SECONDS if self.broadcasts.is_followed else _POLL_SECONDS

    def take(
        self, candidates: Mapping[str, QueueCandidates], with_credit: set[str]
    ) -> tuple[list[Document], list[tuple[str, Document]]]:
        """Return the new messages that may be claimed, and the new broadcasts as `(queue, message)`.

        `with_credit` names the queues for which a message could be claimed now. *Raises* the error that ended the feed.
        """
        docs = self._take_received(candidates)
        broadcasts = self.broadcasts.take()
        now = time.monotonic()
        if any(candidates[queue].is_stale for queue in with_credit):
            self._stop_feed()
            self._busy_at = now
            if self._checkpoint is None or any(
                candidates[queue].reads_head_next and candidates[queue].needs_page for queue in with_credit
            ):
                # If the feed starts at this point, it does not report older changes: read all queues after this point.
                # Only a read of the head can make the candidates of a queue complete. CouchDB reads each document that
                # changed after this point for the feed, so the point is not older than that read.
                self._checkpoint = self._client.sequence()
                for queue_candidates in candidates.values():
                    queue_candidates.mark_stale()
        elif now - self._busy_at >= _LINGER_SECONDS or not any(
            queue_candidates.is_stale for queue_candidates in candidates.values()
        ):
            docs += self._follow_feed(candidates, with_credit)
        if self._since is not None:
            self.broadcasts.noticed = False  # the feed reports what has changed
        elif self.broadcasts.noticed or now - self._polled_at >= self._poll_seconds:
            docs += self._poll(candidates)
        self.broadcasts.saw_elsewhere(docs)
        broadcasts += self.broadcasts.follow()  # last: in an outage the requests above end the cycle
        for doc in broadcasts:
            self._routes.note_reply(doc.get('reply'))
        items = [doc for doc in docs if doc.get('type') == 'WorkItem' and is_waiting(doc)]
        for doc in items:
            self.on_waiting(parked_key(doc))
        items = [doc for doc in items if not is_parked(doc)]
        # CouchDB's filter also admits a document whose `queue` is a list with the name in it.
        return [
            doc for doc in items if isinstance(doc.get('queue'), str) and doc['queue'] in candidates
        ], self.listener.take(docs + broadcasts)

    def _take_received(self, candidates: Mapping[str, QueueCandidates]) -> list[Document]:
        """Return the documents that the feed reported, and let it continue."""
        docs: list[Document] = []
        while self._received:
            item = self._received.popleft()
            if isinstance(item, CouchDBError):
                raise item
            rows, last = item
            docs += [row['doc'] for row in rows if row.get('doc')]
            if self._since is None:
                continue  # reported before the feed was stopped
            if len(rows) >= LIMIT:
                self._stop_feed()
                for queue in self._followed:
                    if queue in candidates:
                        candidates[queue].mark_stale()
            else:
                self._start_feed(last, self._followed)
        for doc in docs:
            self._note(doc)
        return docs

    def _follow_feed(self, candidates: Mapping[str, QueueCandidates], with_credit: set[str]) -> list[Document]:
        """Follow the feed for all queues whose candidates are complete."""
        now = time.monotonic()
        self._credit_at = {
            queue: now if queue in with_credit else self._credit_at.get(queue, now) for queue in candidates
        }
        for queue, queue_candidates in candidates.items():
            # For a queue without credit, stop after a while, or if there are many messages: forget its candidates, and
            # leave it out of the feed. A queue with credit is kept: otherwise this cycle would read it again, at an
            # unknown point of the feed, and the feed could not continue from there.
            if (
                self._since is not None
                and queue not in with_credit
                and not queue_candidates.is_stale
                and (len(queue_candidates) > LIMIT or now - self._credit_at[queue] > _LINGER_SECONDS)
            ):
                queue_candidates.clear()
        complete = frozenset(queue for queue, queue_candidates in candidates.items() if not queue_candidates.is_stale)
        if self._since is None:
            # The checkpoint may be old. If no candidates are complete, no queue needs the changes since then.
            since = self._client.sequence() if self._checkpoint is None or not complete else self._checkpoint
            docs = self._poll(candidates, everything=True)
            self._start_feed(since, complete)
            self._checkpoint = None
            return docs
        if not complete <= self._followed:
            if self._checkpoint is not None:
                self._start_feed(self._checkpoint, complete)
            for queue in complete - self._followed:
                # When the queue was read, the feed did not report it, and was at an unknown point: read it again, after
                # a known point.
                candidates[queue].mark_stale()
        elif complete < self._followed:
            self._start_feed(self._since, complete)
        self._checkpoint = None
        return []

    def _start_feed(self, since: Any, queues: frozenset[str]) -> None:
        self._since, self._followed = since, queues
        self._routes.follow(math.inf)
        if self._feed is not None:
            self._feed.min_interval = self.feed_interval
            self._feed.watch(since, _selector(queues))

    def _stop_feed(self) -> None:
        if self._since is not None:
            # Whatever reads the queues from now on is newer than this point.
            self._checkpoint = self._since if self._checkpoint is None else self._checkpoint
            self._since = None
            if self._feed is not None:
                self._feed.pause()

    def _poll(self, candidates: Mapping[str, QueueCandidates], *, everything: bool = False) -> list[Document]:
        """Return the changed documents that are no messages.

        This takes one request, and one more each for bindings, for all changed documents together, and, once a second,
        for the declarations of the queues. While the broadcasts database is followed, it reads only the heartbeats,
        unless `everything` is true, or there was a notice, or the safety net is due.
        """
        self._polled_at = time.monotonic()
        followed = self.broadcasts.is_followed
        if (
            followed
            and not everything
            and not self.broadcasts.noticed
            and self._polled_at - self._polled_all_at < _SAFETY_POLL_SECONDS
        ):
            return self._poll_peers()
        self._polled_all_at, self.broadcasts.noticed = self._polled_at, False
        exchanges = sorted(self._routes.wanted | self.listener.exchanges)
        rows = self._client.id_range(BROADCAST, to=CONSUMER)
        if exchanges:
            rows += self._client.id_range(exchange_prefix(exchanges[0]), to=exchange_prefix(exchanges[-1]))
        revs = {row['id']: row['value']['rev'] for row in rows}
        self._topology.read_paused(revs)
        docs = [
            doc
            for doc in self._client.fetch([name for name, rev in revs.items() if self._known_revs.get(name) != rev])
            if doc
        ]
        for exchange in exchanges:
            if exchange not in self._polled_exchanges:
                its = {doc['_id']: doc for doc in docs if doc['_id'].startswith(exchange_prefix(exchange))}
                self._routes.replace(its, self._polled_at, exchange_prefix(exchange))
                self._polled_exchanges.add(exchange)
        docs += [{'_id': name, '_deleted': True} for name in self._known_revs.keys() - revs.keys()]
        self._known_revs = revs
        if followed or self._polled_at - self._queues_polled_at >= _QUEUE_POLL_SECONDS:
            self._queues_polled_at = self._polled_at
            names = [QUEUE + queue for queue in candidates]
            docs += [
                doc or {'_id': name, '_deleted': True}
                for name, doc in zip(names, self._client.find(names), strict=True)
            ]
        for doc in docs:
            self._note(doc)
        self._routes.follow(math.inf if followed else _POLL_SECONDS * 4, exchanges)
        return docs

    def _poll_peers(self) -> list[Document]:
        """Take in the changed heartbeats, and return them."""
        revs = {row['id']: row['value']['rev'] for row in self._client.id_range(CONSUMER)}
        known = {name: rev for name, rev in self._known_revs.items() if name.startswith(CONSUMER)}
        changed = [name for name, rev in revs.items() if known.get(name) != rev]
        docs = [doc for doc in self._client.fetch(changed) if doc]
        docs += [{'_id': name, '_deleted': True} for name in known.keys() - revs.keys()]
        self._known_revs = {name: rev for name, rev in self._known_revs.items() if name not in known} | revs
        for doc in docs:
            self._note(doc)
        return docs

    def _note(self, doc: Document) -> None:
        if doc.get('_deleted'):
            self._topology.declarations.was_deleted(doc['_id'])
            exchange = exchange_in(doc['_id'])
            # The exchange may have been declared and bound again meanwhile.
            if exchange is not None and self.listener.listens_to(exchange) and not self._topology.has_fanout(exchange):
                self.listener.forget(exchange)
        if doc['_id'].startswith(BINDING):
            self._routes.update(doc)
        elif doc['_id'].startswith(CONSUMER):
            self.peers.seen(doc)
        elif doc['_id'].startswith(PAUSE):
            self._topology.note_paused(doc)
        elif doc['_id'].startswith(QUEUE):
            self._limits.seen({'name': doc['_id'].removeprefix(QUEUE), 'arguments': doc.get('arguments')})


def _selector(queues: frozenset[str]) -> Document:
    """Return the feed's filter: messages of these queues that no consumer has claimed, and the broker's documents."""
    return {
        '$or': [
            {'type': 'WorkItem', 'claimed': None, 'queue': {'$in': sorted(queues)}, 'status': {'$exists': False}},
            {'type': {'$in': ['Binding', 'Exchange', 'Broadcast', 'Queue', 'Pause']}},
            {'type': 'Consumer', 'beats': 0},
            {'_deleted': True, '_id': {'$gt': BROKER, '$lt': 'broker;'}},
        ]
    }
