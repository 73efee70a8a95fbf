"""Queues and bindings that other processes need, as documents, and the table of routes that they make.

A Queue is `{type, name, arguments, auto_delete, expires, lifetime}`, a Binding `{type, exchange, routing_key, pattern,
queue}`; their ids are made of their names, so that declaring one twice, or from two machines, is declaring it once.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from .answers import maybe, members, number, text
from .client import Client, Document
from .errors import Conflict
from .forks import Shared
from .limits import LIMITS, Limit, check_limits, limits_of

__all__ = ['BINDING', 'QUEUE', 'Routes', 'Topology', 'binding_prefix', 'routes_of', 'topic_pattern']

#: The ids of all documents that are no WorkItems start with this: one range read finds what changed.
BINDING, QUEUE = 'broker:binding:', 'broker:queue:'

#: How long a queue that is in use is kept beyond its lifetime, in seconds.
_IN_USE = 600.0

#: How long a queue that goes with its last consumer is kept if that one could not remove it, in seconds.
_TEMPORARY = 3600.0

#: How long a table of routes that no feed keeps up to date is trusted, in seconds.
_MAX_AGE = 0.05


#: How long one remembers when a binding was told of, in seconds: longer than any read of the bindings takes.
_MEMORY = 60.0


class Routes:
    """The bindings of those exchanges of one database that this process publishes to, shared by all its connections.

    While a consuming connection follows the changes of the database it keeps the table up to date, and a lookup costs
    nothing; else a lookup reads the exchange's bindings, unless it did a moment ago.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bindings: dict[str, Document] = {}
        self._read: dict[str, float] = {}
        self._updated: dict[str, float] = {}  # when, by the monotonic clock, a binding was last told of alone
        #: The exchanges that were asked for, and those of them whose bindings are kept up to date.
        self.wanted: set[str] = set()
        self._followed: set[str] = set()
        self._followed_until = 0.0

    def follow(self, seconds: float, exchanges: Iterable[str] = ()) -> None:
        """Trust what is known of these exchanges, and of those named before, for so long: `replace` and `update` are told all."""
        self._followed = {*self._followed, *exchanges} if seconds else set()
        self._followed_until = time.monotonic() + seconds

    def replace(self, bindings: Mapping[str, Document], at: float, prefix: str = BINDING) -> None:
        """Make `bindings`, by id, all that there are with ids that start with `prefix`.

        They were read from the monotonic time `at` on: what was written or deleted since stays as `update` told.
        """
        with self._lock:
            newer = {k for k, when in self._updated.items() if when >= at}
            kept = {k: v for k, v in self._bindings.items() if k in newer or not k.startswith(prefix)}
            self._bindings = kept | {k: v for k, v in bindings.items() if k not in newer}

    def update(self, doc: Document) -> None:
        """Take in one binding that was written or deleted."""
        with self._lock:
            now = time.monotonic()
            self._updated.pop(doc['_id'], None)
            self._updated[doc['_id']] = now  # the newest last
            while self._updated[oldest := next(iter(self._updated))] < now - _MEMORY:
                del self._updated[oldest]
            if doc.get('_deleted'):
                self._bindings.pop(doc['_id'], None)
            else:
                self._bindings[doc['_id']] = doc

    def known(self, exchange: str) -> bool:
        """Tell whether the table can be trusted for this exchange."""
        now = time.monotonic()
        followed = now < self._followed_until and exchange in self._followed
        return followed or now - self._read.get(exchange, -_MAX_AGE) < _MAX_AGE

    def was_read(self, exchange: str, at: float) -> None:
        """Note that the exchange's bindings were read at the monotonic time `at`."""
        self._read[exchange] = at
        self.wanted.add(exchange)
        if self._followed_until == math.inf:
            self._followed.add(exchange)  # the feed tells of all that changes from now on

    def match(self, exchange: str, routing_key: str) -> set[str]:
        """Return the queues that a message goes to."""
        with self._lock:
            table = [b for b in self._bindings.values() if b.get('exchange') == exchange]
        return {b['queue'] for b in table if _is_sound(b) and (
            topic_matches(b['routing_key'], routing_key) if b.get('pattern') else b['routing_key'] == routing_key)}


_tables: Shared[tuple[int, str], Routes] = Shared({})


def routes_of(url: str) -> Routes:
    """Return this process's table for the database at `url`."""
    return _tables.of((os.getpid(), url), Routes)


class Topology:
    """What is declared in one database."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.routes, self.limits = routes_of(client.address.url), limits_of(client.address.url)
        self._declared: dict[str, Document] = {}

    def redeclare(self) -> None:
        """Store again what was declared through this object: the database was deleted and made anew."""
        declared = list(self._declared.values())  # kombu's thread may declare more meanwhile
        found = self.client.find([doc['_id'] for doc in declared])
        missing = [doc for doc, there in zip(declared, found, strict=True) if there is None]
        if missing:
            self.client.bulk(missing)

    # -- queues

    def declare_queue(self, name: str, arguments: Mapping[str, Any], auto_delete: bool) -> None:
        """Store a queue, if it is not there. `x-expires` in `arguments` (milliseconds, as in AMQP) is its lifetime unused.

        Of one that is there the limits named in `arguments` are set, and all else is left: the last declaration counts.
        *Raises* `ConfigurationError` for a limit that is no number.
        """
        check_limits(name, arguments)
        doc = self._queue(name, dict(arguments), auto_delete)
        limited = bool(arguments.keys() & set(LIMITS))
        found = self._declared_before(doc['_id'], is_new=bool(doc['lifetime']))
        while not found or limited or doc['lifetime']:
            if found:
                before = found['arguments'] if isinstance(found.get('arguments'), dict) else {}
                doc = {**self._queue(name, {**before, **arguments}, bool(found.get('auto_delete'))), '_rev': found['_rev']}
                if not doc['lifetime'] and doc['arguments'] == before:
                    break  # so it is declared
            else:
                doc.pop('_rev', None)
            try:
                self.client.put(doc)
                break
            except Conflict:
                found = self.client.find([doc['_id']])[0]
        self._declared[doc['_id']] = {key: value for key, value in doc.items() if key != '_rev'}
        if limited:
            self.limits.seen(doc)

    def _queue(self, name: str, arguments: Document, auto_delete: bool) -> Document:
        lifetime = _seconds(arguments.get('x-expires')) or (_TEMPORARY if auto_delete else None)
        return {'_id': QUEUE + name, 'type': 'Queue', 'name': name, 'arguments': arguments, 'auto_delete': auto_delete,
                'lifetime': lifetime, 'expires': self.client.clock.now() + lifetime if lifetime else None}

    def limit(self, name: str) -> Limit:
        """Return the limits of a queue as they are declared now; one request."""
        for doc in self.queues([name]):
            self.limits.seen(doc)
        return self.limits.of(name)

    def prolong(self, doc: Document, now: float) -> None:
        """Move the end of a queue that is in use, as read: far enough that this is seldom to be done."""
        self.client.bulk([{**doc, 'expires': now + (doc['lifetime'] if number(doc.get('lifetime')) else 0.0) + _IN_USE}])

    def has_queue(self, name: str) -> bool:
        """Tell whether a queue is declared."""
        return self.client.find([QUEUE + name])[0] is not None

    def queues(self, names: list[str]) -> list[Document]:
        """Return the Queue documents of those names that are declared; one that somebody spoilt beyond its name is none."""
        docs = self.client.find([QUEUE + name for name in names])
        return [doc for name, doc in zip(names, docs, strict=True) if doc and doc.get('name') == name]

    def delete_queue(self, name: str) -> None:
        """Delete a queue and its bindings; its messages are the Store's."""
        bindings = [row['doc'] for row in self.client.id_range(BINDING, docs=True) if row['doc'].get('queue') == name]
        # The I/O thread does this, too, while kombu's declares.
        for doc in [doc for doc in list(self._declared.values()) if doc.get('queue', doc.get('name')) == name]:
            self._declared.pop(doc['_id'], None)
        self._delete(bindings + self.queues([name]))
        self.limits.seen({'name': name})

    # -- bindings

    def bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        """Store a binding; with a `pattern` (see `topic_pattern`) the exchange is a topic exchange."""
        doc: Document = {'_id': _binding_id(exchange, routing_key, queue), 'type': 'Binding', 'exchange': exchange,
               'routing_key': routing_key, 'pattern': pattern, 'queue': queue}
        self._declared[doc['_id']] = doc
        found = self._declared_before(doc['_id'], is_new=bool(self._declared.get(QUEUE + queue, {}).get('lifetime')))
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
        self._declared.pop(_binding_id(exchange, routing_key, queue), None)
        self._delete([doc for doc in self.client.find([_binding_id(exchange, routing_key, queue)]) if doc])

    def lookup(self, exchange: str, routing_key: str, *, topic: bool) -> set[str]:
        """Return the queues that a message for a direct or topic exchange goes to."""
        if self.routes.known(exchange):
            queues = self.routes.match(exchange, routing_key)
            # A reply may overtake the news of its queue's binding: before a message goes nowhere, look again. Not for
            # topics: Celery sends events all the time, and usually nobody listens.
            if queues or topic:
                return queues
        self.bindings(exchange)
        return self.routes.match(exchange, routing_key)

    def bindings(self, exchange: str) -> list[Document]:
        """Read the bindings of an exchange."""
        prefix, before = binding_prefix(exchange), time.monotonic()
        docs = [row['doc'] for row in self.client.id_range(prefix, docs=True) if _is_sound(row['doc'])]
        self.routes.replace({doc['_id']: doc for doc in docs}, before, prefix)
        self.routes.was_read(exchange, before)
        return docs

    def _declared_before(self, doc_id: str, *, is_new: bool) -> Document | None:
        """Read what is probably there already; what is temporary is new (`is_new`), and need not be looked for.

        Writing it would do as well, but a cluster says that a write is in conflict only when every node has said so, or is
        known to be down: that may take a minute.
        """
        return None if is_new else self.client.find([doc_id])[0]

    def _delete(self, docs: list[Document]) -> None:
        if docs:
            self.client.bulk([{'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True} for doc in docs])
        for doc in docs:
            self.routes.update({'_id': doc['_id'], '_deleted': True})


def binding_prefix(exchange: str) -> str:
    """Return what the ids of all bindings of an exchange start with."""
    return f'{BINDING}[{_quoted(exchange)},'


def topic_pattern(routing_key: str) -> str:
    """Return the regular expression for a topic binding, to be matched against a dot and the message's routing key.

    As in AMQP, `*` stands for one word and `#` for any number of words, none included.
    """
    wildcards = {'*': r'\.[^.]*', '#': r'(?:\.[^.]*)*'}
    return '^' + ''.join(wildcards.get(word, r'\.' + re.escape(word)) for word in routing_key.split('.')) + '$'


def topic_matches(binding: str, routing_key: str) -> bool:
    """Tell whether the routing key of a message is one of those that a topic binding names.

    As `topic_pattern` says it, but in a time that is bounded: a regular expression with many `#` could take for ever.
    """
    wanted = binding.split('.')

    def beyond(places: set[int]) -> set[int]:  # and behind each `#`, which may stand for nothing
        for place in range(len(wanted)):
            if place in places and wanted[place] == '#':
                places.add(place + 1)
        return places

    places = beyond({0})
    for word in routing_key.split('.'):
        fit = [place for place in places if place < len(wanted) and wanted[place] in ('#', '*', word)]
        places = beyond({place if wanted[place] == '#' else place + 1 for place in fit})
    return len(wanted) in places


_is_sound = members(exchange=text, routing_key=text, queue=text, pattern=maybe(text))


def _binding_id(exchange: str, routing_key: str, queue: str) -> str:
    # JSON keeps the three apart, whatever characters they have.
    return f'{BINDING}[{_quoted(exchange)},{_quoted(routing_key)},{_quoted(queue)}]'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _seconds(milliseconds: Any) -> float | None:
    try:
        return float(milliseconds) / 1000 if milliseconds is not None else None
    except (TypeError, ValueError):
        return None
