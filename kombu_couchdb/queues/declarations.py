"""Declarations: what this process knows of the bindings, exchanges, pauses and limits of one database.

The connections of a process share the table. A consuming connection keeps it up to date (see `fleet.coordination`), and
a look-up makes no request then. Otherwise a publisher reads the bindings of an exchange, unless they were read less
than 50 ms ago.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from ..couchdb.client import Document, Row
from ..couchdb.fork_safety import Shared, reset_in_child
from ..documents import bindings
from ..documents.ids import BINDING, PAUSE, QUEUE
from ..documents.queue import NO_LIMIT, Limit, limit_of
from ..values import revision_parts

#: For how many seconds the bindings of an exchange are trusted after they were read, if no consumer keeps them up to
#: date.
_MAX_AGE_SECONDS = 0.05

#: For how many seconds it is trusted which documents exist, and which queues are paused.
_FRESH_SECONDS = 1.0

#: The most bindings of queues for replies that are remembered.
_MAX_REPLIES = 100

#: For how many seconds the time of an update is remembered: longer than any read of the bindings takes.
_MEMORY_SECONDS = 60.0

#: The queues of a message, by name, each with its binding; {}: the message names the queue itself.
Destinations: TypeAlias = dict[str, Mapping[str, Any]]


class Declarations:
    """What one process knows of the declarations of one database. Thread-safe."""

    def __init__(self) -> None:
        #: The limits of queues that have any, by id.
        self.limits: dict[str, Limit] = {}
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Forget all but the limits: in a forked child no consumer keeps the table of its parent up to date."""
        self._lock = threading.Lock()
        #: Bindings, exchanges and pauses, by id.
        self._docs: dict[str, Mapping[str, Any]] = {}
        #: By id: the monotonic time of the last `update`, and the generation of the last deleted revision, or 0.
        self._updated: dict[str, tuple[float, int]] = {}
        #: The ids of documents that were deleted within the last minute, of queues too.
        self.deleted: set[str] = set()
        #: The paused queues, while a connection of this process consumes.
        self.paused: frozenset[str] = frozenset()
        self._replies: dict[tuple[str, str], Mapping[str, Any]] = {}
        #: The exchanges that were looked up.
        self.wanted: set[str] = set()
        #: By exchange, and by queue: the monotonic time when its bindings, or its pause, were read.
        self._read, self._pause_read = dict[str, float](), dict[str, float]()
        self._followed, self._followed_until = set[str](), 0.0  # the exchanges that a consumer keeps up to date
        #: The ids of stored documents, each with the answer of `exists`; whether they are all; until when they count.
        self._ids, self._has_all_ids, self._ids_until = dict[str, bool | None](), False, -math.inf

    # -- what is stored

    def update(self, doc: Mapping[str, Any]) -> None:
        """Take in a document that was written or deleted; ignore a state older than a known deletion."""
        doc_id, (generation, _) = doc['_id'], revision_parts(doc.get('_rev'))
        with self._lock:
            now, (_, gone) = time.monotonic(), self._updated.pop(doc_id, (0.0, 0))
            if doc.get('_deleted'):
                gone = max(generation, gone)
                self._drop(doc_id)
            elif not 0 < generation <= gone:
                self._keep(doc)
            self._updated[doc_id] = now, gone  # the newest is last
            while self._updated[oldest := next(iter(self._updated))][0] < now - _MEMORY_SECONDS:
                del self._updated[oldest]
                self.deleted.discard(oldest)

    def replace(
        self, prefixes: tuple[str, ...], docs: Iterable[Mapping[str, Any]], at: float, unchanged: Collection[str] = ()
    ) -> None:
        """Replace the documents whose ids begin with one of `prefixes` by `docs`; those with ids in `unchanged` stay.

        `at` is the monotonic time when their read began. Documents that `update` has reported since stay as they are.
        """
        with self._lock:
            newer = {doc_id for doc_id, (when, _) in self._updated.items() if when >= at}
            there: dict[str, Mapping[str, Any]] = {doc['_id']: doc for doc in docs}
            for doc_id in [name for name in self._docs if name.startswith(prefixes)]:
                if doc_id not in newer and doc_id not in there and doc_id not in unchanged:
                    self._drop(doc_id)
                    self._updated[doc_id] = at, self._updated.pop(doc_id, (0.0, 0))[1]
            for doc_id in there.keys() - newer:
                self._keep(there[doc_id])

    def unknown(self, revs: Mapping[str, str]) -> list[str]:
        """Return those of these ids whose documents have another revision than in the table, or are not in it."""
        return [doc_id for doc_id, rev in revs.items() if self._docs.get(doc_id, {}).get('_rev') != rev]

    def _keep(self, doc: Mapping[str, Any]) -> None:
        doc_id = doc['_id']
        self.deleted.discard(doc_id)
        if time.monotonic() < self._ids_until:
            self._ids[doc_id] = _needs_no_read(doc_id, doc.get('_rev', ''))
        if doc_id.startswith(QUEUE):
            self.limits.pop(doc_id, None)
            if (limit := limit_of(doc)) != NO_LIMIT:
                self.limits[doc_id] = limit
            return
        self._docs[doc_id] = doc
        if doc_id.startswith(PAUSE):
            self.paused |= {doc_id.removeprefix(PAUSE)}

    def _drop(self, doc_id: str) -> None:
        self._docs.pop(doc_id, None)
        self.limits.pop(doc_id, None)
        self._ids.pop(doc_id, None)
        self.deleted.add(doc_id)
        if doc_id.startswith(PAUSE):
            self.paused -= {doc_id.removeprefix(PAUSE)}

    # -- which documents exist

    def saw(self, rows: Collection[Row], at: float, limit: int) -> None:
        """Take in up to `limit` rows of `_all_docs`, without documents, that were read from the monotonic time `at` on.

        They are the first ones from the bindings to the queues.
        """
        ids = {row['id']: _needs_no_read(row['id'], row['value']['rev']) for row in rows}
        self._ids, self._has_all_ids, self._ids_until = ids, len(rows) < limit, at + _FRESH_SECONDS
        for exchange in filter(None, map(bindings.exchange_in, ids)):
            self.update(bindings.fanout(exchange))

    def exists(self, doc_id: str) -> bool | None:
        """Tell whether a document was stored a moment ago; None if it must be read."""
        if time.monotonic() >= self._ids_until:
            return None
        return self._ids.get(doc_id, False if self._has_all_ids else None)

    # -- routes

    def follow(self, seconds: float, exchanges: Iterable[str] = ()) -> None:
        """Trust the table for these exchanges and those of earlier calls for `seconds`: the caller reports all updates.

        With 0 seconds, trust it for no exchange any more.
        """
        self._followed = {*self._followed, *exchanges} if seconds else set()
        self._followed_until = time.monotonic() + seconds

    def knows(self, exchange: str) -> bool:
        """Tell whether the table is up to date for this exchange."""
        now = time.monotonic()
        followed = now < self._followed_until and exchange in self._followed
        return followed or now - self._read.get(exchange, -math.inf) < _MAX_AGE_SECONDS

    def read(self, exchange: str, docs: Iterable[Document], at: float) -> None:
        """Take in all documents about an exchange, which were read from the monotonic time `at` on."""
        self.replace((bindings.exchange_prefix(exchange),), docs, at)
        self._read[exchange] = at
        self.wanted.add(exchange)
        if self._followed_until == math.inf:
            self._followed.add(exchange)  # the feed reports all changes from now on

    def is_fanout(self, exchange: str) -> bool:
        """Tell whether the exchange is a fanout exchange, as far as this process knows."""
        return bindings.is_fanout(self._docs.get(bindings.exchange_id(exchange), {}))

    def match(self, exchange: str, routing_key: str, headers: Mapping[str, Any]) -> Destinations | None:
        """Return the queues whose bindings match a message, or None for a fanout exchange."""
        if self.is_fanout(exchange):
            return None
        with self._lock:
            table = [doc for doc in self._docs.values() if doc.get('exchange') == exchange]
        return bindings.destinations(table, routing_key, headers)

    def note_reply(self, binding: Any) -> None:
        """Take in the binding of a temporary queue that a broadcast names for the replies to it."""
        if bindings.is_binding(binding) and 'temporary' in binding:
            with self._lock:
                self._replies[binding['exchange'], binding['routing_key']] = binding
                if len(self._replies) > _MAX_REPLIES:
                    del self._replies[next(iter(self._replies))]

    def reply_queue(self, exchange: str, routing_key: str) -> Destinations | None:
        """Return the queue that `note_reply` has named for an exchange and a routing key, or None."""
        binding = self._replies.get((exchange, routing_key))
        return None if binding is None else {binding['queue']: binding}

    # -- pauses and limits

    def pause(self, queue: str) -> Mapping[str, Any] | None:
        """Return the Pause of a queue, {} if the queue is not paused, or None if that must be read.

        A consumer keeps the table up to date. Without one, what `note_pause` got is trusted for a second.
        """
        doc_id, now = PAUSE + queue, time.monotonic()
        if now < self._followed_until or now - self._pause_read.get(queue, -math.inf) < _FRESH_SECONDS:
            return self._docs.get(doc_id, {})
        return {} if self.exists(doc_id) is False else None

    def note_pause(self, queue: str, doc: Document | None, at: float) -> None:
        """Take in the Pause of a queue, or None, as it was read from the monotonic time `at` on."""
        self.update(doc or {'_id': PAUSE + queue, '_deleted': True})
        self._pause_read[queue] = at

    def limit(self, queue: str) -> Limit:
        """Return the limits of a queue, as far as this process knows them."""
        return self.limits.get(QUEUE + queue, NO_LIMIT)


def _needs_no_read(doc_id: str, rev: str) -> bool | None:
    # A binding is stored once: a later revision replaces one that was deleted or malformed, and is read again.
    return True if rev[:2] in ('', '1-') or not doc_id.startswith(BINDING) else None


_tables: Shared[tuple[int, str], Declarations] = Shared({})


def declarations_of(url: str) -> Declarations:
    """Return the table of this process for the database at `url`."""
    return _tables.of((os.getpid(), url), Declarations)
