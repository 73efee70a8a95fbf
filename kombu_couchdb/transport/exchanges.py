"""Exchange types: which queues a message goes to, and how a queue is bound.

A class makes the Bindings (`binding`, with the pattern of kombu's hook `prepare_bind`) and looks them up. The channel
stores the copies of a message, all in one request. To add an exchange type, write one class and add it to
`EXCHANGE_TYPES`; `documents.bindings.destinations` says to which queues its bindings lead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.transport.virtual import exchange as virtual

from ..documents import bindings
from ..documents.shared_documents import Binding
from ..documents.validation import check_value
from ..errors import ConfigurationError
from ..queues.declarations import Destinations
from ..queues.topology import Topology


class _Routed(virtual.ExchangeType):
    """An exchange that delivers a copy to each queue with a matching binding. Only its bindings are stored."""

    #: Whether the bindings are read once more before a message goes to no queue.
    rechecks = True

    def declare(self, exchange: str) -> None:
        """Do nothing: other processes know the exchange by its bindings."""

    def bind(self, queue: str, exchange: str, routing_key: str, arguments: Any = None) -> None:
        """Store a binding, for all processes."""
        self.channel.connection.topology.bind(self.binding(queue, exchange, routing_key, arguments))

    def unbind(self, queue: str, exchange: str, routing_key: str, arguments: Any = None) -> None:
        """Delete a binding, for all processes."""
        self.channel.connection.topology.unbind(self.binding(queue, exchange, routing_key, arguments))

    def binding(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> Binding:
        """Return a Binding; kombu says which pattern it has."""
        _, pattern, _ = self.prepare_bind(queue, exchange, routing_key, arguments)
        return bindings.new(exchange, routing_key, queue, pattern)

    def lookup(
        self, topology: Topology, exchange: str, routing_key: str, headers: Mapping[str, Any]
    ) -> Destinations | None:
        """Return the queues with a matching binding, or None if a process has declared a fanout exchange of this name.

        The bindings decide how a message matches, not the class: a publisher may use an exchange that it has not
        declared, and kombu treats it as a direct one.
        """
        return topology.lookup(exchange, routing_key, headers, recheck=self.rechecks)


class Direct(_Routed, virtual.DirectExchange):
    """An exchange whose bindings match one routing key each."""


class Topic(_Routed, virtual.TopicExchange):
    """An exchange whose bindings match routing keys by patterns."""

    #: Celery publishes events to topic exchanges all the time, and usually no queue is bound to them.
    rechecks = False


class Headers(_Routed, virtual.ExchangeType):
    """An exchange whose bindings match the headers of messages; their routing keys do not count."""

    type = 'headers'

    def binding(self, queue: str, exchange: str, routing_key: str, arguments: Any) -> Binding:
        """Return a Binding with arguments; *raises* `ConfigurationError` for an unknown `x-match`."""
        arguments = check_value('an argument of a binding', arguments or {})
        if (mode := arguments.get('x-match', 'all')) not in bindings.X_MATCH:
            raise ConfigurationError(
                f'queue {queue!r:.80} is bound to exchange {exchange!r:.80} with x-match {mode!r:.80}; '
                f'use one of {", ".join(bindings.X_MATCH)}'
            )
        return bindings.new(exchange, routing_key, queue, arguments=arguments)


class Fanout(virtual.FanoutExchange):
    """An exchange that broadcasts: each queue that is bound to it when a message is published gets the message."""

    def declare(self, exchange: str) -> None:
        """Store the exchange: a publisher that has not declared it must know that it broadcasts."""
        self.channel.connection.topology.declare_fanout(exchange)

    def bind(self, queue: str, exchange: str, routing_key: str, arguments: Any = None) -> None:
        """Let a queue of this connection receive broadcasts from now on."""
        self.channel.connection.listen(exchange, queue)

    def unbind(self, queue: str, exchange: str, routing_key: str, arguments: Any = None) -> None:
        """Let a queue of this connection receive no more broadcasts."""
        self.channel.connection.listener.unbind(queue, exchange)

    def lookup(self, topology: Topology, exchange: str, routing_key: str, headers: Mapping[str, Any]) -> None:
        """Return None: the message is broadcast, and the publisher does not know which queues receive it."""


#: The supported exchange types, by the names that kombu has for them.
EXCHANGE_TYPES: dict[str, type[Any]] = {kind.type: kind for kind in (Direct, Topic, Headers, Fanout)}


def check_exchange_type(exchange: str | None, name: str | None) -> None:
    """Raise `ConfigurationError` if an exchange type is not supported. None stands for kombu's default, direct."""
    if name and name not in EXCHANGE_TYPES:
        raise ConfigurationError(
            f'exchange {exchange!r:.80} has the type {name!r:.80}, which is not supported; '
            f'use {", ".join(list(EXCHANGE_TYPES)[:-1])} or {list(EXCHANGE_TYPES)[-1]}'
        )
