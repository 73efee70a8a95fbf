"""Routes: the bindings of a database and the limits of its queues, as far as this process knows them.

A Binding leads from an exchange to a queue. An Exchange document marks a fanout exchange. Bindings of topic exchanges
have a pattern; all other exchanges are direct. The ids of both documents start with `BINDING` and the name of the
exchange, so one range read returns everything that is stored about an exchange.

Limits come from the arguments of a queue, with RabbitMQ's meanings:

* `x-message-ttl` (milliseconds): a message is dropped when it has been ready for this long;
* `x-max-length`: if a queue has more ready messages than this, the first ones are dropped;
* `x-delivery-limit`: after this many deliveries a message becomes a dead letter. It overrides the transport option.

A publisher that knows the limits of a queue drops the messages over its length. Consumers drop messages that are too
old instead of delivering them. The sweep drops the rest. A queue without limits costs no request and no write.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ..couchdb.client import Document
from ..couchdb.fork_safety import Shared, reset_in_child
from ..couchdb.shapes import equal, maybe, members, number, text
from ..documents.ids import BINDING
from ..documents.shared_documents import FanoutExchange
from ..documents.types import FANOUT
from ..errors import ConfigurationError
from ..values import is_number, revision_parts

#: For how many seconds the bindings of an exchange are trusted after they were read, if no changes feed keeps them up
#: to date.
_MAX_AGE_SECONDS = 0.05

#: The most bindings of queues for replies that are remembered.
_MAX_REPLIES = 100

#: For how many seconds the time of an update is remembered: longer than any read of the bindings takes.
_MEMORY_SECONDS = 60.0


#: If a later declaration has one of these arguments, its arguments are merged into those of the stored queue. The first
#: three are limits; `x-expires` is a lifetime.
LIMITS = ('x-message-ttl', 'x-max-length', 'x-delivery-limit', 'x-expires')


class TemporaryQueue(NamedTuple):
    """What a publisher must know of a queue that has a lifetime."""

    #: The seconds that a message may wait in it; None: no limit.
    ttl: float | None


#: The queues of a message, by name; None: a queue without a lifetime.
Destinations: TypeAlias = dict[str, TemporaryQueue | None]


class Limit(NamedTuple):
    """The limits of one queue; None means no limit."""

    ttl: float | None = None  #: seconds
    length: int | None = None  #: ready messages
    deliveries: int | None = None


class Limits:
    """The limits of the queues of one database, as far as this process knows them; its connections share them."""

    def __init__(self) -> None:
        self._queues: dict[str, Limit] = {}

    def seen(self, doc: Mapping[str, Any]) -> None:
        """Take in a Queue document."""
        self._queues.pop(str(doc.get('name')), None)
        if (limit := limit_in(doc)) != Limit():
            self._queues[str(doc.get('name'))] = limit

    def of(self, queue: str) -> Limit:
        """Return the limits of a queue."""
        return self._queues.get(queue, Limit())


class Routes:
    """The bindings of the exchanges to which this process publishes, for one database; its connections share the table.

    While a consuming connection follows the changes feed or polls (see `fleet.notifier`), it keeps the table up to
    date, and a lookup makes no request. Otherwise a lookup reads the bindings of the exchange, unless they were read
    less than 50 ms ago.
    """

    def __init__(self) -> None:
        #: What this process knows of the queues' limits.
        self.limits = Limits()
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Forget all bindings. In a forked child no changes feed keeps the table of its parent up to date."""
        self._lock = threading.Lock()
        self._bindings: dict[str, Mapping[str, Any]] = {}
        self._read: dict[str, float] = {}
        #: By id: the monotonic time of the last `update`, and the generation of the last deleted revision, or 0.
        self._updated: dict[str, tuple[float, int]] = {}
        self._replies: dict[tuple[str, str], Destinations] = {}
        #: The exchanges that were looked up.
        self.wanted: set[str] = set()
        self._followed: set[str] = set()  # those whose bindings a notifier keeps up to date
        self._followed_until = 0.0

    def follow(self, seconds: float, exchanges: Iterable[str] = ()) -> None:
        """Trust the table for these exchanges and those of earlier calls for `seconds`: the caller reports all updates.

        With 0 seconds, trust it for no exchange any more.
        """
        self._followed = {*self._followed, *exchanges} if seconds else set()
        self._followed_until = time.monotonic() + seconds

    def replace(self, bindings: Mapping[str, Document], at: float, prefix: str = BINDING) -> None:
        """Replace all documents whose ids start with `prefix` by `bindings`, which are by id.

        `at` is the monotonic time when their read began. Documents that `update` has reported since are kept.
        """
        with self._lock:
            newer = {k for k, (when, _) in self._updated.items() if when >= at}
            kept = {k: v for k, v in self._bindings.items() if k in newer or not k.startswith(prefix)}
            self._bindings = kept | {k: v for k, v in bindings.items() if k not in newer}

    def update(self, doc: Mapping[str, Any]) -> None:
        """Take in a Binding or Exchange that was written or deleted; ignore a state older than a known deletion."""
        generation, _ = revision_parts(doc.get('_rev'))
        with self._lock:
            now, (_, gone) = time.monotonic(), self._updated.pop(doc['_id'], (0.0, 0))
            if doc.get('_deleted'):
                gone = max(generation, gone)
                self._bindings.pop(doc['_id'], None)
            elif not 0 < generation <= gone:
                self._bindings[doc['_id']] = doc
            self._updated[doc['_id']] = now, gone  # the newest is last
            while self._updated[oldest := next(iter(self._updated))][0] < now - _MEMORY_SECONDS:
                del self._updated[oldest]

    def known(self, exchange: str) -> bool:
        """Tell whether the table is up to date for this exchange."""
        now = time.monotonic()
        followed = now < self._followed_until and exchange in self._followed
        return followed or now - self._read.get(exchange, -_MAX_AGE_SECONDS) < _MAX_AGE_SECONDS

    def was_read(self, exchange: str, at: float) -> None:
        """Note that the exchange's bindings were read at the monotonic time `at`."""
        self._read[exchange] = at
        self.wanted.add(exchange)
        if self._followed_until == math.inf:
            self._followed.add(exchange)  # the feed reports all changes from now on

    def reply_binding(self, exchange: str, routing_key: str) -> Mapping[str, Any] | None:
        """Return the known binding of the temporary queue for the replies to a broadcast, or None."""
        with self._lock:
            return next(
                (
                    {name: value for name, value in binding.items() if name != '_rev'}
                    for binding in self._bindings.values()
                    if (binding.get('exchange'), binding.get('routing_key')) == (exchange, routing_key)
                    and is_binding(binding)
                    and 'temporary' in binding
                ),
                None,
            )

    def note_reply(self, binding: Any) -> None:
        """Take in the binding that a broadcast names for the replies to it."""
        if is_binding(binding) and 'temporary' in binding:
            with self._lock:
                queues = {binding['queue']: _temporary_queue(binding)}
                self._replies[binding['exchange'], binding['routing_key']] = queues
                if len(self._replies) > _MAX_REPLIES:
                    del self._replies[next(iter(self._replies))]

    def reply_queue(self, exchange: str, routing_key: str) -> Destinations | None:
        """Return the queue that `note_reply` has named for an exchange and a routing key, or None."""
        return self._replies.get((exchange, routing_key))

    def is_fanout(self, exchange: str) -> bool:
        """Tell whether the exchange is a fanout exchange, as far as this process knows."""
        return _is_fanout(self._bindings.get(exchange_id(exchange)))

    def match(self, exchange: str, routing_key: str) -> Destinations:
        """Return the queues whose bindings match a routing key."""
        with self._lock:
            table = [b for b in self._bindings.values() if b.get('exchange') == exchange]
        return {
            b['queue']: _temporary_queue(b)
            for b in table
            if is_binding(b)
            and (topic_matches(b['routing_key'], routing_key) if b.get('pattern') else b['routing_key'] == routing_key)
        }


_tables: Shared[tuple[int, str], Routes] = Shared({})


def routes_of(url: str) -> Routes:
    """Return the table of this process for the database at `url`."""
    return _tables.of((os.getpid(), url), Routes)


def topic_matches(binding: str, routing_key: str) -> bool:
    """Tell whether the routing key of a message matches a topic binding.

    As in AMQP, `*` stands for one word and `#` for any number of words, including none. The time is bounded: a regular
    expression with many `#`, such as kombu has, may never end.
    """
    wanted = binding.split('.')

    def skip_empty(positions: set[int]) -> set[int]:  # a `#` may stand for no word
        for position in range(len(wanted)):
            if position in positions and wanted[position] == '#':
                positions.add(position + 1)
        return positions

    positions = skip_empty({0})  # in `wanted`, where the next word may match
    for word in routing_key.split('.'):
        matching = [index for index in positions if index < len(wanted) and wanted[index] in ('#', '*', word)]
        positions = skip_empty({index if wanted[index] == '#' else index + 1 for index in matching})
    return len(wanted) in positions


def _temporary_queue(binding: Mapping[str, Any]) -> TemporaryQueue | None:
    if 'temporary' not in binding:
        return None
    return TemporaryQueue(binding['temporary'] if number(binding['temporary']) else None)


is_binding = members(exchange=text, routing_key=text, queue=text, pattern=maybe(text))
_is_fanout = members(type=equal('Exchange'), kind=equal(FANOUT))


def binding_id(exchange: str, routing_key: str, queue: str) -> str:
    """Return the id of a Binding. JSON separates the three names, whatever characters they contain."""
    return f'{exchange_prefix(exchange)}{_quoted(routing_key)},{_quoted(queue)}]'


def exchange_id(exchange: str) -> str:
    """Return the id of an Exchange document, which no Binding can have."""
    return f'{exchange_prefix(exchange)}null,null]'


def exchange_prefix(exchange: str) -> str:
    """Return the prefix of the ids of all documents about an exchange."""
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
    """Return the document that marks a fanout exchange."""
    return {'_id': exchange_id(exchange), 'type': 'Exchange', 'name': exchange, 'kind': FANOUT}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def check_limits(queue: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` if a limit or lifetime in the arguments of a queue is not a number from 0 on."""
    for name in LIMITS:
        if arguments.get(name) is not None and _number(arguments[name]) is None:
            raise ConfigurationError(
                f'queue {queue!r}: the argument {name} must be a number from 0 on, not {arguments[name]!r}'
            )


def limit_in(doc: Mapping[str, Any]) -> Limit:
    """Return the limits in a Queue document; a value that is not a number of at least 0 is ignored."""
    arguments = doc.get('arguments')
    ttl, length, deliveries = (
        _number(arguments.get(name)) if isinstance(arguments, dict) else None for name in LIMITS[:3]
    )
    return Limit(
        None if ttl is None else ttl / 1000,
        None if length is None else int(length),
        None if deliveries is None else int(deliveries),
    )


def _number(value: Any) -> float | None:
    return value if is_number(value) and value >= 0 else None
