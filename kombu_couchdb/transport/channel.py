"""kombu's channel: AMQP's methods as reads and writes of documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import amqp
from amqp.protocol import queue_declare_ok_t
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from ..consumer.credit import Credit, Subscription
from ..consumer.delivery import Delivery
from ..consumer.unacked import Unacked
from ..documents.reasons import undecodable
from ..documents.validation import check_names, check_value
from ..log import get_logger
from .declared import Declared
from .exchanges import Direct, check_exchange_type
from .publisher import Publisher, closed
from .qos import Message, QoS

__all__ = ['Channel']

logger = get_logger(__name__)


class Channel(Publisher):
    """A channel of a connection to CouchDB."""

    QoS = QoS
    Message = Message
    supports_fanout = True
    do_restore = True
    from_transport_options = ('deadletter_queue',)

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.credit = Credit()
        self._subscriptions: dict[str, Subscription] = {}  # by consumer tag

    # -- consume

    @property
    def unacked(self) -> Unacked:
        """The unacknowledged messages of the connection; *raises* `ServerUnavailable` if the connection was closed."""
        if self.connection is None:
            raise closed()
        found: Unacked = self.connection.unacked
        return found

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str = '', **kwargs: Any
    ) -> str:
        """Begin to deliver messages of `queue` to `callback(message)`, in the thread that drains events.

        Return the consumer tag of the new subscription: `consumer_tag`, or a new one. With `no_ack` a message is
        acknowledged when it is delivered. *Raises* `amqp.NotAllowed` if the channel already uses this tag.
        """
        check_names(queue=queue)
        if self.connection is None:
            raise closed()
        consumer_tag = consumer_tag or f'amq.ctag-{uuid()}'
        if consumer_tag in self._subscriptions:
            raise amqp.NotAllowed(
                f'the channel has a consumer {consumer_tag!r:.80} already', (60, 20), 'Channel.basic_consume'
            )

        def receive(delivery: Delivery) -> None:
            message = self._message(delivery, no_ack)
            if message is not None:
                callback(message)

        self._subscriptions[consumer_tag] = Subscription(queue, self.credit)
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)
        self.connection.subscribe(self._subscriptions[consumer_tag], receive)
        self.connection.temporary_queues.subscription_added(queue)
        return consumer_tag

    def basic_cancel(self, consumer_tag: str) -> None:
        """Cancel a subscription; messages that are claimed for it and not delivered are released at once."""
        subscription = self._subscriptions.pop(consumer_tag, None)
        if subscription is None:
            return
        self._consumers.remove(consumer_tag)
        self._active_queues.remove(subscription.queue)
        self.connection.cancel(subscription)
        self.connection.temporary_queues.subscription_cancelled(subscription.queue)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Claim and return the next message of a queue, or None. With `no_ack` it is acknowledged, not claimed."""
        check_names(queue=queue)
        self.connection.lifetimes.prolong(queue)
        delivery = self.connection.pull(queue, no_ack)
        if delivery is None or not self.unacked.deliver(delivery):
            return None
        return self._message(delivery, no_ack)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message."""
        self.qos.ack(delivery_tag, multiple)

    def basic_recover(self, requeue: bool = False) -> None:
        """Release all unacknowledged messages of this channel: they are delivered again."""
        self.qos.restore_unacked()

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set the maximum number of unacknowledged messages of this channel; 0 is no limit."""
        self.connection.set_credit(self.credit, prefetch_count or 0)

    def _message(self, delivery: Delivery, no_ack: bool) -> Any:
        try:
            message = self.Message(delivery.payload(), channel=self)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            logger.error('message %s was made a dead letter: its body cannot be decoded (%s)', delivery.doc['_id'], exc)
            if not delivery.final:
                self.unacked.dead_letter(delivery.tag, undecodable(exc))
            return None
        if no_ack and not delivery.final:
            self.unacked.ack(delivery.tag)
        elif not delivery.final:
            self.qos.append(message, delivery.tag)
        return message

    # -- exchanges and queues

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str = Direct.type,
        durable: bool = False,
        auto_delete: bool = False,
        arguments: Any = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        """Declare an exchange.

        Fanout exchanges are stored, and stay fanout exchanges for all processes, even if a process declares one with
        another type. *Raises* `ConfigurationError` if the type is not supported, and `ChannelError` (404) for a passive
        declaration if no process has declared a fanout exchange of this name or bound a queue to the exchange.
        """
        check_names(exchange=exchange)
        check_exchange_type(exchange, type)
        if passive and exchange not in self.state.exchanges and self.connection.topology.has_exchange(exchange):
            return
        super().exchange_declare(exchange, type, durable, auto_delete, arguments, nowait, passive)
        if not passive:
            exchange = exchange or f'amq.{type or Direct.type}'
            self.typeof(exchange).declare(exchange)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings, for all processes; its queues are kept."""
        check_names(exchange=exchange)
        self.connection.topology.delete_exchange(exchange)
        self.connection.listener.forget(exchange)
        self.state.exchanges.pop(exchange, None)

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        auto_delete: bool = False,
        exclusive: bool = False,
        arguments: Any = None,
        **kwargs: Any,
    ) -> queue_declare_ok_t:
        """Declare a queue and return `(name, ready messages, 0)`.

        The messages are counted when you read the number. If the queue exists, its first declaration decides about
        `auto_delete`. *Raises* `amqp.NotFound` if `passive` is true and the queue does not exist.
        """
        queue = queue or f'amq.gen-{uuid()}'
        check_names(queue=queue)
        check_value(f'an argument of queue {queue!r:.80}', arguments or {})
        if passive:
            if not self._has_queue(queue):
                raise amqp.NotFound(
                    f'no queue {queue!r} in database {self.connection.couchdb.address.database!r}',
                    (50, 10),
                    'Channel.queue_declare',
                )
        else:
            temporary = self.connection.topology.declare_queue(queue, arguments or {}, auto_delete or exclusive)
            self.connection.temporary_queues.declared(queue, temporary=temporary, exclusive=exclusive)
        return Declared(queue, partial(self.connection.store.size, queue))

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        """Return kombu's queue options as AMQP's arguments, in RabbitMQ's units (milliseconds)."""
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = '', arguments: Any = None, **kwargs: Any
    ) -> None:
        """Bind a queue to an exchange.

        Other processes use the binding within 50 ms, or, if they follow the changes feed, when it reports the binding.
        """
        exchange = exchange or 'amq.direct'
        check_names(exchange=exchange, queue=queue, routing_key=routing_key)
        self.typeof(exchange).bind(queue, exchange, routing_key or '', arguments)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = '', arguments: Any = None, **kwargs: Any
    ) -> None:
        """Remove a binding."""
        check_names(exchange=exchange, queue=queue, routing_key=routing_key)
        exchange = exchange or 'amq.direct'
        self.typeof(exchange).unbind(queue, exchange, routing_key or '')

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> int:
        """Delete a queue, its bindings and its ready and scheduled messages; return the number of messages.

        Messages that consumers have claimed are kept. With `if_empty` nothing is deleted if the queue has any message
        (ready, scheduled or claimed), with `if_unused` nothing if any connection has subscribed to the queue.
        """
        check_names(queue=queue)
        if (if_empty and not self.connection.store.is_empty(queue)) or (
            if_unused and self.connection.has_consumer(queue)
        ):
            return 0
        self.connection.temporary_queues.forget(queue)
        self.connection.listener.unbind(queue)
        self.connection.topology.delete_queue(queue)
        return self._purge(queue)

    def after_reply_message_received(self, queue: str) -> None:
        """Delete a reply queue, unless it was deleted when its subscription was cancelled."""
        if queue in self.connection.temporary_queues:
            self.queue_delete(queue)

    def get_table(self, exchange: str) -> list[tuple[str, str | None, str]]:
        """Return the bindings of an exchange as `(routing key, pattern, queue)`."""
        return [(b['routing_key'], b['pattern'], b['queue']) for b in self.connection.topology.bindings(exchange)]

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return bool(self.connection.topology.has_queue(queue))

    def _size(self, queue: str) -> int:
        check_names(queue=queue)
        return int(self.connection.store.size(queue))

    def _purge(self, queue: str) -> int:
        """Delete the ready and scheduled messages of a queue and return their number; claimed messages are kept."""
        check_names(queue=queue)
        return int(self.connection.store.purge(queue))
