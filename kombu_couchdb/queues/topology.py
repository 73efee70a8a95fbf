"""Queues, exchanges and bindings that other processes need, as documents.

A Queue is `{type, name, arguments, auto_delete, expires, lifetime}`, a Binding `{type, exchange, routing_key, pattern,
queue}`, an Exchange `{type, name, kind}`; their ids are made of their names, so that declaring one twice, or from two machines,
is declaring it once. Only fanout exchanges are stored: a publisher that has not declared one must know that it is to broadcast.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document, Row
from ..documents.ids import BINDING, QUEUE
from ..errors import Conflict
from .limits import LIMITS, Limit, check_limits, limits_of
from .routing import binding_id, exchange_id, exchange_in, exchange_prefix, fanout, is_binding, routes_of

__all__ = ['BINDING', 'QUEUE', 'Topology']

#: How long a queue that goes with its last consumer is kept if that one could not remove it, in seconds.
_TEMPORARY = 3600.0

#: How long what was there when the connection was established need not be read before it is declared, in seconds.
_JUST_SEEN = 1.0


class Topology:
    """What is declared in one database."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.routes, self.limits = routes_of(client.address.url), limits_of(client.address.url)
        self._declared: dict[str, Document] = {}
        self._deleted: set[str] = set()  # ids of what was declared here and deleted by others
        self._seen: dict[str, str] = {}  # revisions of what was there a moment ago, by id
        self._seen_at, self._complete = float('-inf'), False

    def saw(self, rows: Collection[Row], at: float, limit: int) -> None:
        """Take in up to `limit` rows of `_all_docs` that were read from the monotonic time `at` on."""
        self._complete = len(rows) < limit
        self._seen = {row['id']: row['value']['rev'] for row in rows}
        self._seen_at = at
        for exchange in filter(None, map(exchange_in, self._seen)):
            self.routes.update(fanout(exchange))

    def redeclare(self) -> None:
        """Store again what was declared through this object: the database was deleted and made anew."""
        self._store_missing(list(self._declared.values()))  # kombu's thread may declare more meanwhile

    def declared_queue(self, name: str) -> Document | None:
        """Return a queue as it was declared through this object."""
        return self._declared.get(QUEUE + name)

    def was_deleted(self, doc_id: str) -> None:
        """Note that a document was deleted."""
        if _queue_of(self._declared.get(doc_id)) in self._temporary():
            self._deleted.add(doc_id)
        self._seen.pop(doc_id, None)

    def _temporary(self) -> set[str]:
        """Return the names of the queues that were declared here and have a lifetime."""
        return {doc['name'] for doc in list(self._declared.values()) if doc['type'] == 'Queue' and doc['lifetime']}

    def restore(self, queues: Collection[str], *, check: bool = False) -> None:
        """Store again what others deleted of the temporary queues among `queues` that were declared here, bindings included.

        With `check` the database is asked whether they did; without it that takes no request unless `was_deleted` was told.
        """
        if not (check or self._deleted):
            return
        temporary = self._temporary() & set(queues)
        docs = [doc for doc in list(self._declared.values()) if _queue_of(doc) in temporary]
        if check or any(doc['_id'] in self._deleted for doc in docs):
            self._store_missing(docs)

    def _store_missing(self, docs: list[Document]) -> None:
        found = self.client.find([doc['_id'] for doc in docs])
        now = self.client.clock.now()
        missing = [
            {**doc, 'expires': now + doc['lifetime']} if doc.get('lifetime') else doc
            for doc, there in zip(docs, found, strict=True)
            if there is None
        ]
        if missing:
            self.client.bulk(missing)
        for doc in missing:
            if doc['_id'].startswith(BINDING):
                self.routes.update(doc)
        self._deleted -= {doc['_id'] for doc in docs}

    # -- queues

    def declare_queue(self, name: str, arguments: Mapping[str, Any], auto_delete: bool) -> bool:
        """Store a queue, if it is not there. `x-expires` in `arguments` (milliseconds, as in AMQP) is its lifetime unused.

        Of one that is there the limits named in `arguments` are set, and all else is left: the last declaration counts. Return
        whether the queue is deleted with its last consumer, as it is stored. *Raises* `ConfigurationError` for a limit that is
        no number.
        """
        check_limits(name, arguments)
        doc = self._queue(name, dict(arguments), auto_delete)
        limited = bool(arguments.keys() & set(LIMITS))
        if limited or doc['lifetime'] or not self._just_seen(doc['_id']):
            doc = self._store_queue(doc, limited)
        self._declared[doc['_id']] = {key: value for key, value in doc.items() if key != '_rev'}
        if limited:
            self.limits.seen(doc)
        return bool(doc['auto_delete'])

    def _store_queue(self, wanted: Document, limited: bool) -> Document:
        """Store a Queue, or change the limits of the one that is there; return what is there then."""
        doc = wanted
        found = self._declared_before(doc['_id'], is_new=bool(doc['lifetime']))
        while not found or limited or wanted['lifetime']:
            if found:
                before = found['arguments'] if isinstance(found.get('arguments'), dict) else {}
                arguments = {**before, **wanted['arguments']}
                doc = {**self._queue(wanted['name'], arguments, bool(found.get('auto_delete'))), '_rev': found['_rev']}
                if not doc['lifetime'] and doc['arguments'] == before:
                    break  # so it is declared
            else:
                doc = wanted
            try:
                self.client.put(doc)
                break
            except Conflict:
                found = self.client.find([doc['_id']])[0]
        else:
            doc = {**wanted, 'auto_delete': bool(found.get('auto_delete')), 'lifetime': found.get('lifetime')}
        return doc

    def _queue(self, name: str, arguments: Document, auto_delete: bool) -> Document:
        lifetime = _seconds(arguments.get('x-expires')) or (_TEMPORARY if auto_delete else None)
        return {
            '_id': QUEUE + name,
            'type': 'Queue',
            'name': name,
            'arguments': arguments,
            'auto_delete': auto_delete,
            'lifetime': lifetime,
            'expires': self.client.clock.now() + lifetime if lifetime else None,
        }

    def limit(self, name: str) -> Limit:
        """Return the limits of a queue as they are declared now; one request."""
        for doc in self.queues([name]):
            self.limits.seen(doc)
        return self.limits.of(name)

    def prolong(self, doc: Document, seconds: float) -> bool:
        """Let a queue, as it was read, live so long from now on; tell whether it was stored: others may have changed it."""
        [result] = self.client.bulk([{**doc, 'expires': self.client.clock.now() + seconds}])
        return result.is_stored

    def has_queue(self, name: str) -> bool:
        """Tell whether a queue is declared."""
        return self.client.find([QUEUE + name])[0] is not None

    def queues(self, names: list[str]) -> list[Document]:
        """Return the Queue documents of those names that are declared; one that somebody spoilt beyond its name is none."""
        docs = self.client.find([QUEUE + name for name in names])
        return [doc for name, doc in zip(names, docs, strict=True) if doc and doc.get('name') == name]

    def delete_queue(self, name: str) -> None:
        """Delete a queue and its bindings; its messages are the Store's."""
        # The I/O thread does this, too, while kombu's declares.
        for doc in [doc for doc in list(self._declared.values()) if _queue_of(doc) == name]:
            self._declared.pop(doc['_id'], None)
            self._deleted.discard(doc['_id'])
        self._delete(self._bindings_of(name) + self.queues([name]))
        self.limits.seen({'name': name})

    def delete_unused(self, doc: Document) -> bool | None:
        """Delete a queue in the revision that was found unused, and its bindings; None if it was changed meanwhile.

        False if a cluster could not prove that it was not.

        What was declared through this object is not forgotten: somebody may subscribe to the queue at this very moment, and then
        `restore` stores it again.
        """
        [result] = self.client.bulk([deletion(doc)])
        if not result.is_stored:
            return None
        self.was_deleted(doc['_id'])
        self._delete(self._bindings_of(doc['name']))
        self.limits.seen({'name': doc['name']})
        return result.is_proven

    def _bindings_of(self, queue: str) -> list[Document]:
        return [row['doc'] for row in self.client.id_range(BINDING, docs=True) if row['doc'].get('queue') == queue]

    # -- exchanges and bindings

    def declare_fanout(self, exchange: str) -> None:
        """Store that an exchange is a fanout exchange, if that is not known."""
        doc = fanout(exchange)
        self._declared[doc['_id']] = doc
        if not self.routes.is_fanout(exchange):
            self._store_once(doc)

    def has_fanout(self, exchange: str) -> bool:
        """Tell whether a fanout exchange is declared now; one request."""
        return self.client.find([exchange_id(exchange)])[0] is not None

    def has_exchange(self, exchange: str) -> bool:
        """Tell whether a fanout exchange is declared, or a queue is bound to another one; one request."""
        return bool(self.bindings(exchange)) or self.routes.is_fanout(exchange)

    def delete_exchange(self, exchange: str) -> None:
        """Delete an exchange's declaration and bindings; its queues stay."""
        docs = [row['doc'] for row in self.client.id_range(exchange_prefix(exchange), docs=True)]
        for doc_id in [doc_id for doc_id in list(self._declared) if doc_id.startswith(exchange_prefix(exchange))]:
            self._declared.pop(doc_id, None)
        self._delete(docs)

    def bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        """Store a binding; with a `pattern` (see `topic_pattern`) the exchange is a topic exchange."""
        doc: Document = {
            '_id': binding_id(exchange, routing_key, queue),
            'type': 'Binding',
            'exchange': exchange,
            'routing_key': routing_key,
            'pattern': pattern,
            'queue': queue,
        }
        self._declared[doc['_id']] = doc
        self._store_once(doc, is_new=bool(self._declared.get(QUEUE + queue, {}).get('lifetime')))
        if exchange == queue == routing_key:  # see `is_broadcast`
            known = (self._complete and self._is_fresh) or self.routes.known(exchange)
            if not known and self.has_fanout(exchange):
                self.routes.update(fanout(exchange))

    def _store_once(self, doc: Document, *, is_new: bool = False) -> None:
        """Store a Binding or an Exchange, if it is not there; it never changes."""
        if not (self._just_seen(doc['_id']) and self._seen[doc['_id']].startswith('1-')):
            found = self._declared_before(doc['_id'], is_new=is_new)
            if not found:
                try:
                    self.client.put(doc)
                except Conflict:
                    found = self.client.find([doc['_id']])[0]
            if found and doc != {name: value for name, value in found.items() if name != '_rev'}:
                # Somebody spoilt it, and it leads elsewhere. In conflict, another one has mended it.
                self.client.bulk([{**doc, '_rev': found['_rev']}])
        self.routes.update(doc)

    def unbind(self, exchange: str, routing_key: str, queue: str) -> None:
        """Delete a binding."""
        self._declared.pop(binding_id(exchange, routing_key, queue), None)
        self._delete([doc for doc in self.client.find([binding_id(exchange, routing_key, queue)]) if doc])

    def is_broadcast(self, queue: str) -> bool:
        """Tell whether a message for a queue, by its name, is one for the fanout exchange of that name.

        So it is where the queue was bound here to an exchange of its own name, in the belief that this is a direct one: Celery
        does that for a queue that is named in `task_routes` only, and then leaves the exchange out.
        """
        return self.routes.is_fanout(queue) and binding_id(queue, queue, queue) in self._declared

    def lookup(self, exchange: str, routing_key: str, *, topic: bool) -> set[str] | None:
        """Return the queues that a message for an exchange goes to; None if it is to be broadcast."""
        if self.routes.known(exchange):
            if self.routes.is_fanout(exchange):
                return None
            queues = self.routes.match(exchange, routing_key)
            # A reply may overtake the news of its queue's binding: before a message goes nowhere, look again. Not for
            # topics: Celery sends events all the time, and usually nobody listens.
            if queues or topic:
                return queues
        self.bindings(exchange)
        return None if self.routes.is_fanout(exchange) else self.routes.match(exchange, routing_key)

    def bindings(self, exchange: str) -> list[Document]:
        """Read what is declared of an exchange and return its bindings."""
        prefix, before = exchange_prefix(exchange), time.monotonic()
        docs = [row['doc'] for row in self.client.id_range(prefix, docs=True)]
        self.routes.replace({doc['_id']: doc for doc in docs}, before, prefix)
        self.routes.was_read(exchange, before)
        return [doc for doc in docs if is_binding(doc)]

    @property
    def _is_fresh(self) -> bool:
        return time.monotonic() - self._seen_at < _JUST_SEEN

    def _just_seen(self, doc_id: str) -> bool:
        """Tell whether a document was there a moment ago, when the connection was established."""
        return doc_id in self._seen and self._is_fresh

    def _declared_before(self, doc_id: str, *, is_new: bool) -> Document | None:
        """Read what is probably there already; what is temporary is new (`is_new`), and need not be looked for.

        Writing it would do as well, but a cluster says that a write is in conflict only when every node has said so, or is
        known to be down: that may take a minute.
        """
        return None if is_new else self.client.find([doc_id])[0]

    def _delete(self, docs: list[Document]) -> None:
        if docs:
            self.client.bulk([deletion(doc) for doc in docs])
        for doc in docs:
            self._seen.pop(doc['_id'], None)
            self.routes.update({'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True})


def _queue_of(doc: Document | None) -> Any:
    """Return the queue that a Queue or a Binding is about; None for an Exchange, and for no document."""
    return doc.get('queue', doc['name'] if doc['type'] == 'Queue' else None) if doc else None


def _seconds(milliseconds: Any) -> float | None:
    try:
        return float(milliseconds) / 1000 if milliseconds is not None else None
    except (TypeError, ValueError):
        return None
