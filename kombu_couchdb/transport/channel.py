"""kombu's channel: AMQP's verbs, said in terms of documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import amqp
from amqp.protocol import queue_declare_ok_t
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from ..consumer.delivery import Credit, Delivery, Subscription
from ..consumer.unacked import Unacked
from ..documents.reasons import undecodable
from ..documents.types import DIRECT, FANOUT, TOPIC
from ..documents.validation import check_names, check_value
from ..log import get_logger
from ..queues.routing import topic_pattern
from .declared import Declared
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
        """What the connection holds; *raises* `ServerUnavailable` if it was closed: nothing is held any more."""
        if self.connection is None:
            raise closed()
        found: Unacked = self.connection.unacked
        return found

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str = '', **kwargs: Any
    ) -> str:
        """Begin to deliver messages of `queue` to `callback(message)`, in the thread that drains events.

        Return the consumer tag, a new one without `consumer_tag`. With `no_ack` a message is acknowledged when it is handed
        over. *Raises* `amqp.NotAllowed` if the channel has a consumer of that tag.
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
        self.connection.joined(queue)
        return consumer_tag

    def basic_cancel(self, consumer_tag: str) -> None:
        """Deliver nothing more to a consumer; what it was not handed yet goes back to its queue at once."""
        subscription = self._subscriptions.pop(consumer_tag, None)
        if subscription is None:
            return
        self._consumers.remove(consumer_tag)
        self._active_queues.remove(subscription.queue)
        self.connection.cancel(subscription)
        self.connection.left(subscription.queue)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return the next message of a queue, or None."""
        check_names(queue=queue)
        self.connection.gets.used(queue)
        delivery = self.connection.pull(queue, no_ack)
        if delivery is None or not self.unacked.hand_over(delivery):
            return None
        return self._message(delivery, no_ack)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message."""
        self.qos.ack(delivery_tag, multiple)

    def basic_recover(self, requeue: bool = False) -> None:
        """Let everything unacknowledged on this channel be delivered again."""
        self.qos.restore_unacked()

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set how many messages this channel may hold unacknowledged; 0 is no limit."""
        self.connection.set_credit(self.credit, prefetch_count or 0)

    def _message(self, delivery: Delivery, no_ack: bool) -> Any:
        try:
            message = self.Message(delivery.payload(), channel=self)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            logger.error(
                'message %s was set aside as a dead letter: its body cannot be decoded (%s)', delivery.doc['_id'], exc
            )
            if not delivery.final:
                self.unacked.bury(delivery.tag, undecodable(exc))
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
        type: str = DIRECT,
        durable: bool = False,
        auto_delete: bool = False,
        arguments: Any = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        """Declare an exchange; a passive declaration fails with 404 for one that nobody declared as fanout or bound a queue to.

        That an exchange is a fanout exchange all processes know: it stays one, even where it is declared as another one.
        """
        check_names(exchange=exchange)
        if passive and exchange not in self.state.exchanges and self.connection.topology.has_exchange(exchange):
            return
        super().exchange_declare(exchange, type, durable, auto_delete, arguments, nowait, passive)
        if type == FANOUT and not passive:
            self.connection.topology.declare_fanout(exchange or 'amq.fanout')

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings, for all processes; its queues stay."""
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
        """Declare a queue and return `(name, messages ready, 0)`; a passive declaration fails with 404 if it is not there.

        The messages are counted when that number is looked at. Where the queue is there already, `auto_delete` is as it was
        declared first.
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
            (self.connection.temporary.add if temporary else self.connection.temporary.discard)(queue)
        return Declared(queue, partial(self.connection.store.size, queue))

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        """Return kombu's queue options as AMQP's arguments, in milliseconds where RabbitMQ has them so."""
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = '', arguments: Any = None, **kwargs: Any
    ) -> None:
        """Bind a queue to an exchange, for all processes at once."""
        exchange = exchange or 'amq.direct'
        check_names(exchange=exchange, queue=queue, routing_key=routing_key)
        if self._type(exchange) == FANOUT:
            self.connection.listen(exchange, queue)
            return
        pattern = topic_pattern(routing_key or '') if self._type(exchange) == TOPIC else None
        self.connection.topology.bind(exchange, routing_key or '', pattern, queue)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = '', arguments: Any = None, **kwargs: Any
    ) -> None:
        """Remove a binding."""
        check_names(exchange=exchange, queue=queue, routing_key=routing_key)
        if exchange and self._type(exchange) == FANOUT:
            self.connection.listener.unbind(queue, exchange)
        else:
            self.connection.topology.unbind(exchange or 'amq.direct', routing_key or '', queue)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> int:
        """Delete a queue, its bindings and the messages that wait in it, now or for later; return how many messages that were.

        What a consumer holds is left to it. With `if_empty` nothing is deleted if there is any message, be it ready, planned for
        later, or held; with `if_unused` nothing if anybody consumes the queue.
        """
        if (if_empty and not self.connection.store.is_empty(queue)) or (if_unused and self.connection.used(queue)):
            return 0
        self.connection.temporary.discard(queue)
        self.connection.listener.unbind(queue)
        purged = self._purge(queue)
        self.connection.topology.delete_queue(queue)
        return purged

    def after_reply_message_received(self, queue: str) -> None:
        """Remove a reply queue that the cancelled consumer has not removed already."""
        if queue in self.connection.temporary:
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
        """Delete what waits in a queue, now or for later, and return how many messages that were; what is held is left."""
        check_names(queue=queue)
        return int(self.connection.store.purge(queue))
