"""kombu's channel: AMQP's methods as reads and writes of documents.

A published message becomes WorkItems, one for each queue, or a broadcast. kombu's transport option `deadletter_queue`
names the queue of messages that match no binding. It has nothing to do with the dead letters of this transport.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import inf
from typing import Any, ClassVar

import amqp
from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import OperationalError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.functional import retry_over_time
from kombu.utils.uuid import uuid

from ..consumer.delivery import Credit, Delivery, Subscription
from ..consumer.io_thread import IOThread
from ..consumer.unacked import Unacked
from ..couchdb.call import time_limit
from ..couchdb.client import Document
from ..documents import workitem
from ..documents.body import check_unpacked, decoded, encoded
from ..documents.dead_letter import undecodable
from ..documents.idempotency import attempt, copy_id
from ..documents.task_message import content_problem
from ..documents.types import WorkItem
from ..documents.validation import check_names, check_value
from ..documents.workitem import KEEP_DONE, check_keep_done
from ..errors import RETRIED, IndexNotReady, ServerUnavailable, Unstorable
from ..leases.lease import worker_name
from ..log import get_logger
from ..queues.declarations import Destinations
from ..values import is_number
from .batches import PublishBatch, sink
from .exchanges import EXCHANGE_TYPES, Direct, check_exchange_type
from .qos import Message, QoS
from .transient import TransientMessages, is_transient

logger = get_logger(__name__)

#: How the names of the exchanges of remote control end, see `kombu.pidbox`.
_REMOTE_CONTROL = '.pidbox'


class Channel(virtual.Channel):
    """A channel of a connection to CouchDB."""

    QoS = QoS
    Message = Message
    exchange_types: ClassVar[dict[str, type[Any]]] = EXCHANGE_TYPES  # kombu makes a dictionary of instances of it
    supports_fanout = True
    do_restore = True
    from_transport_options = ('deadletter_queue',)

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.credit = Credit()
        self._subscriptions: dict[str, Subscription] = {}  # by consumer tag
        self._transient: TransientMessages | None = None

    @property
    def _open_connection(self) -> Any:
        """The connection; *raises* `ServerUnavailable` if it was closed.

        If kombu reconnects while it declares queues, it continues with the channel of the lost connection.
        """
        if self.connection is None:
            raise ServerUnavailable('the channel was closed, because its connection was lost')
        return self.connection

    # -- publish

    def basic_publish(self, message: Document, exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Store a message: one document for each of its queues, all in one request; or let a sink have it.

        A process that consumes stores events and replies of remote control in a thread, see `transient`.

        `message` is as `prepare_message` returns it. *Raises* `ConfigurationError` for names that are not valid,
        `Unstorable` for a message that CouchDB cannot hold, and the errors of `Store.publish`. After
        `ServerUnavailable`, call this with the same `message` to retry.
        """
        check_names(exchange=exchange, routing_key=routing_key)
        connection = self._open_connection
        if not exchange and connection.topology.is_broadcast(routing_key):
            exchange = routing_key
        couchdb = connection.couchdb
        now = couchdb.clock.now()
        with attempt(couchdb.address.url, message, exchange, routing_key, now) as named:
            prepared = self._prepared(named, exchange, routing_key)
            docs: Sequence[Any] | None = None
            for publisher in connection.publishers:
                if not publisher.members.isdisjoint({*prepared['properties'], *(prepared['headers'] or ())}):
                    prepared, docs = publisher.documents(prepared, exchange, routing_key)
            if not docs and exchange and self._may_wait(prepared):
                self._store_soon((prepared, exchange, routing_key))
                return
            docs = docs or self._documents(prepared, exchange, routing_key, now)
            if docs is None:
                self.broadcast(prepared, exchange, routing_key)
            else:
                self.send(docs)

    def close(self) -> None:
        """Store the transient messages that wait, if CouchDB responds, and close the channel."""
        if self._transient is not None:
            self._transient.close()
        super().close()

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return a batch for `Producer.batch()` (kombu 5.7)."""
        return PublishBatch(self, max_size)

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Return a body as it is stored, and its `body_encoding`."""
        return encoded(body, encoding)

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        """Return a body as it was published; *raises* `ValueError` if the stored body is malformed."""
        return decoded(body, encoding)

    def send(self, docs: Sequence[Any]) -> None:
        """Let the sink of the context have the documents of messages, or store them; *raises* as `Store.publish` does.

        After `ServerUnavailable`, call it with the same documents again: each is stored once.
        """
        if (take := sink.get()) is not None:
            docs = take(self.connection, docs)
        if docs:
            self.store_docs(docs)

    def store_docs(self, docs: Sequence[Any]) -> None:
        """Store the documents of messages at once; *raises* as `Store.publish` does."""
        for publisher in self.connection.publishers:
            if own := [doc for doc in docs if doc['type'] in publisher.types]:
                publisher.store(own)
                docs = [doc for doc in docs if doc['type'] not in publisher.types]
        for refused in self.connection.store_items(docs) if docs else ():
            raise refused.exception(self.connection.couchdb.address.url)

    def broadcast(self, message: Document, exchange: str, routing_key: str) -> None:
        """Broadcast a message. Listeners ignore the copy that a retry may make.

        kombu publishes commands of remote control with endless retries. They are tried here for `connect_timeout`
        instead, and then *raise* `OperationalError`, as other messages do when kombu stops trying.
        """
        send = self.connection.broadcaster.send
        if not exchange.endswith(_REMOTE_CONTROL):
            send(exchange, routing_key, message)
            return
        command = exchange, routing_key, message, self._reply_binding(message)
        seconds = self.connection.options.connect_timeout
        try:
            with time_limit(2 * seconds):
                retry_over_time(send, RETRIED, command, interval_start=0.2, interval_max=1, timeout=seconds)
        except RETRIED as exc:
            raise OperationalError(str(exc)) from exc

    def _prepared(self, message: Document, exchange: str, routing_key: str) -> Document:
        """Return a copy of the message as it is stored: kombu may publish `message` again, and its caller change it."""
        body, encoding = self.encode_body(message['body'], message.get('content-encoding'))
        prepared: Document = check_value('the message', {**message, 'body': body})
        if reason := content_problem(message):
            raise Unstorable(f'the message would become a dead letter: {reason}')
        if compression := (message.get('headers') or {}).get('compression'):
            check_unpacked(message['body'], compression)
        if (keep := message['properties'].get(KEEP_DONE)) is not None:
            check_keep_done(keep)
        properties = prepared['properties']
        properties['body_encoding'] = encoding
        properties['delivery_info'] = {
            **properties.get('delivery_info', {}),
            'exchange': exchange,
            'routing_key': routing_key,
        }
        return prepared

    def _documents(self, message: Document, exchange: str, routing_key: str, now: float) -> Sequence[WorkItem] | None:
        """Return the WorkItems of a message, one for each of its queues, or None if it is broadcast."""
        # With AMQP's default exchange, the routing key is the name of the queue.
        named: Destinations = {routing_key or self.deadletter_queue: {}}
        queues = self._route(exchange, routing_key, message['headers'] or {}) if exchange else named
        if queues is None:
            return None
        if worker_name() is None:  # what the tasks of a worker send is accepted: nobody could send it again
            self.connection.topology.check_accepts(queues)
        return self._items(queues, message, now)

    def _route(self, exchange: str, routing_key: str, headers: Mapping[str, Any]) -> Destinations | None:
        """Return the queues of a message for a named exchange, or None if it is broadcast.

        A message that matches no binding goes to kombu's `deadletter_queue`, or else nowhere.
        """
        default, topology = self.deadletter_queue, self.connection.topology
        queues: Destinations | None = self.typeof(exchange).lookup(topology, exchange, routing_key, headers)
        return {default: {}} if default and queues == {} else queues

    def _items(self, queues: Destinations, message: Document, now: float) -> list[WorkItem]:
        properties = message['properties']
        self.connection.broadcaster.mark(properties, now)
        tag, exchange = properties['delivery_tag'], properties['delivery_info']['exchange']
        items = []
        for queue in sorted(filter(None, queues)):
            item = workitem.new(copy_id(tag, queue) if exchange else tag, queue, message, now)
            if 'temporary' in queues[queue]:
                item['temporary'] = True
                if is_number(ttl := queues[queue]['temporary']):
                    item['expires'] = min(now + ttl, item.get('expires', inf))
            items.append(item)
        return items

    def _may_wait(self, message: Document) -> bool:
        """Tell whether a thread stores a message: a program that only publishes may end before that."""
        return is_transient(message) and (self._transient is not None or IOThread.runs_here())

    def _store_soon(self, routed: tuple[Document, str, str]) -> None:
        if self._transient is None:
            self._transient = TransientMessages(self._store_transient)
        self._transient.add(routed)

    def _store_transient(self, messages: Sequence[tuple[Document, str, str]]) -> None:
        docs: list[WorkItem] = []
        for message, exchange, routing_key in messages:
            found = self._documents(message, exchange, routing_key, self.connection.couchdb.clock.now())
            if found is None:
                self.broadcast(message, exchange, routing_key)
            else:
                docs += found
        self.send(docs)

    def _reply_binding(self, message: Document) -> Mapping[str, Any] | None:
        """Return the binding of the queue for the replies to a command of remote control, if it wants replies."""
        try:
            reply_to = json.loads(message['body'])['reply_to']
            bound = self.connection.topology.known.match(reply_to['exchange'], reply_to['routing_key'], {})
        except (ValueError, TypeError, LookupError):  # no replies, or not JSON: receivers read the binding
            return None
        binding: Mapping[str, Any] = next(iter((bound or {}).values()), {})
        return {name: binding[name] for name in binding if name != '_rev'} if 'temporary' in binding else None

    # -- consume

    @property
    def unacked(self) -> Unacked:
        """The unacknowledged messages of the connection; *raises* `ServerUnavailable` if the connection was closed."""
        found: Unacked = self._open_connection.unacked
        return found

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str = '', **kwargs: Any
    ) -> str:
        """Begin to deliver messages of `queue` to `callback(message)`, in the thread that drains events.

        Return the consumer tag of the new subscription: `consumer_tag`, or a new one. With `no_ack` a message is
        acknowledged when it is delivered. *Raises* `amqp.NotAllowed` if the channel already uses this tag.
        """
        check_names(queue=queue)
        connection = self._open_connection
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
        connection.subscribe(self._subscriptions[consumer_tag], receive)
        connection.temporary_queues.subscription_added(queue)
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
            self.qos.append(message, delivery)
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
            self.connection.topology.declare_queue(queue, arguments or {}, auto_delete or exclusive)
            if exclusive:
                self.connection.temporary_queues.exclusive.add(queue)
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
        self.typeof(exchange).unbind(queue, exchange, routing_key or '', arguments)

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
        self.connection.listener.unbind(queue)
        self.connection.topology.delete_queue(queue)
        return self._purge(queue)

    def after_reply_message_received(self, queue: str) -> None:
        """Delete a reply queue, unless it was deleted when its subscription was cancelled."""
        if queue in self.connection.temporary_queues:
            self.queue_delete(queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return bool(self.connection.topology.has_queue(queue))

    def _size(self, queue: str) -> int:
        check_names(queue=queue)
        return int(self.connection.store.size(queue))

    def _purge(self, queue: str) -> int:
        """Delete the ready and scheduled messages of a queue and return their number; claimed messages are kept."""
        check_names(queue=queue)
        return sum(self.connection.store.purging(queue))


class Declared(queue_declare_ok_t):
    """`(queue, message_count, consumer_count)`; the messages are counted when `message_count` is first read.

    Publishers declare their queues and do not read it, and counting takes up to two requests. If the result is unpacked
    while CouchDB builds the index, the number is 0.
    """

    def __new__(cls, queue: str, count: Callable[[], int]) -> Declared:
        """Return the result for `queue`; `count()` returns the number of ready messages."""
        declared: Declared = super().__new__(cls, queue, 0, 0)
        declared._count = count
        return declared

    @cached_property
    def message_count(self) -> int:
        """The number of ready messages; *raises* `CouchDBError`."""
        return int(self._count())

    def __iter__(self) -> Iterator[Any]:
        # kombu unpacks the result for each reply queue, and does not use the number. It must not have to connect again.
        try:
            count = self.message_count
        except IndexNotReady:
            count = 0
        return iter((self.queue, count, 0))

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if index == 0 else tuple(self)[index]
