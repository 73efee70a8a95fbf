"""Routing: the bindings of a database as a table, and the match of routing keys.

A Binding leads from an exchange to a queue. An Exchange document says that an exchange is a fanout exchange; topic exchanges are
known by the patterns of their bindings, and all others are direct. Both have ids that start with `BINDING` and the name of the
exchange: one range read returns all that is known of an exchange.
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

from ..couchdb.client import Document
from ..couchdb.fork_safety import Shared, reset_in_child
from ..couchdb.shapes import equal, maybe, members, text
from ..documents.ids import BINDING
from ..documents.types import FANOUT, FanoutExchange

__all__ = [
    'Routes',
    'binding_id',
    'exchange_id',
    'exchange_in',
    'exchange_prefix',
    'fanout',
    'is_binding',
    'routes_of',
    'topic_matches',
    'topic_pattern',
]

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
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Start over: nothing is known. In a forked child no feed keeps the table of its parent up to date."""
        self._lock = threading.Lock()
        self._bindings: dict[str, Mapping[str, Any]] = {}
        self._read: dict[str, float] = {}
        self._updated: dict[str, float] = {}  # when, by the monotonic clock, a binding was last told of alone
        self._gone: dict[str, int] = {}  # of those that were deleted here, how often they had been written
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

    def update(self, doc: Mapping[str, Any]) -> None:
        """Take in one Binding or Exchange that was written or deleted; a feed may tell of an older state than is known here."""
        generation = int(str(doc.get('_rev', 0)).partition('-')[0])
        with self._lock:
            now = time.monotonic()
            if doc.get('_deleted'):
                self._gone[doc['_id']] = max(generation, self._gone.get(doc['_id'], 0))
            elif 0 < generation <= self._gone.get(doc['_id'], 0):
                return
            self._updated.pop(doc['_id'], None)
            self._updated[doc['_id']] = now  # the newest last
            while self._updated[oldest := next(iter(self._updated))] < now - _MEMORY:
                del self._updated[oldest]
                self._gone.pop(oldest, None)
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

    def is_fanout(self, exchange: str) -> bool:
        """Tell whether the exchange is declared as a fanout exchange, as far as is known."""
        return _is_fanout(self._bindings.get(exchange_id(exchange)))

    def match(self, exchange: str, routing_key: str) -> set[str]:
        """Return the queues that a message goes to."""
        with self._lock:
            table = [b for b in self._bindings.values() if b.get('exchange') == exchange]
        return {
            b['queue']
            for b in table
            if is_binding(b)
            and (topic_matches(b['routing_key'], routing_key) if b.get('pattern') else b['routing_key'] == routing_key)
        }


_tables: Shared[tuple[int, str], Routes] = Shared({})


def routes_of(url: str) -> Routes:
    """Return this process's table for the database at `url`."""
    return _tables.of((os.getpid(), url), Routes)


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


is_binding = members(exchange=text, routing_key=text, queue=text, pattern=maybe(text))
_is_fanout = members(type=equal('Exchange'), kind=equal(FANOUT))


def binding_id(exchange: str, routing_key: str, queue: str) -> str:
    """Return the id of a Binding. JSON keeps the three names apart, whatever characters they have."""
    return f'{exchange_prefix(exchange)}{_quoted(routing_key)},{_quoted(queue)}]'


def exchange_id(exchange: str) -> str:
    """Return the id of an Exchange document, which no Binding can have."""
    return f'{exchange_prefix(exchange)}null,null]'


def exchange_prefix(exchange: str) -> str:
    """Return what the ids of all documents about an exchange start with."""
    return f'{BINDING}[{_quoted(exchange)},'


def exchange_in(doc_id: str) -> str | None:
    """Return the name of the exchange if the id is that of an Exchange document, else None."""
    if not (doc_id.startswith(BINDING) and doc_id.endswith(',null,null]')):
        return None
    try:
        name = json.loads(doc_id.removeprefix(BINDING))[0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def fanout(exchange: str) -> FanoutExchange:
    """Return the document that makes an exchange a fanout exchange."""
    return {'_id': exchange_id(exchange), 'type': 'Exchange', 'name': exchange, 'kind': FANOUT}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
