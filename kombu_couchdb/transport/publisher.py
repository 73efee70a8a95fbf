"""The publishing half of a channel: messages become WorkItems, one for each queue, or broadcasts."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any

from kombu.transport import virtual

from ..couchdb.client import Document
from ..documents import workitem
from ..documents.body import decoded, encoded
from ..documents.compressed import check_unpacked
from ..documents.idempotency import copy_id, fixed_id, is_fixed
from ..documents.validation import check_names, check_value
from ..errors import ServerUnavailable
from .publish_batch import PublishBatch

__all__ = ['Publisher', 'closed']


class _PublishTag(str):
    """The id of a message that is being published, kept in the properties that kombu passes again when it tries again.

    So a message whose first try was stored, though the answer was lost, is not stored twice, not even if it was done and deleted
    meanwhile. After a call that raised nothing it is a plain string: the next call publishes another message.
    """

    __slots__ = ()


class Publisher(virtual.Channel):
    """What a channel publishes with."""

    def basic_publish(
        self,
        message: Document,
        exchange: str,
        routing_key: str,
        *,
        _publish_batch: PublishBatch | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a message: one document for each queue it goes to, all in one request; *raises* what `validation` does."""
        check_names(exchange=exchange, routing_key=routing_key)
        if self.connection is None:
            # kombu declares queues first, and goes on with the channel it had although that made it reconnect.
            raise closed()
        if not exchange and self.connection.topology.is_broadcast(routing_key):
            exchange = routing_key
        given, again = message['properties'], isinstance(message['properties'].get('delivery_tag'), _PublishTag)
        message = self._prepared(message, exchange, routing_key)
        given['delivery_tag'] = message['properties']['delivery_tag']
        if _publish_batch is not None:
            message = deepcopy(message)  # it is stored later, and the caller may change its own meanwhile
        self._publish(message, exchange, routing_key, _publish_batch, again)
        given['delivery_tag'] = str(given['delivery_tag'])

    def _publish(
        self, message: Document, exchange: str, routing_key: str, _publish_batch: PublishBatch | None, again: bool
    ) -> None:
        found = self._lookup(exchange, routing_key)
        if found is None:
            if _publish_batch is not None:
                _publish_batch.add_broadcast(exchange, routing_key, message)
            else:
                self.connection.broadcaster.send(exchange, routing_key, message)
            return
        docs = self._items(message, exchange, found)
        once = is_fixed() and _publish_batch is None
        if (again or is_fixed()) and not once:
            docs = self.connection.store.unpublished(docs)
        if not docs:
            return
        if _publish_batch is not None:
            _publish_batch.add(docs)
        elif not once:
            self.connection.publish(docs)
        elif refused := self.connection.publish_once(docs):
            raise refused[0].exception(self.connection.couchdb.url)

    def _items(self, message: Document, exchange: str, queues: Collection[str]) -> list[Document]:
        """Return the WorkItems of a message, one for each of its queues."""
        now, tag = self.connection.couchdb.clock.now(), message['properties']['delivery_tag']
        return [
            workitem.new(copy_id(tag, queue) if exchange else tag, queue, message, now)
            for queue in sorted(queues)
            if queue
        ]

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return what gathers messages for `Producer.batch()` (kombu 5.7)."""
        return PublishBatch(self, self.connection.publish, self.connection.broadcaster, max_size)

    def _prepared(self, message: Document, exchange: str, routing_key: str) -> Document:
        """Return the message as it is stored; the caller's own stays as it is, to be published once more."""
        body, encoding = self.encode_body(message['body'], message.get('content-encoding'))
        check_value('the message', {**message, 'body': body})
        check_unpacked(message['body'], (message.get('headers') or {}).get('compression'))
        tag = message['properties'].get('delivery_tag')
        if not isinstance(tag, _PublishTag):
            tag = _PublishTag(fixed_id(message) or workitem.new_id(self.connection.couchdb.clock.now()))
        info = {**message['properties'].get('delivery_info', {}), 'exchange': exchange, 'routing_key': routing_key}
        properties = {**message['properties'], 'delivery_tag': tag, 'body_encoding': encoding, 'delivery_info': info}
        return {**message, 'body': body, 'properties': properties}

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Return the body as it is stored, see `body`."""
        return encoded(body, encoding)

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        """Return the body as it was sent; *raises* `ValueError` if it is spoilt."""
        return decoded(body, encoding)

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str] | None:
        """Return the queues that a message goes to; None if it is to be broadcast."""
        if not exchange:
            return [routing_key or default or self.deadletter_queue]
        kind = self._type(exchange)
        # Where another process has declared the exchange as fanout, that counts, however it was declared here.
        queues = (
            self.connection.topology.lookup(exchange, routing_key, topic=kind == 'topic') if kind != 'fanout' else None
        )
        if queues is None:
            return None
        fallback = default or self.deadletter_queue
        return list(queues) if queues or not fallback else [fallback]

    def _type(self, exchange: str) -> str:
        return str(self.typeof(exchange).type)


def closed() -> ServerUnavailable:
    """Return the error for a channel whose connection was lost."""
    return ServerUnavailable('the channel was closed, for its connection was lost meanwhile')
