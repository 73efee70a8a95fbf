"""Notifications for a consuming connection: from the feed of changes while it is idle, by polling while it is busy.

A feed in a busy database is dear: the server looks at every change for every listener (80 µs each, measured on CouchDB
3.5), while one range read over the heartbeats and broadcasts costs 2 ms. So a consumer that has more to claim than it can,
looks four times a second, and one that has nothing to do listens, which costs no request at all. What is read does not grow with
the number of queues that others have declared.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..couchdb.changes import LIMIT, ContinuousFeed
from ..couchdb.client import Client, Document, Row
from ..documents.ids import BINDING, BROADCAST, BROKER, CONSUMER, QUEUE
from ..documents.workitem import is_waiting
from ..errors import CouchDBError
from ..leases.peers import Peers
from ..queues.fanout import Listener
from ..queues.routing import exchange_in, exchange_prefix
from ..queues.topology import Topology
from .candidates import QueueCandidates

__all__ = ['Notifier']

#: How often a busy consumer looks for broadcasts, bindings and other consumers, in seconds.
_LOOK = 0.25

#: How often it looks for changes of the queues it consumes: of their limits, in seconds.
_LOOK_QUEUES = 1.0

#: How long a consumer that was busy goes on looking before it listens, and how long one without credit for a queue listens on for
#: it, in seconds.
_LINGER = 1.0

#: The ids of everything that is no WorkItem start with this.


class Notifier:
    """What is new in one database, for the I/O thread of one connection. `listener` and `members` are kept up to date."""

    def __init__(self, client: Client, topology: Topology, listener: Listener, name: str) -> None:
        self.listener, self.peers = listener, Peers()
        self._client, self._name = client, name
        self._topology, self._routes, self._limits = topology, topology.routes, topology.limits
        self._feed: ContinuousFeed | None = None
        self._inbox: deque[tuple[list[Row], Any] | CouchDBError] = deque()
        self._known: dict[str, str] = {}
        self._covered: set[str] = set()  # exchanges whose bindings are in `_known`
        self._eager: dict[str, float] = {}  # by queue, when something could last be claimed for it
        self._since: Any = None  # where the feed listens from; None: it does not listen
        self._watched: frozenset[str] = frozenset()
        self._mark: Any = None  # a point before the queues were last read
        self._looked = self._looked_at_queues = self._busy = float('-inf')

    def start(self, on_news: Callable[[], None]) -> None:
        """Start the feed's thread; `on_news()` is called in it when `take` has something."""

        def heard(item: tuple[list[Row], Any] | CouchDBError) -> None:
            self._inbox.append(item)
            on_news()

        self._feed = ContinuousFeed(self._client, lambda rows, seq: heard((rows, seq)), heard, f'{self._name}-feed')

    def close(self) -> None:
        """End the feed's thread."""
        self._routes.follow(0.0)
        if self._feed is not None:
            self._feed.close()

    def lost(self) -> None:
        """Begin anew: the server was away, or the database is another."""
        self._routes.follow(0.0)
        self._stop()
        self._known.clear()
        self._covered.clear()
        self._inbox.clear()
        self._mark = None
        self._looked = self._looked_at_queues = float('-inf')

    def due_at(self) -> float | None:
        """Return the monotonic time to look again; None while the feed listens."""
        return self._looked + _LOOK if self._since is None else None

    def take(
        self, candidates: Mapping[str, QueueCandidates], eager: set[str]
    ) -> tuple[list[Document], list[tuple[str, Document]]]:
        """Return the items that may be claimed and the broadcasts, as `(queue, message)`, that are new.

        `eager` names the queues for which something could be claimed now. *Raises* what broke the feed.
        """
        docs = self._hear(candidates)
        now = time.monotonic()
        if any(candidates[queue].is_stale for queue in eager):
            self._stop()
            self._busy = now
            if self._mark is None or any(candidates[queue].outdated for queue in eager):
                # Whatever was read before this point has to be read again before the feed may go on from here.
                self._mark = self._client.sequence()
                for queue_candidates in candidates.values():
                    queue_candidates.mark_stale()
        elif now - self._busy >= _LINGER or not any(
            queue_candidates.is_stale for queue_candidates in candidates.values()
        ):
            docs += self._listen(candidates, eager)
        if self._since is None and now - self._looked >= _LOOK:
            docs += self._look(candidates)
        items = [doc for doc in docs if doc.get('type') == 'WorkItem' and is_waiting(doc)]
        # The filter admits also a list with the name of a queue in it.
        return [
            doc for doc in items if isinstance(doc.get('queue'), str) and doc['queue'] in candidates
        ], self.listener.take(docs)

    def _hear(self, candidates: Mapping[str, QueueCandidates]) -> list[Document]:
        """Take in what the feed told, and let it go on."""
        docs: list[Document] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, CouchDBError):
                raise item
            rows, last = item
            docs += [row['doc'] for row in rows if row.get('doc')]
            if self._since is None:
                continue  # told before the feed was stopped
            if len(rows) >= LIMIT:
                self._stop()
                for queue in self._watched:
                    if queue in candidates:
                        candidates[queue].mark_stale()
            else:
                self._watch(last, self._watched)
        for doc in docs:
            self._note(doc)
        return docs

    def _listen(self, candidates: Mapping[str, QueueCandidates], eager: set[str]) -> list[Document]:
        """Let the feed listen for all queues whose content is known."""
        now = time.monotonic()
        self._eager = {queue: now if queue in eager else self._eager.get(queue, now) for queue in candidates}
        for queue, queue_candidates in candidates.items():
            # What nobody can take here is not hoarded, and after a while not listened for. An eager queue would be read again in
            # this very turn, at a point that is not known here, and the feed could not go on from it.
            if (
                self._since is not None
                and queue not in eager
                and not queue_candidates.is_stale
                and (len(queue_candidates) > LIMIT or now - self._eager[queue] > _LINGER)
            ):
                queue_candidates.clear()
        wanted = frozenset(queue for queue, queue_candidates in candidates.items() if not queue_candidates.is_stale)
        if self._since is None:
            since = self._client.sequence() if self._mark is None else self._mark
            docs = self._look(candidates)
            self._watch(since, wanted)
            self._mark = None
            return docs
        if not wanted <= self._watched:
            if self._mark is not None:
                self._watch(self._mark, wanted)
            for queue in wanted - self._watched:
                candidates[
                    queue
                ].mark_stale()  # it was read while nobody listened for it: once more, after a known point
        elif wanted < self._watched:
            self._watch(self._since, wanted)
        self._mark = None
        return []

    def _watch(self, since: Any, queues: frozenset[str]) -> None:
        self._since, self._watched = since, queues
        self._routes.follow(math.inf)
        if self._feed is not None:
            self._feed.watch(since, _selector(queues))

    def _stop(self) -> None:
        if self._since is not None:
            # Whoever reads the queues from now on has read them after this point.
            self._mark = self._since if self._mark is None else self._mark
            self._since = None
            if self._feed is not None:
                self._feed.pause()

    def _look(self, candidates: Mapping[str, QueueCandidates]) -> list[Document]:
        """Read what changed among the documents that are no WorkItems; one request if nothing did, and one for bindings."""
        self._looked = time.monotonic()
        exchanges = sorted(self._routes.wanted | self.listener.exchanges)
        rows = self._client.id_range(BROADCAST, to=CONSUMER)
        if exchanges:
            rows += self._client.id_range(exchange_prefix(exchanges[0]), to=exchange_prefix(exchanges[-1]))
        revs = {row['id']: row['value']['rev'] for row in rows}
        docs = [
            doc
            for doc in self._client.fetch([name for name, rev in revs.items() if self._known.get(name) != rev])
            if doc
        ]
        for exchange in exchanges:
            if exchange not in self._covered:
                its = {doc['_id']: doc for doc in docs if doc['_id'].startswith(exchange_prefix(exchange))}
                self._routes.replace(its, self._looked, exchange_prefix(exchange))
                self._covered.add(exchange)
        docs += [{'_id': name, '_deleted': True} for name in self._known.keys() - revs.keys()]
        self._known = revs
        if self._looked - self._looked_at_queues >= _LOOK_QUEUES:
            self._looked_at_queues = self._looked
            names = [QUEUE + queue for queue in candidates]
            docs += [
                doc or {'_id': name, '_deleted': True}
                for name, doc in zip(names, self._client.find(names), strict=True)
            ]
        for doc in docs:
            self._note(doc)
        self._routes.follow(_LOOK * 4, exchanges)
        return docs

    def _note(self, doc: Document) -> None:
        if doc.get('_deleted'):
            self._topology.declarations.was_deleted(doc['_id'])
            exchange = exchange_in(doc['_id'])
            # It may have been declared anew meanwhile, and bound to.
            if exchange is not None and self.listener.listens_to(exchange) and not self._topology.has_fanout(exchange):
                self.listener.forget(exchange)
        if doc['_id'].startswith(BINDING):
            self._routes.update(doc)
        elif doc['_id'].startswith(CONSUMER):
            self.peers.seen(doc)
        elif doc['_id'].startswith(QUEUE):
            self._limits.seen({'name': doc['_id'].removeprefix(QUEUE), 'arguments': doc.get('arguments')})


def _selector(queues: frozenset[str]) -> Document:
    """Return the filter that the server applies: what can be claimed here, and what concerns all."""
    return {
        '$or': [
            {'type': 'WorkItem', 'claimed': None, 'queue': {'$in': sorted(queues)}, 'status': {'$exists': False}},
            {'type': {'$in': ['Binding', 'Exchange', 'Broadcast', 'Queue']}},
            {'type': 'Consumer', 'beats': 0},
            {'_deleted': True, '_id': {'$gt': BROKER, '$lt': 'broker;'}},
        ]
    }
