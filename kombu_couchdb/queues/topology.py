"""Queues, exchanges and bindings as documents, for all processes.

A Queue is `{type, name, arguments, auto_delete, expires, lifetime}`, a Binding `{type, exchange, routing_key, pattern,
queue}`, an Exchange `{type, name, kind}`. Their ids are made of their names, so two processes that declare the same
write one document. Only fanout exchanges are stored: a publisher that has not declared one must know that it
broadcasts.

A connection remembers what it has declared. What is stored, as far as this process knows, is in `declarations`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document
from ..couchdb.conflicts import delete_docs
from ..documents import queue
from ..documents.bindings import exchange_id, exchange_prefix, fanout, is_binding
from ..documents.ids import BINDING, PAUSE, QUEUE
from ..documents.queue import LIMITS, Limit, limit_of
from ..documents.shared_documents import Binding, FanoutExchange, Queue
from ..errors import QueuePaused
from .databases import BroadcastsDatabase
from .declarations import Declarations, Destinations, declarations_of

#: After so many single reads, a connection that declares more reads the ids of what is declared in one request, up to
#: the second number. Those of 300 queues and their bindings take CouchDB about as long as three single reads.
_SINGLE_READS, _MAX_ROWS = 8, 2000


class Topology:
    """Reads and writes what is declared in one database. kombu's thread and the I/O thread use it at the same time."""

    def __init__(
        self, client: Client, broadcasts: BroadcastsDatabase | None = None, known: Declarations | None = None
    ) -> None:
        """`broadcasts` is where consumers learn of changes at once; without it they find them when they look.

        `known` is the table of this process for the database.
        """
        self.client, self.broadcasts = client, broadcasts
        self.known = known or declarations_of(client.address.url)
        self._declared: dict[str, Mapping[str, Any]] = {}  # what was declared here, by id
        self._namesakes = set[str]()  # queues that were bound here to an exchange of their own name
        self._single_reads = 0

    @property
    def paused(self) -> frozenset[str]:
        """The paused queues, as far as this process knows."""
        return self.known.paused

    # -- what this connection has declared

    def declared_queue(self, queue: str) -> Mapping[str, Any]:
        """Return the Queue document of a queue as it was declared here; {} if it was not."""
        return self._declared.get(QUEUE + queue, {})

    def is_temporary(self, queue: str) -> bool:
        """Tell whether a queue was declared here and has a lifetime."""
        return bool(self.declared_queue(queue).get('lifetime'))

    def redeclare(self) -> None:
        """Store again what was declared through this object: the database was deleted and created again."""
        self._store_missing(list(self._declared.values()))

    def restore(self, queues: Collection[str], *, check: bool = False) -> None:
        """Store deleted temporary queues again: those among `queues` that were declared here, with their bindings.

        Without `check` this makes no request unless a deletion is known; with it the database is always read.
        """
        if not check and not self.known.deleted:
            return
        deleted = {_queue_of(self._declared.get(each, {})) for each in self._declared.keys() & self.known.deleted}
        names = {name for name in (queues if check else deleted.intersection(queues)) if self.is_temporary(name)}
        if names:
            self._store_missing(self._declared_for(names))

    def _declared_for(self, queues: Collection[str]) -> list[Mapping[str, Any]]:
        return [doc for doc in list(self._declared.values()) if _queue_of(doc) in queues]

    def _declare(self, doc: Mapping[str, Any]) -> None:
        self._declared[doc['_id']] = {name: value for name, value in doc.items() if name != '_rev'}

    def _take_back(self, docs: Iterable[Mapping[str, Any]]) -> None:
        for doc in docs:
            self._declared.pop(doc['_id'], None)
            if doc.get('exchange') == doc.get('queue'):
                self._namesakes.discard(doc.get('exchange', ''))

    def _store_missing(self, docs: Sequence[Mapping[str, Any]]) -> None:
        now, began = self.client.clock.now(), time.monotonic()
        found = self.client.find([doc['_id'] for doc in docs])
        missing = [
            {**doc, 'expires': now + doc['lifetime']} if doc.get('lifetime') else doc
            for doc, there in zip(docs, found, strict=True)
            if there is None
        ]
        if missing:
            self.client.bulk(missing)
            self._changed(missing)
        self.known.replace((), (*missing, *filter(None, found)), began)

    # -- queues

    def declare_queue(self, name: str, arguments: Mapping[str, Any], auto_delete: bool) -> bool:
        """Store a queue, or merge `arguments` into those of a stored one, if they have a limit or the queue a lifetime.

        A stored `auto_delete` never changes; a lifetime begins again. `x-expires` in `arguments` is the lifetime of an
        unused queue, in milliseconds as in AMQP. Return `auto_delete` as it is stored: whether the queue is deleted
        with its last consumer. *Raises* `ConfigurationError` for a limit or lifetime that is not a number from 0 on.
        """
        doc = queue.new(name, arguments, auto_delete, self.client.clock.now())
        limited = not arguments.keys().isdisjoint(LIMITS)
        if limited or doc['lifetime'] or not self._exists(doc['_id']):
            doc = self._store_queue(doc, limited)
        self._declare(doc)
        return bool(doc['auto_delete'])

    def _store_queue(self, wanted: Queue, limited: bool) -> Queue:
        """Store a Queue, or change the stored one, see `declare_queue`; return the stored document."""
        found = self._declared_before(wanted['_id'], is_new=bool(wanted['lifetime']))
        while True:
            doc = self._merged(wanted, found) if found else wanted
            if found and not wanted['lifetime']:
                if not limited:
                    return {**doc, 'arguments': wanted['arguments'], 'lifetime': found.get('lifetime')}
                if not doc['lifetime'] and doc['arguments'] == found.get('arguments'):
                    break
            if self.client.try_put(doc):
                if limit_of(doc) != limit_of(found or {}):
                    self._changed([doc], others_use=bool(found))
                break
            found = self.client.find([doc['_id']])[0]
        self.known.update(doc)
        return doc

    def _merged(self, wanted: Queue, found: Document) -> Queue:
        """Return the stored Queue `found` with the arguments of `wanted`, and a lifetime that begins again."""
        arguments = {**queue.arguments_of(found), **wanted['arguments']}
        merged = queue.new(wanted['name'], arguments, bool(found.get('auto_delete')), self.client.clock.now())
        return {**merged, '_rev': found['_rev']}

    def limit(self, name: str) -> Limit:
        """Read the limits of a queue, in one request."""
        for doc in self.queues([name]):
            self.known.update(doc)
        return self.known.limit(name)

    def prolong(self, doc: Document, seconds: float) -> bool:
        """Let a queue expire in `seconds` from now; return False if `doc` was changed since it was read."""
        [result] = self.client.bulk([{**doc, 'expires': self.client.clock.now() + seconds}])
        return result.is_stored

    def has_queue(self, name: str) -> bool:
        """Tell whether a queue is declared."""
        return bool(self.queues([name]))

    def queues(self, names: list[str]) -> list[Document]:
        """Return the Queue documents of those queues that are declared; a document with a wrong name is left out."""
        docs = self.client.find([QUEUE + name for name in names])
        return [doc for name, doc in zip(names, docs, strict=True) if doc and doc.get('name') == name]

    def delete_queue(self, name: str) -> None:
        """Delete a queue and its bindings, not its messages: for those see `Store.purge`."""
        self._take_back(self._declared_for({name}))
        self._delete(self._bindings_of(name) + self.queues([name]))

    def delete_unused(self, doc: Document) -> bool | None:
        """Delete a queue in the revision that was found unused, and its bindings.

        Return True if it was deleted, None if another process changed it meanwhile, and False if a cluster could not
        prove that no process did. Declarations of this connection are kept: if a consumer subscribes to the queue at
        this moment, `restore` stores the queue again.
        """
        [result] = self.client.bulk([deletion(doc)])
        if not result.is_stored:
            return None
        self.known.update({'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True})
        self._delete(self._bindings_of(doc['name']))
        return result.is_proven

    def _bindings_of(self, queue: str) -> list[Document]:
        return [row['doc'] for row in self.client.id_range(BINDING, docs=True) if row['doc'].get('queue') == queue]

    def check_accepts(self, queues: Iterable[str]) -> None:
        """Raise `QueuePaused` if one of the queues refuses new messages.

        At most one request a second for each queue, and none while this process consumes.
        """
        for name in queues:
            pause = self.known.pause(name)
            if pause is None:
                began = time.monotonic()
                [pause] = self.client.find([PAUSE + name])
                self.known.note_pause(name, pause, began)
            if pause and pause.get('refuse') is True:
                who, why = pause.get('by'), pause.get('reason')
                raise QueuePaused(
                    f'queue {name!r} is paused{f" by {who}" if who else ""} and takes no new messages'
                    f'{f" ({why})" if why else ""}; "celery couchdb queues resume {name}" ends that'
                )

    # -- exchanges and bindings

    def declare_fanout(self, exchange: str) -> None:
        """Store a fanout exchange, unless it is known to be stored."""
        doc = fanout(exchange)
        self._declare(doc)
        if not self.known.is_fanout(exchange):
            self._store_once(doc)

    def has_fanout(self, exchange: str) -> bool:
        """Tell whether a fanout exchange is stored, in one request."""
        [found] = self.client.find([exchange_id(exchange)])
        if found:
            self.known.update(found)
        return found is not None

    def has_exchange(self, exchange: str) -> bool:
        """Tell whether an exchange is a stored fanout exchange or has a binding, in one request."""
        return bool(self.bindings(exchange)) or self.known.is_fanout(exchange)

    def delete_exchange(self, exchange: str) -> None:
        """Delete an exchange and its bindings; its queues are kept."""
        prefix = exchange_prefix(exchange)
        docs = [row['doc'] for row in self.client.id_range(prefix, docs=True)]
        self._take_back([doc for doc_id, doc in list(self._declared.items()) if doc_id.startswith(prefix)])
        self._delete(docs)

    def bind(self, doc: Binding) -> None:
        """Store a binding, see `documents.bindings.new`."""
        exchange, queue = doc['exchange'], doc['queue']
        if self.is_temporary(queue):
            doc['temporary'] = limit_of(self.declared_queue(queue)).ttl
        self._declare(doc)
        self._store_once(doc, is_new=self.is_temporary(queue))
        if exchange == queue == doc['routing_key']:
            self._namesakes.add(queue)
            if self.known.exists(exchange_id(exchange)) is None:
                self.has_exchange(exchange)  # see `is_broadcast`

    def _store_once(self, doc: Binding | FanoutExchange, *, is_new: bool = False) -> None:
        """Store a Binding or an Exchange, if it is not stored; such a document never changes."""
        if not self._exists(doc['_id']):
            found = self._declared_before(doc['_id'], is_new=is_new)
            if not found and not self.client.try_put(doc):
                found = self.client.find([doc['_id']])[0]
            if found and doc != {name: value for name, value in found.items() if name in doc}:
                # The stored document is malformed, or its queue was not temporary then. If this write is in conflict,
                # another process has repaired the document.
                self.client.bulk([{**doc, '_rev': found['_rev']}])
                found = None
            if not found:
                self._changed([doc])
        self.known.update(doc)

    def unbind(self, doc: Binding) -> None:
        """Delete a binding."""
        self._take_back([doc])
        self._delete([found for found in self.client.find([doc['_id']]) if found])

    def is_broadcast(self, queue: str) -> bool:
        """Tell whether a message that names only a queue is for the fanout exchange of the same name.

        This is so if the queue was bound here to an exchange of its own name, as if that were a direct one: Celery does
        so for a queue that only `task_routes` names, and then publishes without an exchange.
        """
        return queue in self._namesakes and self.known.is_fanout(queue)

    def lookup(
        self, exchange: str, routing_key: str, headers: Mapping[str, Any], *, recheck: bool = True
    ) -> Destinations | None:
        """Return the queues of a message for an exchange, or None for a fanout exchange.

        With `recheck` the bindings are read again if the known ones match no queue: a reply may arrive here before the
        changes feed reports the binding of its queue.
        """
        if (reply_queue := self.known.reply_queue(exchange, routing_key)) is not None:
            return reply_queue
        if self.known.knows(exchange):
            queues = self.known.match(exchange, routing_key, headers)
            if queues != {} or not recheck:
                return queues
        self.bindings(exchange)
        return self.known.match(exchange, routing_key, headers)

    def bindings(self, exchange: str) -> list[Document]:
        """Read what is stored about an exchange, in one request, and return its bindings."""
        began = time.monotonic()
        docs = [row['doc'] for row in self.client.id_range(exchange_prefix(exchange), docs=True)]
        self.known.read(exchange, docs, began)
        return [doc for doc in docs if is_binding(doc)]

    def _exists(self, doc_id: str) -> bool | None:
        """Tell whether a document need not be read before it is declared; None if this is unknown.

        A worker with many queues declares them one after the other.
        """
        exists = self.known.exists(doc_id)
        if exists is None:
            self._single_reads += 1
            if self._single_reads > _SINGLE_READS:
                began, self._single_reads = time.monotonic(), 0
                self.known.saw(self.client.id_range(BINDING, to=QUEUE, limit=_MAX_ROWS), began, _MAX_ROWS)
                exists = self.known.exists(doc_id)
        return exists

    def _declared_before(self, doc_id: str, *, is_new: bool) -> Document | None:
        """Read a document that another process has probably stored; return None if it is new (`is_new`) or not stored.

        A write without a read would do as well, but a cluster responds with a conflict only after each node has
        reported it or is known to be down: that may take a minute.
        """
        return None if is_new or self.known.exists(doc_id) is False else self.client.find([doc_id])[0]

    def _delete(self, docs: list[Document]) -> None:
        if docs:
            delete_docs(self.client, docs)
            self._changed(docs)
        for doc in docs:
            self.known.update({'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True})

    def _changed(self, docs: Iterable[Mapping[str, Any]], *, others_use: bool = False) -> None:
        """Tell all consumers that these documents were stored or deleted, if other connections use one of them.

        A new temporary queue is for its own connection, and only those who are asked for a reply need the binding of a
        reply queue. But all who publish events need the bindings of temporary queues to topic and headers exchanges.
        """

        def is_for_others(doc: Mapping[str, Any]) -> bool:
            is_temporary = doc.get('lifetime') or 'temporary' in doc
            is_of_headers = doc.get('type') == 'Binding' and 'arguments' in doc
            return not is_temporary or bool(doc.get('pattern')) or is_of_headers

        if self.broadcasts and (others_use or any(map(is_for_others, docs))):
            self.broadcasts.notify()


def _queue_of(doc: Mapping[str, Any]) -> Any:
    """Return the name of the queue that a Queue or a Binding is about; '' for an Exchange and an empty document."""
    return doc.get('queue') or (doc['name'] if doc.get('type') == 'Queue' else '')
