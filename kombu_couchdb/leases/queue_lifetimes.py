"""Queues that are deleted when they are unused: with their last consumer, or when their lifetime has passed.

A consumer uses the queues that its heartbeat names. A `basic_get` uses its queue, too, and prolongs its lifetime. An
unused queue is deleted in the revision in which it was found unused, and its messages only after that. If a process
begins to use the queue at that moment, its write makes the deletion fail, or it declares the queue again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from math import inf

from ..couchdb.client import Client, Document
from ..couchdb.shapes import number
from ..documents.ids import CONSUMER
from ..errors import CouchDBError
from ..log import get_logger
from ..queues.store import Store
from ..queues.topology import Topology
from .lease_expiry import GRACE_SECONDS
from .peers import queues_of

logger = get_logger(__name__)

#: A get prolongs its queue at most once in this fraction of the queue's lifetime.
_PROLONG_FRACTION = 0.25

#: When a queue that has consumers expires, a sweep prolongs it by its lifetime and this many seconds, so that it rarely
#: writes the document.
_IN_USE_SECONDS = 600.0

#: Gets from a queue that is not declared look for its document at most once in this time.
_UNDECLARED_SECONDS = 60.0


class Lifetimes:
    """Prolongs the lifetimes of the queues from which one connection gets single messages."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        #: By name, and lifetime as declared by this connection: the monotonic time of the next request.
        self._next: dict[tuple[str, float | None], float] = {}

    def prolong(self, name: str) -> None:
        """Prolong the lifetime of a queue from which a message is requested, if it has one.

        This makes no request for a queue that this connection declared without a lifetime, one request for any other
        queue without a lifetime, one request per minute for a queue that is not stored, and two requests per quarter of
        its lifetime for a queue with one. An error is only logged; the next call tries again.
        """
        now, declared = time.monotonic(), self._topology.declared_queue(name)
        key = name, declared.get('lifetime') if declared else None
        if (declared and not key[1]) or now < self._next.get(key, float('-inf')):
            return
        try:
            for doc in self._topology.queues([name]):
                lifetime = _lifetime_of(doc)
                self._next[key] = now + lifetime * _PROLONG_FRACTION if lifetime else float('inf')
                if lifetime and not self._topology.prolong(doc, lifetime * (1 + _PROLONG_FRACTION)):
                    del self._next[key]  # another process changed the document: the next get reads it again
                return
            self._next[key] = now + _UNDECLARED_SECONDS
        except CouchDBError as exc:
            logger.debug('the lifetime of queue %r was not prolonged, the next get tries again: %s', name, exc)


class OverdueQueues:
    """Queues whose lifetime has passed by the server's time.

    Only a second look, `pause` seconds after the first, proves that: the clock may only have jumped.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._seen: dict[str, tuple[float, float]] = {}  # `expires`, and the monotonic time since which it was seen

    def proven(self, expires: Mapping[str, float], asked: float) -> list[str]:
        """Return the names of queues that have been overdue, with the same `expires`, for `pause` seconds.

        `expires` has the values of all queues that are overdue now, by name, read at the monotonic time `asked`.
        """
        before, self._seen = self._seen, {name: (end, asked) for name, end in expires.items()}
        self._seen.update({name: seen for name, seen in before.items() if seen[0] == expires.get(name)})
        return [name for name, (_, since) in self._seen.items() if asked - since >= self._pause]

    def next_in(self) -> float:
        """Return the seconds until the next queue is proven to be overdue; infinite if there is none."""
        now = time.monotonic()
        return min(
            (seconds for _, since in self._seen.values() if (seconds := since + self._pause - now) > 0), default=inf
        )


class UnusedQueues:
    """Deletes unused queues, for the sweep of one consumer."""

    def __init__(self, store: Store, topology: Topology) -> None:
        self._store, self._topology = store, topology
        #: Names of temporary queues to be checked: a consumer cancelled its subscription while others were left, or the
        #: lease of a consumer expired.
        self.abandoned: set[str] = set()
        self._purging: set[str] = set()  # names of deleted queues whose messages are not all deleted yet

    def __bool__(self) -> bool:
        return bool(self.abandoned or self._purging)

    def delete(self, overdue: Collection[str], now: float, until: float) -> int:
        """Delete those of the queues `overdue` and `abandoned` that are unused, with their messages.

        `now` is the server's time. Return the number of deleted messages. At the monotonic time `until` it stops; the
        next call goes on.
        """
        abandoned = set(self.abandoned)
        docs = {doc['name']: doc for doc in self._topology.queues(sorted({*overdue, *abandoned, *self._purging}))}
        self._purging -= docs.keys()  # declared again: its messages are new
        # Read the heartbeats last: they name the queues of a consumer that subscribed a moment ago.
        used = _in_use(self._store.client) if docs else set()
        self.abandoned -= abandoned - (used & docs.keys())
        # Queues whose deletion was unproven: the next sweep deletes their messages if it does not find the queue again.
        unproven: set[str] = set()
        for name, doc in docs.items():
            expired = number(doc.get('expires')) and doc['expires'] + GRACE_SECONDS < now
            if name in used:
                if expired:
                    self._topology.prolong(doc, _lifetime_of(doc) + _IN_USE_SECONDS)
            elif name in self._topology.paused:
                continue  # an operator wants to keep its messages; it expires after it is resumed
            elif (expired and name in overdue) or (name in abandoned and doc.get('auto_delete')):
                proven = self._topology.delete_unused(doc)
                if proven is not None:
                    self._purging.add(name)
                    logger.info('unused queue %r was deleted', name)
                if proven is False:
                    unproven.add(name)
        return sum(self._purge(name, until) for name in sorted(self._purging - unproven))

    def _purge(self, name: str, until: float) -> int:
        purged = self._store.purge(name, until)
        if not self._store.exceeds(name, 0):
            self._purging.discard(name)
        return purged


def _lifetime_of(doc: Document) -> float:
    """Return the lifetime of a queue in seconds; 0 if it has none or a malformed one."""
    return float(doc['lifetime']) if number(doc.get('lifetime')) else 0.0


def _in_use(client: Client) -> set[str]:
    """Return the queues that consumers have subscribed to. An expired consumer counts until it is swept."""
    return {queue for row in client.id_range(CONSUMER, docs=True) for queue in queues_of(row['doc'])}
