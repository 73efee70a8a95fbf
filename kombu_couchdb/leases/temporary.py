"""Queues that are deleted when nobody uses them: with their last consumer, or when their lifetime has passed.

A consumer uses the queues that its heartbeat names. A `basic_get` uses its queue, too: it writes the end of the queue's lifetime
anew. What is unused is deleted by the revision that was found to be so, and only then are its messages: whoever begins to use the
queue at that moment either makes that deletion fail, or declares the queue again.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from ..couchdb.client import Client
from ..couchdb.shapes import number
from ..documents.ids import CONSUMER, QUEUE
from ..errors import CouchDBError
from ..log import get_logger
from ..queues.store import Store
from ..queues.topology import Topology
from .peers import queues_of
from .watch import GRACE

__all__ = ['Gets', 'UnusedQueues']

logger = get_logger(__name__)

#: A get writes the end of its queue anew once in this part of the queue's lifetime.
_PART = 0.25

#: How long a queue that consumers use is kept beyond its lifetime, in seconds, lest it be written at each sweep.
_IN_USE = 600.0

#: How long gets do not look for a queue that nobody has declared, in seconds.
_UNKNOWN = 60.0


class Gets:
    """Prolongs the queues from which one connection gets messages."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._next: dict[
            tuple[str, float | None], float
        ] = {}  # by name and lifetime as declared here: a monotonic time

    def used(self, name: str) -> None:
        """Prolong a queue with a lifetime, from which a message is asked for.

        No request for a queue that was declared here without a lifetime, one for another without, and for one with a lifetime two
        in each quarter of it.
        """
        now, declared = time.monotonic(), self._topology.declarations.get(QUEUE + name)
        key = name, declared.get('lifetime') if declared else None
        if (declared and not key[1]) or now < self._next.get(key, float('-inf')):
            return
        try:
            for doc in self._topology.queues([name]):
                lifetime = float(doc['lifetime']) if number(doc.get('lifetime')) else 0.0
                self._next[key] = now + lifetime * _PART if lifetime else float('inf')
                if lifetime and not self._topology.prolong(doc, lifetime * (1 + _PART)):
                    del self._next[key]  # it was changed meanwhile: the next get looks again
                return
            self._next[key] = now + _UNKNOWN
        except CouchDBError as exc:
            logger.debug('queue %r is prolonged by a later get: %s', name, exc)


class UnusedQueues:
    """Removes the queues that nobody uses any more; for the sweep of one consumer."""

    def __init__(self, store: Store, topology: Topology) -> None:
        self._store, self._topology = store, topology
        #: Names of temporary queues that were left while others seemed to use them.
        self.left: set[str] = set()
        self._purging: set[str] = set()  # names of queues that are deleted, and whose messages are not yet

    def __bool__(self) -> bool:
        return bool(self.left or self._purging)

    def remove(self, overdue: Collection[str], now: float, until: float) -> int:
        """Remove of the queues `overdue` and `left` those that nobody uses, with what is in them.

        Return how many messages that were. From the monotonic time `until` on the rest is left to the next call.
        """
        left = set(self.left)
        docs = {doc['name']: doc for doc in self._topology.queues(sorted({*overdue, *left, *self._purging}))}
        self._purging -= docs.keys()  # declared again: what is in them is new
        # Read last: who subscribed a moment ago is among them.
        used = _in_use(self._store.client) if docs else set()
        self.left -= left - (used & docs.keys())
        unproven: set[str] = set()  # their messages are deleted when the next sweep does not find the queue
        for name, doc in docs.items():
            expired = number(doc.get('expires')) and doc['expires'] + GRACE < now
            if name in used:
                if expired:
                    self._topology.prolong(doc, (doc['lifetime'] if number(doc.get('lifetime')) else 0.0) + _IN_USE)
            elif (expired and name in overdue) or (name in left and doc.get('auto_delete')):
                proven = self._topology.delete_unused(doc)
                if proven is not None:
                    self._purging.add(name)
                    logger.info('queue %r, which nobody used any more, was removed', name)
                if proven is False:
                    unproven.add(name)
        return sum(self._purge(name, until) for name in sorted(self._purging - unproven))

    def _purge(self, name: str, until: float) -> int:
        purged = self._store.purge(name, until)
        if not self._store.exceeds(name, 0):
            self._purging.discard(name)
        return purged


def _in_use(client: Client) -> set[str]:
    """Return the queues that any consumer has subscribed to. One whose lease has ended counts until it is swept."""
    return {queue for row in client.id_range(CONSUMER, docs=True) for queue in queues_of(row['doc'])}
