"""Housekeeping: the deletion of unused queues, and of what killed processes left behind.

A queue is deleted when it is unused: with its last consumer, or when its lifetime has passed. A consumer uses the
queues that its heartbeat names. A `basic_get` uses its queue, too, and prolongs its lifetime. An unused queue is
deleted in the revision in which it was found unused, and its messages only after that. If a process begins to use the
queue at that moment, its write makes the deletion fail, or it declares the queue again.

Killed processes leave bindings of queues that do not exist any more, and broadcasts that no publisher overwrites. Rate
keys that are not used any more leave a document, too: if its next start is in the past, it says no more than a missing
one. The janitor deletes a limited number of each kind at a time. It needs only the rights of a member of the database.
Its deletions leave tombstones, as those of messages do; see `admin.vacuum`. The sweep deletes heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import islice

from ..couchdb.bulk import BATCH_DOCS
from ..couchdb.client import Client, Document, chunks
from ..couchdb.conflicts import delete_docs
from ..couchdb.shapes import number
from ..documents import rates
from ..documents.ids import BINDING, BROADCAST, CONSUMER, QUEUE, RATE
from ..documents.queue import lifetime_of
from ..errors import CouchDBError
from ..log import get_logger
from ..queues.databases import BroadcastsDatabase
from ..queues.store import Store
from ..queues.topology import Topology
from .lease import GRACE_SECONDS, Unchanged, queues_of

logger = get_logger(__name__)

#: A get prolongs its queue at most once in this fraction of the queue's lifetime.
_PROLONG_FRACTION = 0.25

#: When a queue that has consumers expires, a sweep prolongs it by its lifetime and this many seconds, so that it rarely
#: writes the document.
_IN_USE_SECONDS = 600.0

#: Gets from a queue that is not declared look for its document at most once in this time.
_UNDECLARED_SECONDS = 60.0

#: The janitor deletes a broadcast so many seconds after it expired, and a rate so many seconds after its next start:
#: listeners may be behind, and clocks differ.
_KEPT_SECONDS = 3600.0

#: The janitor deletes a binding that had no queue for so many seconds: a process that declares a queue may have stored
#: only its binding yet.
_PROVEN_SECONDS = 60.0


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
                lifetime = lifetime_of(doc)
                self._next[key] = now + lifetime * _PROLONG_FRACTION if lifetime else float('inf')
                if lifetime and not self._topology.prolong(doc, lifetime * (1 + _PROLONG_FRACTION)):
                    del self._next[key]  # another process changed the document: the next get reads it again
                return
            self._next[key] = now + _UNDECLARED_SECONDS
        except CouchDBError as exc:
            logger.debug('the lifetime of queue %r was not prolonged, the next get tries again: %s', name, exc)


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
                    self._topology.prolong(doc, lifetime_of(doc) + _IN_USE_SECONDS)
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


class Janitor:
    """Cleans up one database.

    It remembers bindings without a queue from call to call, and deletes one only if a second look, some time later,
    finds it unchanged. It also deletes old broadcasts in the database `broadcasts`.
    """

    def __init__(self, client: Client, broadcasts: BroadcastsDatabase | None = None) -> None:
        self._client, self._broadcasts = client, broadcasts
        self._orphans = Unchanged(_PROVEN_SECONDS)

    def clean_up(self, limit: int) -> dict[str, int]:
        """Delete up to `limit` documents of each kind; return how many, with the names of the kinds.

        These are `bindings`, `broadcasts` and `rates`. *Raises* the errors of `Client`; the next call goes
        on.
        """
        return {
            'bindings': self._delete_bindings(limit),
            'broadcasts': self._delete_broadcasts(limit),
            'rates': self._delete_rates(limit),
        }

    def _delete_bindings(self, limit: int) -> int:
        asked = time.monotonic()
        found = {doc['_id']: doc for doc in self._without_queue(list(_documents(self._client, BINDING)))}
        revs = {doc_id: doc['_rev'] for doc_id, doc in found.items()}
        proven = [found[doc_id] for doc_id in self._orphans.observe(revs, asked)][:limit]
        count = delete_docs(self._client, proven)
        # A process that declared the queue at this moment found its binding stored and did not store it: restore it.
        orphans = {doc['_id'] for doc in self._without_queue(proven)}
        restored = [
            {name: value for name, value in doc.items() if name != '_rev'}
            for doc in proven
            if doc['_id'] not in orphans
        ]
        if restored:
            self._client.bulk(restored)
        return count - len(restored)

    def _without_queue(self, bindings: list[Document]) -> list[Document]:
        bindings = [doc for doc in bindings if doc.get('type') != 'Exchange']
        names = sorted({QUEUE + str(doc.get('queue')) for doc in bindings})
        declared = {doc['_id'] for part in chunks(names, BATCH_DOCS) for doc in self._client.find(part) if doc}
        return [doc for doc in bindings if QUEUE + str(doc.get('queue')) not in declared]

    def _delete_broadcasts(self, limit: int) -> int:
        now = self._client.clock.now()

        def delete(client: Client) -> int:
            expired = (doc for doc in _documents(client, BROADCAST) if _is_long_expired(doc, now))
            return delete_docs(client, list(islice(expired, limit)))

        elsewhere = self._broadcasts.ask(delete, create=False) if self._broadcasts else None
        return delete(self._client) + (elsewhere or 0)

    def _delete_rates(self, limit: int) -> int:
        now = self._client.clock.now()
        unused = (
            doc
            for doc in _documents(self._client, RATE)
            if doc.get('type') == 'Rate' and rates.next_of(doc, now) + _KEPT_SECONDS < now
        )
        # A consumer that takes a start at this moment has written a later revision, which is not deleted.
        return delete_docs(self._client, list(islice(unused, limit)))


def _in_use(client: Client) -> set[str]:
    """Return the queues that consumers have subscribed to. An expired consumer counts until it is swept."""
    return {queue for row in client.id_range(CONSUMER, docs=True) for queue in queues_of(row['doc'])}


def _is_long_expired(doc: Document, now: float) -> bool:
    expires = doc.get('expires')
    return isinstance(expires, (int, float)) and expires + _KEPT_SECONDS < now


def _documents(client: Client, prefix: str) -> Iterator[Document]:
    """Yield the documents whose ids start with `prefix`, a page at a time."""
    last = None
    while rows := client.id_range(prefix, docs=True, limit=BATCH_DOCS, after=last):
        yield from (row['doc'] for row in rows)
        last = rows[-1]['id']
