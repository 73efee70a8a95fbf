"""Bindings and fanout exchanges: the ids of their documents, and to which queues the bindings of an exchange lead.

A Binding leads from an exchange to a queue. Bindings of topic exchanges have a pattern, those of headers exchanges have
arguments; all other exchanges that have bindings are direct. An Exchange document marks a fanout exchange. The ids of
both begin with `BINDING` and the name of the exchange, so one range read returns everything that is stored about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..schema import Schema
from .ids import BINDING
from .shared_documents import Binding, FanoutExchange
from .types import FANOUT

#: The values of the argument `x-match` of a binding to a headers exchange.
X_MATCH = ('all', 'any', 'all-with-x', 'any-with-x')

#: What is read of a Binding.
_BINDING = Schema.of(Binding, 'exchange', 'routing_key', 'queue', 'pattern', 'arguments')


def is_binding(doc: Any) -> bool:
    """Tell whether a document is a well-formed Binding."""
    return _BINDING.accepts(doc)


def is_fanout(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document marks a fanout exchange."""
    return doc.get('type') == 'Exchange' and doc.get('kind') == FANOUT


def binding_id(exchange: str, routing_key: str, queue: str, arguments: Mapping[str, Any] | None = None) -> str:
    """Return the id of a Binding; `arguments` are those of a headers exchange.

    JSON separates the names, whatever characters they contain.
    """
    more = '' if arguments is None else f',{json.dumps(arguments, ensure_ascii=False, sort_keys=True)}'
    return f'{exchange_prefix(exchange)}{_quoted(routing_key)},{_quoted(queue)}{more}]'


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


def new(
    exchange: str,
    routing_key: str,
    queue: str,
    pattern: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Binding:
    """Return a Binding: of a topic exchange with a `pattern`, of a headers exchange with `arguments`."""
    doc: Binding = {
        '_id': binding_id(exchange, routing_key, queue, arguments),
        'type': 'Binding',
        'exchange': exchange,
        'routing_key': routing_key,
        'pattern': pattern,
        'queue': queue,
    }
    if arguments is not None:
        doc['arguments'] = dict(arguments)
    return doc


def fanout(exchange: str) -> FanoutExchange:
    """Return the document that marks a fanout exchange."""
    return {'_id': exchange_id(exchange), 'type': 'Exchange', 'name': exchange, 'kind': FANOUT}


def destinations(
    found: Iterable[Mapping[str, Any]], routing_key: str, headers: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the queues to which an exchange with these Bindings delivers a message, each with its Binding."""
    return {doc['queue']: doc for doc in found if is_binding(doc) and matches(doc, routing_key, headers)}


def matches(binding: Mapping[str, Any], routing_key: str, headers: Mapping[str, Any]) -> bool:
    """Tell whether a binding matches a message with this routing key and these headers."""
    if 'arguments' in binding:
        return headers_match(binding['arguments'], headers)
    if binding.get('pattern'):
        return topic_matches(binding['routing_key'], routing_key)
    return bool(binding['routing_key'] == routing_key)


def headers_match(arguments: Mapping[str, Any], headers: Mapping[str, Any]) -> bool:
    """Tell whether the headers of a message match the arguments of a binding, as in RabbitMQ.

    With `x-match` *all*, the default, all headers in the arguments must have the same value in the message; with *any*
    one suffices. Headers that begin with `x-` count only with *all-with-x* and *any-with-x*. None matches any value.
    """
    mode = arguments.get('x-match', 'all')
    if mode not in X_MATCH:
        return False
    wanted = {
        name: value
        for name, value in arguments.items()
        if name != 'x-match' and (not name.startswith('x-') or mode.endswith('-with-x'))
    }
    found = (name in headers and (value is None or _same(headers[name], value)) for name, value in wanted.items())
    return any(found) if mode.startswith('any') else all(found)


def _same(one: Any, other: Any) -> bool:
    return bool(one == other and isinstance(one, bool) == isinstance(other, bool))  # for Python, 1 is True


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


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
