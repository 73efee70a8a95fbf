"""Broadcasts: one document for any number of listeners.

A publisher numbers its broadcasts. It keeps each for `fanout_retention` seconds and then overwrites it with a new one,
so broadcasts leave no tombstones. A listener remembers the last number of each publisher and takes all later ones, in
order. If a number stays missing, the listener fell behind. The nodes of a cluster may report two broadcasts in the
wrong order: the listener takes the earlier one when it arrives. Broadcasts are not acknowledged.

A message that a process publishes after a broadcast names the broadcast (`AFTER`), as long as this is kept. A listener
that receives such a message without the broadcast reads the stored broadcasts first: so a task that is sent after it
was revoked does not run. Broadcasts and messages of different processes have no order.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from ..couchdb.client import Client, Document
from ..couchdb.fork_safety import Shared
from ..documents import workitem
from ..documents.ids import BROADCAST
from ..documents.shared_documents import Broadcast
from ..documents.types import Message
from ..log import get_logger
from ..schema import NUMBER, TEXT, WHOLE, Schema
from .databases import BroadcastsDatabase

logger = get_logger(__name__)

#: The property of a message with the last broadcast of its publisher: `publisher`, `number` and `expires` of it.
AFTER = 'after_broadcast'

#: The most documents that a new publisher reads to find broadcasts of ended publishers, which it overwrites.
_MAX_ADOPTED = 50

#: What a broadcast must be to be delivered, or to be overwritten; and the property `AFTER`.
_BROADCAST = Schema.of(Broadcast, 'type', 'exchange', 'publisher', 'number', 'date', 'expires', 'message')
_AFTER = Schema({'publisher': TEXT, 'number': WHOLE, 'expires': NUMBER}, ('publisher', 'number', 'expires'))

#: The most publishers whose last number a listener remembers. A publisher that was forgotten counts as new.
_MAX_PUBLISHERS = 10_000

#: The most delivery tags that a listener remembers, to ignore a broadcast that was sent again because its response was
#: lost.
_MAX_TAGS = 1000

#: For how many seconds a listener waits for a missing number, longer than nodes take to replicate to each other (see
#: `couchdb.conflicts`); and for how many missing numbers it waits at most.
_MISSING_SECONDS, _MAX_MISSING = 15.0, 1000


#: The last broadcast of a process (`sent`), as `AFTER` names it, for its connections: Celery publishes with several.
_last_of_process: Shared[tuple[int, str], SimpleNamespace] = Shared({})


class Broadcaster:
    """Sends broadcasts; one for each connection that publishes."""

    def __init__(self, database: BroadcastsDatabase, retention: float) -> None:
        self._database, self._retention = database, retention
        key = os.getpid(), database.broker.address.url
        self._last = _last_of_process.of(key, lambda: SimpleNamespace(sent=None))
        self._publisher, self._number, self._sent = '', 0, float('-inf')
        #: Broadcasts of this publisher, oldest first: (time from which one may be overwritten, id, revision). The
        #: client is that of the database in which they are.
        self._own: list[tuple[float, str, str]] = []
        self._own_in: Client | None = None

    def send(
        self, exchange: str, routing_key: str, message: Mapping[str, Any], reply: Mapping[str, Any] | None = None
    ) -> None:
        """Store one broadcast for all listeners of `exchange`; *raises* `ServerUnavailable`, `DocumentTooLarge`.

        `reply` is the binding of the queue for replies, if the listeners are to reply.
        """
        now = self._database.broker.clock.now()
        if self._sent + self._retention < now:
            # The earlier broadcasts may be overwritten. A listener that started after that has seen no number of this
            # publisher, and would count all earlier numbers as missing. So the publisher takes a new name and starts
            # with number 1.
            self._publisher, self._number = uuid.uuid4().hex, 0
        # Count even if the write fails: without a response it may have been stored, and no other broadcast may have its
        # number.
        self._number, self._sent = self._number + 1, now
        doc: Broadcast = {
            '_id': BROADCAST + workitem.new_id(now),  # unless it is written over an old one
            'type': 'Broadcast',
            'exchange': exchange,
            'routing_key': routing_key,
            'publisher': self._publisher,
            'number': self._number,
            'date': now,
            'expires': now + self._retention,
            'message': cast(Message, message),
        }
        if reply is not None:
            doc['reply'] = reply
        self._database.store(lambda client: self._store(client, doc, now))
        self._last.sent = {'publisher': doc['publisher'], 'number': doc['number'], 'expires': doc['expires']}
        if logger.isEnabledFor(logging.DEBUG):
            tag = workitem.tag({'message': message})
            logger.debug('published message %s to fanout exchange %s as broadcast %d', tag, exchange, self._number)

    def mark(self, properties: dict[str, Any], now: float) -> None:
        """Name in the properties of a new message the last broadcast of this process, if it has sent one recently."""
        if self._last.sent is not None and self._last.sent['expires'] > now:
            properties[AFTER] = self._last.sent

    def _store(self, client: Client, doc: Broadcast, now: float) -> bool:
        if self._own_in is not client:
            self._own, self._own_in = self._adoptable(client, now), client
        while self._own and self._own[0][0] <= now:
            _, doc_id, rev = self._own.pop(0)
            new = client.try_put({**doc, '_id': doc_id, '_rev': rev})
            if new is not None:
                self._own.append((now + self._retention, doc_id, new))
                return True  # otherwise another publisher has overwritten this document: try the next one
        [result] = client.create_once([doc])  # a copy that arrives late, when the listeners have forgotten the number
        if result.is_refused:
            raise result.exception(client.address.url)
        self._own.append((now + self._retention, doc['_id'], result.rev))
        return True

    def _adoptable(self, client: Client, now: float) -> list[tuple[float, str, str]]:
        rows = client.id_range(BROADCAST, docs=True, limit=_MAX_ADOPTED)
        old = [row['doc'] for row in rows if _BROADCAST.accepts(row['doc'])]
        return [(0.0, doc['_id'], doc['_rev']) for doc in old if doc['expires'] + self._retention < now]


class Listener:
    """Receives broadcasts: knows which queues of this connection listen to an exchange, and what they have received."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: defaultdict[str, set[str]] = defaultdict(set)
        self._last: dict[str, int] = {}
        #: Missing numbers, by publisher and number, with the monotonic time when they were found missing.
        self._missing: dict[tuple[str, int], float] = {}
        self._tags: dict[str, None] = {}
        #: Whether `prime` was called. Before, old broadcasts cannot be told from new ones.
        self.primed = False

    def bind(self, exchange: str, queue: str) -> None:
        """Let `queue` receive the broadcasts to `exchange` from now on."""
        with self._lock:
            self._queues[exchange].add(queue)

    def unbind(self, queue: str, exchange: str | None = None) -> None:
        """Let `queue` receive no more broadcasts to `exchange`, or to any exchange if it is None."""
        with self._lock:
            for name, queues in self._queues.items():
                if exchange in (None, name):
                    queues.discard(queue)

    def forget(self, exchange: str) -> None:
        """Let no queue receive broadcasts to `exchange`: it was deleted."""
        with self._lock:
            self._queues.pop(exchange, None)

    @property
    def exchanges(self) -> set[str]:
        """The exchanges to which queues are bound."""
        with self._lock:
            return {name for name, queues in self._queues.items() if queues}

    def receives(self, queue: str) -> bool:
        """Tell whether a queue is bound to a fanout exchange."""
        with self._lock:
            return any(queue in queues for queues in self._queues.values())

    def lacks(self, after: Any, now: float) -> bool:
        """Tell whether a broadcast is missing that a message names as `AFTER`, and may still be stored.

        Anybody can write `after`: the answer decides only whether the broadcasts are read once more.
        """
        if not self.exchanges or not _AFTER.accepts(after):
            return False
        publisher, number = _source(after)
        with self._lock:
            is_received = number <= self._last.get(publisher, 0) and (publisher, number) not in self._missing
        return not is_received and bool(after['expires'] > now)

    def prime(self, docs: Iterable[Document]) -> None:
        """Note the stored broadcasts as received."""
        with self._lock:
            for doc in filter(_BROADCAST.accepts, docs):
                publisher, number = _source(doc)
                self._last[publisher] = max(number, self._last.get(publisher, 0))
            self.primed = True

    def take(self, docs: Iterable[Document]) -> list[tuple[str, dict[str, Any]]]:
        """Return `(queue, message)` for each broadcast in `docs` that is new, in the order of sending."""
        new = list(filter(_BROADCAST.accepts, docs))
        numbered: defaultdict[str, list[Document]] = defaultdict(list)
        for doc in sorted(new, key=lambda doc: _source(doc)[1]):
            numbered[_source(doc)[0]].append(doc)
        # Sort the broadcasts of different publishers by time, but those of one publisher by number, because its clock
        # may step back.
        ordered = [numbered[_source(doc)[0]].pop(0) for doc in sorted(new, key=lambda doc: doc['date'])]
        with self._lock:
            pairs = [pair for doc in ordered for pair in self._take(doc)]
            if self._missing:
                self._drop_lost()
        return pairs

    def _take(self, doc: Document) -> list[tuple[str, dict[str, Any]]]:
        publisher, number = _source(doc)
        last = self._last.get(publisher, 0)
        if number <= last and (publisher, number) not in self._missing:
            return []
        queues = sorted(self._queues.get(doc['exchange'], ()))
        if self._missing.pop((publisher, number), None) is None:
            self._last.pop(publisher, None)
            self._last[publisher] = number  # the newest is last
            if len(self._last) > _MAX_PUBLISHERS:
                del self._last[next(iter(self._last))]
            if queues:
                now = time.monotonic()
                first = max(last + 1, number - _MAX_MISSING)
                self._missing |= {(publisher, missing): now for missing in range(first, number)}
        return [(queue, doc['message']) for queue in queues] if self._is_first(doc) else []

    def _is_first(self, doc: Document) -> bool:
        tag = workitem.tag(doc)
        if tag is None:
            return True
        known = tag in self._tags
        self._tags[tag] = None
        if len(self._tags) > _MAX_TAGS:
            del self._tags[next(iter(self._tags))]
        return not known

    def _drop_lost(self) -> None:
        """Stop waiting for numbers that have been missing for too long, or that are too many."""
        before = time.monotonic() - _MISSING_SECONDS
        lost = [
            key
            for position, (key, since) in enumerate(reversed(self._missing.items()))
            if since < before or position >= _MAX_MISSING
        ]
        for key in lost:
            del self._missing[key]
        if lost:
            logger.warning(
                'this listener fell behind: %d broadcasts were overwritten before it read them '
                '(see the transport option fanout_retention)',
                len(lost),
            )


def _source(doc: Document) -> tuple[str, int]:
    return doc['publisher'], doc['number']
