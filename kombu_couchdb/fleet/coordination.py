"""The reader of coordination documents: those of other consumers, bindings, pauses, limits and deleted queues.

A consumer that follows the changes feed of the broker's database learns of changes from the feed. All other consumers
read the documents when a notice in the broadcasts database tells of a change, and at long intervals in any case.
Without a broadcasts database, they read them three times a second, and the broadcasts with them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Iterable

from ..couchdb.client import Client, Document
from ..documents.bindings import exchange_id, exchange_prefix
from ..documents.ids import BINDING, BROADCAST, CONSUMER, PAUSE, QUEUE
from ..queues.fanout import Listener
from ..queues.topology import Topology
from .attention import Peers

#: How often the documents are read while a consumer does not follow the broadcasts database, in seconds.
_ALONE_SECONDS = 0.3

#: How often they are read otherwise: the ids of other consumers, and everything. The least number of seconds, and, if
#: that is more, the seconds for each consumer of the database: all together read ten times a second, and once in two.
_PEERS_SECONDS, _ALL_SECONDS = (1.0, 0.1), (10.0, 2.0)

#: In a cluster, everything is read again after this time, in seconds: the node that was asked may have learned of the
#: notice before it learned of the change.
_CLUSTER_SECONDS = 2.0

#: Of how many consumers that are known the queues are read again each time: they change rarely.
_SAMPLE = 10


class Coordination:
    """The coordination documents as one connection knows them, for its I/O thread alone.

    It keeps `peers` up to date, and the table `declarations` of this process.
    """

    def __init__(self, client: Client, topology: Topology, listener: Listener) -> None:
        self.peers = Peers()
        self._client, self._topology, self._known, self._listener = client, topology, topology.known, listener
        #: The revisions of the broadcasts in the broker's database that were read, by id.
        self._broadcasts: dict[str, str] = {}
        self._read_at = self._read_all_at = -math.inf
        self._again_at = math.inf

    def forget(self) -> None:
        """Forget what was read: CouchDB did not respond, or the database may be a new one."""
        self._known.follow(0.0)
        self._broadcasts.clear()
        self._read_at = self._read_all_at = -math.inf

    def due_at(self, *, is_announced: bool, counts_peers: bool) -> float:
        """Return the monotonic time at which to read again.

        `is_announced` tells whether notices tell of changes, and `counts_peers` whether this consumer must know soon of
        others that come and go, because they share long queues.
        """
        if not is_announced:
            return self._read_at + _ALONE_SECONDS
        everything = min(self._again_at, self._read_all_at + self._pause(*_ALL_SECONDS))
        return min(everything, self._read_at + self._pause(*_PEERS_SECONDS)) if counts_peers else everything

    def read(self, queues: Iterable[str], *, is_announced: bool, everything: bool = False) -> list[Document]:
        """Read and note what has changed; return the new broadcasts in the broker's database.

        If changes are announced, this reads only the ids of other consumers, unless `everything` is true or due.
        """
        self._read_at = time.monotonic()
        again = self._read_at >= self._again_at
        self._again_at = self._read_at + _CLUSTER_SECONDS if everything and self._client.replicas > 1 else math.inf
        everything |= again or not is_announced or self._read_at >= self._read_all_at + self._pause(*_ALL_SECONDS)
        docs = self._read_all(queues, is_announced) if everything else []
        ids = [row['id'] for row in self._client.id_range(CONSUMER)]
        # Listeners learn from the feed that the queues of a consumer have changed.
        self.know(ids, again=random.sample(ids, min(_SAMPLE, len(ids))) if everything else ())
        return docs

    def know(self, living: Collection[str], again: Iterable[str] = ()) -> None:
        """Forget all consumers but those with the ids `living`; read and note those of them that are unknown or new.

        The ids `again` are read also if they are known.
        """
        self.peers.keep(living)
        for doc in self._client.fetch(sorted({*self.peers.to_read(living), *again})):
            if doc:
                self.peers.seen(doc)

    def _read_all(self, queues: Iterable[str], is_announced: bool) -> list[Document]:
        self._read_all_at = self._read_at
        exchanges = sorted(self._known.wanted | self._listener.exchanges)
        rows = self._client.id_range(BROADCAST, to=PAUSE)
        if exchanges:
            rows += self._client.id_range(exchange_prefix(exchanges[0]), to=exchange_prefix(exchanges[-1]))
        revs = {row['id']: row['value']['rev'] for row in rows}
        broadcasts = {doc_id: revs.pop(doc_id) for doc_id in list(revs) if doc_id.startswith(BROADCAST)}
        new = [doc_id for doc_id, rev in broadcasts.items() if self._broadcasts.get(doc_id) != rev]
        docs = [doc for doc in self._client.fetch(new + self._known.unknown(revs)) if doc]
        self._broadcasts = broadcasts
        declared = [doc for doc in docs if doc['_id'] not in broadcasts]
        self._known.replace((PAUSE, *map(exchange_prefix, exchanges)), declared, self._read_at, revs)
        names = [QUEUE + queue for queue in queues]
        for name, doc in zip(names, self._client.find(names), strict=True):
            self._known.update(doc or {'_id': name, '_deleted': True})
        self._forget_deleted_exchanges()
        self._known.follow(math.inf if is_announced else _ALONE_SECONDS * 4, exchanges)
        return [doc for doc in docs if doc['_id'] in broadcasts]

    def note(self, doc: Document) -> None:
        """Take in a document that was written or deleted."""
        if doc['_id'].startswith(CONSUMER):
            self.peers.seen(doc)
        elif doc['_id'].startswith((BINDING, PAUSE, QUEUE)):
            self._known.update(doc)
            if doc.get('_deleted'):
                self._forget_deleted_exchanges()

    def _forget_deleted_exchanges(self) -> None:
        for exchange in self._listener.exchanges:
            # The exchange may have been declared and bound again meanwhile.
            if exchange_id(exchange) in self._known.deleted and not self._topology.has_fanout(exchange):
                self._listener.forget(exchange)

    def _pause(self, least: float, for_each: float) -> float:
        pace = self._client.pace
        return max(least, for_each * len(self.peers)) * (pace.polling_factor if pace else 1.0)
