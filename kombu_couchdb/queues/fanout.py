"""Broadcasts: one document, however many listen.

A publisher numbers its broadcasts and keeps each for `fanout_retention` seconds; then it writes the next one over it, and so
broadcasts leave no tombstones behind. A listener remembers the last number of each publisher: it takes every later one,
in order, and where a number stays missing it knows that it fell behind. The nodes of a cluster may tell of two broadcasts
in another order than they were sent in: then the earlier one is taken when it comes. Nothing is acknowledged.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ..couchdb.client import Client, Document
from ..documents import workitem
from ..documents.ids import BROADCAST
from ..log import get_logger

__all__ = ['Broadcaster', 'Listener']

logger = get_logger(__name__)

#: How many old documents of publishers that are gone a new publisher looks at, to write over them.
_ADOPT = 50


#: Publishers whose last number a listener remembers; one that long silent counts as new.
_REMEMBERED = 10_000

#: Broadcasts that a listener remembers, lest it take one for new that was sent again since its first answer was lost.
_TAGS = 1000

#: How long a number that was passed over may still come, in seconds: as long as nodes take to tell each other (see
#: `couchdb.conflicts`), and more. So many of them are waited for.
_LATE, _PASSED = 15.0, 1000


class Broadcaster:
    """The sending side; one for each connection that publishes."""

    def __init__(self, client: Client, retention: float) -> None:
        self._client, self._retention = client, retention
        self._publisher, self._number, self._sent = '', 0, float('-inf')
        self._own: list[tuple[float, str, str]] | None = None  # (free from, id, revision), oldest first

    def send(self, exchange: str, routing_key: str, message: Mapping[str, Any]) -> None:
        """Store one broadcast for all who listen to `exchange`; *raises* `ServerUnavailable`, `DocumentTooLarge`."""
        now = self._client.clock.now()
        if self._own is None:
            self._own = self._adoptable(now)
        if self._sent + self._retention < now:
            # What was sent before is gone, and a listener that came later never saw a number of it: count anew.
            self._publisher, self._number = uuid.uuid4().hex, 0
        # Whatever becomes of it: one that gets no answer may have been stored, and its number is no other's any more.
        self._number, self._sent = self._number + 1, now
        self._store(
            {
                'type': 'Broadcast',
                'exchange': exchange,
                'routing_key': routing_key,
                'publisher': self._publisher,
                'number': self._number,
                'date': now,
                'expires': now + self._retention,
                'message': message,
            },
            now,
        )

    def _store(self, doc: Document, now: float) -> None:
        assert self._own is not None
        while self._own and self._own[0][0] <= now:
            _, doc_id, rev = self._own.pop(0)
            new = self._client.try_put({**doc, '_id': doc_id, '_rev': rev})
            if new is not None:
                self._own.append((now + self._retention, doc_id, new))
                return  # otherwise another publisher has overwritten this document: try the next one
        doc_id = BROADCAST + workitem.new_id(now)
        self._own.append((now + self._retention, doc_id, self._client.put({**doc, '_id': doc_id})))

    def _adoptable(self, now: float) -> list[tuple[float, str, str]]:
        rows = self._client.id_range(BROADCAST, docs=True, limit=_ADOPT)
        old = [row['doc'] for row in rows if isinstance(row['doc'].get('expires'), (int, float))]
        return [(0.0, doc['_id'], doc['_rev']) for doc in old if doc['expires'] + self._retention < now]


class Listener:
    """The receiving side: which queue of this connection listens to which exchange, and what each has had."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: defaultdict[str, set[str]] = defaultdict(set)
        self._last: dict[str, int] = {}
        #: Publisher and number of what was passed over, with the monotonic time of that.
        self._passed: dict[tuple[str, int], float] = {}
        self._tags: dict[str, None] = {}
        self._primed = False

    @property
    def primed(self) -> bool:
        """Whether `prime` was called: before that nothing can be told old from new."""
        return self._primed

    def bind(self, exchange: str, queue: str) -> None:
        """Let `queue` have what is sent to `exchange` from now on."""
        with self._lock:
            self._queues[exchange].add(queue)

    def unbind(self, queue: str, exchange: str | None = None) -> None:
        """Let `queue` have nothing more of `exchange`; without one, nothing of any."""
        with self._lock:
            for name, queues in self._queues.items():
                if exchange in (None, name):
                    queues.discard(queue)

    def forget(self, exchange: str) -> None:
        """Let no queue have anything more of `exchange`: it was deleted."""
        with self._lock:
            self._queues.pop(exchange, None)

    @property
    def exchanges(self) -> set[str]:
        """The exchanges to which queues are bound."""
        with self._lock:
            return {name for name, queues in self._queues.items() if queues}

    def listens_to(self, exchange: str) -> bool:
        """Tell whether any queue is bound to this exchange."""
        with self._lock:
            return bool(self._queues.get(exchange))

    @property
    def binds(self) -> bool:
        """Whether any queue is bound to a fanout exchange."""
        with self._lock:
            return any(self._queues.values())

    def prime(self, docs: Iterable[Document]) -> None:
        """Take the broadcasts that exist as had already."""
        with self._lock:
            for doc in docs:
                publisher, number = _source(doc)
                self._last[publisher] = max(number, self._last.get(publisher, 0))
            self._primed = True

    def take(self, docs: Iterable[Document]) -> list[tuple[str, dict[str, Any]]]:
        """Return `(queue, message)` for each broadcast in `docs` that is new, in the order of sending."""
        new = [doc for doc in docs if doc.get('type') == 'Broadcast']
        numbered: defaultdict[str, list[Document]] = defaultdict(list)
        for doc in sorted(new, key=lambda doc: _source(doc)[1]):
            numbered[_source(doc)[0]].append(doc)
        # By time among publishers, by number for each: a publisher's clock may step back.
        ordered = [numbered[_source(doc)[0]].pop(0) for doc in sorted(new, key=_date)]
        with self._lock:
            pairs = [pair for doc in ordered for pair in self._take(doc)]
            self._give_up()
        return pairs

    def _take(self, doc: Document) -> list[tuple[str, dict[str, Any]]]:
        publisher, number = _source(doc)
        last = self._last.get(publisher, 0)
        if not isinstance(doc.get('message'), dict) or (number <= last and (publisher, number) not in self._passed):
            return []
        queues = sorted(self._queues.get(str(doc.get('exchange')), ()))
        if self._passed.pop((publisher, number), None) is None:
            self._last.pop(publisher, None)
            self._last[publisher] = number  # the newest last
            if len(self._last) > _REMEMBERED:
                del self._last[next(iter(self._last))]
            if queues:
                now = time.monotonic()
                self._passed |= {(publisher, passed): now for passed in range(max(last + 1, number - _PASSED), number)}
        return [(queue, doc['message']) for queue in queues] if self._is_first(doc) else []

    def _is_first(self, doc: Document) -> bool:
        tag = workitem.tag(doc)
        if not isinstance(tag, str):
            return True
        known = tag in self._tags
        self._tags[tag] = None
        if len(self._tags) > _TAGS:
            del self._tags[next(iter(self._tags))]
        return not known

    def _give_up(self) -> None:
        """Wait no longer for what was passed over long ago, or too much of it."""
        before = time.monotonic() - _LATE
        lost = [
            key
            for place, (key, since) in enumerate(reversed(self._passed.items()))
            if since < before or place >= _PASSED
        ]
        for key in lost:
            del self._passed[key]
        if lost:
            logger.warning(
                'this listener fell behind: %d broadcasts were gone before it could read them '
                '(see the transport option fanout_retention)',
                len(lost),
            )


def _date(doc: Document) -> float:
    date = doc.get('date')
    return float(date) if isinstance(date, (int, float)) else 0.0


def _source(doc: Document) -> tuple[str, int]:
    number = doc.get('number')
    return str(doc.get('publisher')), number if isinstance(number, int) else 0
