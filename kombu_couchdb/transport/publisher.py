"""The publishing half of a channel: messages become WorkItems, one for each queue, or broadcasts.

A message passes `basic_publish`, `deliver` of its exchange's type, `_put`, and `Store.publish`. All but the last are
hooks of kombu.

kombu's transport option `deadletter_queue` names the queue of messages that match no binding. It has nothing to do with
the dead letters of this transport.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any, ClassVar, cast

from kombu.exceptions import OperationalError
from kombu.transport import virtual
from kombu.utils.functional import retry_over_time

from ..consumer.io_thread import Consumer
from ..couchdb.bounds import time_limit
from ..couchdb.client import Document
from ..documents import workitem
from ..documents.body import decoded, encoded
from ..documents.compressed import check_unpacked
from ..documents.done import KEEP_DONE, check_seconds
from ..documents.idempotency import copy_id, fixed_id, is_fixed
from ..documents.task_message import content_flaw
from ..documents.types import Published, WorkItem
from ..documents.validation import check_names, check_value
from ..errors import RETRIED, ServerUnavailable, Unstorable
from ..queues.routing import TemporaryQueue
from .collector import Taker, collector, taker
from .exchanges import EXCHANGE_TYPES
from .publish_batch import PublishBatch
from .republished import Republished
from .transient import TransientMessages, is_transient

__all__ = ['Publisher', 'closed']


#: How the names of the exchanges of remote control end, see `kombu.pidbox`.
_REMOTE_CONTROL = '.pidbox'


class _PublishTag(str):
    """The id of a message while it is being published.

    It is kept in the properties of the message, which kombu passes again when it retries. So a message is not stored
    twice if the first attempt was stored but its response was lost, not even if the message was acknowledged and
    deleted meanwhile. After a successful call the property is a plain string: the next call with these properties
    publishes another message.
    """

    __slots__ = ()


class Publisher(virtual.Channel):
    """Publishes messages to queues and exchanges."""

    exchange_types: ClassVar[dict[str, type[Any]]] = EXCHANGE_TYPES  # kombu makes a dictionary of instances of it
    _transient: TransientMessages | None = None

    def basic_publish(
        self,
        message: Document,
        exchange: str,
        routing_key: str,
        *,
        _publish_batch: PublishBatch | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a message: one document for each of its queues, all in one request; or add it to a batch.

        A process that consumes stores events and replies of remote control in a thread, see `transient`.

        `message` is as `prepare_message` returns it. *Raises* `ConfigurationError` for names that are not valid,
        `Unstorable` for a message that CouchDB cannot hold, and the errors of `Store.publish`. After
        `ServerUnavailable`, call this with the same `message` to retry.
        """
        check_names(exchange=exchange, routing_key=routing_key)
        if self.connection is None:
            # If kombu reconnects while it declares queues, it continues with the channel of the lost connection.
            raise closed()
        if not exchange and self.connection.topology.is_broadcast(routing_key):
            exchange = routing_key
        given, properties = message, message['properties']
        failed = Republished.of(self.connection.couchdb.address.url)
        if failed_id := failed.take(message, exchange, routing_key):
            properties['delivery_tag'] = _PublishTag(failed_id)
        again = isinstance(properties.get('delivery_tag'), _PublishTag)
        message = self._prepared(message, exchange, routing_key)
        properties['delivery_tag'] = message['properties']['delivery_tag']
        if _publish_batch is not None or collector() is not None:
            message = _copied(message)  # the caller may change the message before the batch is stored
        message, parcels = self.connection.regions.parcels_of(message, exchange, routing_key)
        try:
            if parcels:
                self._store_or_add(parcels, message, again=again, batch=_publish_batch)
            elif exchange and _publish_batch is None and self._may_wait(message):
                self._store_soon((_copied(message), exchange, routing_key))
            elif exchange:
                self.typeof(exchange).deliver(message, exchange, routing_key, again=again, batch=_publish_batch)
            else:  # AMQP's default exchange: the routing key is the name of the queue
                self._put([routing_key or self.deadletter_queue], message, again=again, batch=_publish_batch)
        except ServerUnavailable:
            failed.note(given, exchange, routing_key, properties['delivery_tag'])
            raise
        properties['delivery_tag'] = str(properties['delivery_tag'])

    def close(self) -> None:
        """Store the transient messages that wait, if CouchDB responds, and close the channel."""
        if self._transient is not None:
            self._transient.close()
        super().close()

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return a batch for `Producer.batch()` (kombu 5.7)."""
        return PublishBatch(self, self._store_batch, self.connection.broadcaster, max_size)

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Return a body as it is stored, and its `body_encoding`."""
        return encoded(body, encoding)

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        """Return a body as it was published; *raises* `ValueError` if the stored body is malformed."""
        return decoded(body, encoding)

    def _prepared(self, message: Document, exchange: str, routing_key: str) -> Document:
        """Return the message as it is stored, with its id; `message` itself is not changed, so that kombu can retry."""
        body, encoding = self.encode_body(message['body'], message.get('content-encoding'))
        check_value('the message', {**message, 'body': body})
        if reason := content_flaw(message):
            raise Unstorable(f'the message would become a dead letter: {reason}')
        if compression := (message.get('headers') or {}).get('compression'):
            check_unpacked(message['body'], compression)
        if (keep := message['properties'].get(KEEP_DONE)) is not None:
            check_seconds(keep)
        tag = message['properties'].get('delivery_tag')
        if not isinstance(tag, _PublishTag):
            fixed = fixed_id(message) if is_fixed() else None
            tag = _PublishTag(fixed or workitem.new_id(self.connection.couchdb.clock.now()))
        info = {**message['properties'].get('delivery_info', {}), 'exchange': exchange, 'routing_key': routing_key}
        properties = {**message['properties'], 'delivery_tag': tag, 'body_encoding': encoding, 'delivery_info': info}
        return {**message, 'body': body, 'properties': properties}

    def _may_wait(self, message: Document) -> bool:
        """Tell whether a thread stores a message: a program that only publishes may end before that."""
        return is_transient(message) and (self._transient is not None or Consumer.runs_here())

    def _store_soon(self, routed: tuple[Document, str, str]) -> None:
        if self._transient is None:
            self._transient = TransientMessages(self._store_transient)
        self._transient.add(routed)

    def _store_transient(self, messages: Sequence[tuple[Document, str, str]]) -> None:
        docs: list[WorkItem] = []
        for message, exchange, routing_key in messages:
            queues = self._lookup(exchange, routing_key)
            if queues is None:
                self._put_fanout(exchange, message, routing_key)
            else:
                docs += self._items(queues, message)
        self.store_docs(docs)

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> Collection[str] | None:
        """Return the queues of a message for a named exchange, or None if it is broadcast.

        A message that matches no binding goes to `default`, or to kombu's `deadletter_queue`, or else nowhere.
        """
        default = default or self.deadletter_queue
        queues = self.typeof(exchange).lookup(self.connection.topology, exchange, routing_key, default)
        return [default] if default and queues is not None and not queues else queues

    def _put(
        self, queues: Collection[str], message: Document, *, again: bool = False, batch: PublishBatch | None = None
    ) -> None:
        """Store a copy of a message for each queue, or add the copies to a batch. `again` says that this is a retry."""
        self._store_or_add(self._items(queues, message), message, again=again, batch=batch)

    def _store_or_add(
        self, docs: Sequence[Published], message: Document, *, again: bool, batch: PublishBatch | None
    ) -> None:
        """Store the documents of a message, or add them to a batch or to the messages that are collected."""
        if batch is not None:
            batch.add(self.connection.store.unpublished(docs) if again or is_fixed() else docs)
        elif not again and (collecting := collector()) is not None and not any('key' in doc for doc in docs):
            collecting.add(docs, len(message['body']))
        else:
            self.store_docs(docs, again=again)

    def store_docs(self, docs: Sequence[Any], *, again: bool = False) -> None:
        """Store the documents of messages; *raises* the errors of `Store.publish`.

        `again` says that an earlier attempt may have stored them: then none is stored twice.
        """
        if docs := self._without_parcels(docs, again=again):
            self._store_items(docs, again=again)

    def _store_items(self, docs: Sequence[Any], *, again: bool) -> None:
        once = is_fixed()
        if again and not once:
            docs = self.connection.store.unpublished(docs)
        elif not once and (take := taker()) is not None:
            docs = self._untaken(docs, take)
        if docs and (refused := self.connection.store_items(docs, once=once)):
            raise refused[0].exception(self.connection.couchdb.url)

    def _store_batch(self, docs: Sequence[Any]) -> None:
        if items := self._without_parcels(docs, again=False):
            self.connection.store_items(items)

    def _without_parcels(self, docs: Sequence[Any], *, again: bool) -> Sequence[Any]:
        """Store the parcels for other regions, and return the other documents."""
        if not (parcels := [doc for doc in docs if doc['type'] == 'Parcel']):
            return docs
        self.connection.regions.store(parcels, again=again)
        return [doc for doc in docs if doc['type'] != 'Parcel']

    def _untaken(self, docs: Sequence[Any], take: Taker) -> Sequence[Any]:
        """Offer messages to a taker, and return those that this channel must store.

        It stores unique jobs and messages for queues with a length limit itself: they need more than one write.
        """
        limits = self.connection.topology.limits
        simple = [doc for doc in docs if 'key' not in doc and limits.of(doc['queue']).length is None]
        if len(simple) < len(docs):
            return docs
        return take(self.connection.address, simple)

    def _put_fanout(
        self,
        exchange: str,
        message: Document,
        routing_key: str,
        *,
        again: bool = False,
        batch: PublishBatch | None = None,
    ) -> None:
        """Broadcast a message, or add it to a batch. Listeners ignore the copy that a retry may make.

        kombu publishes commands of remote control with endless retries. They are tried here for `connect_timeout`
        instead, and then *raise* `OperationalError`, as other messages do when kombu stops trying.
        """
        send = self.connection.broadcaster.send
        if batch is not None:
            batch.add_broadcast(exchange, routing_key, message)
        elif not exchange.endswith(_REMOTE_CONTROL):
            send(exchange, routing_key, message)
        else:
            broadcast = exchange, routing_key, message, self._reply_binding(message)
            seconds = self.connection.options.connect_timeout
            try:
                with time_limit(2 * seconds):
                    retry_over_time(send, RETRIED, broadcast, interval_start=0.2, interval_max=1, timeout=seconds)
            except RETRIED as exc:
                raise OperationalError(str(exc)) from exc

    def _reply_binding(self, message: Document) -> Mapping[str, Any] | None:
        """Return the binding of the queue for the replies to a command of remote control, if it wants replies."""
        try:
            reply_to = json.loads(message['body'])['reply_to']
            binding = self.connection.topology.routes.reply_binding(reply_to['exchange'], reply_to['routing_key'])
        except (ValueError, TypeError, LookupError):  # no replies, or not JSON: receivers read the binding
            return None
        return cast('Mapping[str, Any] | None', binding)

    def _items(self, queues: Collection[str], message: Document) -> list[WorkItem]:
        """Return the WorkItems of a message, one for each queue."""
        now, properties = self.connection.couchdb.clock.now(), message['properties']
        tag, exchange = properties['delivery_tag'], properties['delivery_info']['exchange']
        items = []
        for queue in sorted(filter(None, queues)):
            item = workitem.new(copy_id(tag, queue) if exchange else tag, queue, message, now)
            if isinstance(queue, TemporaryQueue):
                item['temporary'] = True
                if queue.ttl is not None:
                    item['expires'] = min(now + queue.ttl, item.get('expires', inf))
            items.append(item)
        return items


def _copied(value: Any) -> Any:
    """Return a copy of a message; faster than `deepcopy`."""
    if isinstance(value, dict):
        return {key: _copied(member) for key, member in value.items()}
    return [_copied(element) for element in value] if isinstance(value, (list, tuple)) else value


def closed() -> ServerUnavailable:
    """Return the error for a channel whose connection was lost."""
    return ServerUnavailable('the channel was closed, because its connection was lost')
