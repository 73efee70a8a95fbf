"""The channel of a connection to a database of parcels: it publishes tasks, which a worker moves into the broker's database.

The transport chooses it by the design document that it finds when it connects, so that a publisher needs no setting but the URL.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from ..couchdb.client import Document
from ..documents import parcel
from ..documents.types import DIRECT, FANOUT
from ..errors import ConfigurationError
from .channel import Channel
from .declared import Declared
from .publish_batch import PublishBatch

__all__ = ['ParcelChannel']


class ParcelChannel(Channel):
    """Publishes parcels. Everything else needs the broker's database, and *raises* `ConfigurationError`."""

    def _publish(
        self, message: Document, exchange: str, routing_key: str, _publish_batch: PublishBatch | None, again: bool
    ) -> None:
        if not isinstance(message['headers'].get('task'), str) or self._type(exchange) == FANOUT:
            self._refuse('it takes tasks, and neither events nor remote control')
        docs = [parcel.new(message, exchange, routing_key, self.connection.couchdb.clock.now())]
        if again:
            docs = self.connection.store.unpublished(docs)
        if _publish_batch is not None:
            _publish_batch.add(docs)
        else:
            self.connection.store.publish(docs)

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return what gathers messages for `Producer.batch()` (kombu 5.7)."""
        return PublishBatch(self, self.connection.store.publish, self.connection.broadcaster, max_size)

    # -- who publishes declares queues first: they are in the broker's database, and are declared there when the parcel is moved

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
        """Remember the exchange's type in this process."""
        super(Channel, self).exchange_declare(exchange, type, durable, auto_delete, arguments, nowait)

    def queue_declare(self, queue: str | None = None, passive: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Return as if the queue were there."""
        return Declared(str(queue), partial(self._size, str(queue)))

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = '', arguments: Any = None, **kwargs: Any
    ) -> None:
        """Do nothing."""

    # -- what needs the broker's database

    def basic_consume(self, queue: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ConfigurationError`."""
        self._refuse('workers and monitors need the URL of the database of the broker')

    def basic_get(self, queue: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ConfigurationError`."""
        self._refuse('messages are in the database of the broker')

    def queue_delete(self, queue: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ConfigurationError`."""
        self._refuse('queues are in the database of the broker')

    def queue_unbind(self, queue: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ConfigurationError`."""
        self._refuse('bindings are in the database of the broker')

    def exchange_delete(self, exchange: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ConfigurationError`."""
        self._refuse('exchanges are in the database of the broker')

    def _has_queue(self, queue: str, **kwargs: Any) -> NoReturn:
        self._refuse('queues are in the database of the broker')

    def _size(self, queue: str) -> NoReturn:
        self._refuse('messages are counted in the database of the broker')

    _purge = _size

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigurationError(f'{self.connection.couchdb.url} is a database of parcels: {reason}')
