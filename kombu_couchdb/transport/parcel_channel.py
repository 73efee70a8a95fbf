"""The channel of a connection to a database of parcels: it stores tasks that a worker moves into the broker's database.

The transport chooses this channel if it finds the design document of parcels when it connects, so a publisher needs
only the URL.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

from ..couchdb.client import Document
from ..documents import parcel
from ..documents.types import Published
from ..errors import ConfigurationError
from ..log import get_logger
from ..queues.store import Store
from .channel import Channel
from .declared import Declared
from .exchanges import Direct, Fanout, Topic, Unrouted, check_exchange_type
from .publish_batch import PublishBatch

__all__ = ['ParcelChannel']

logger = get_logger(__name__)

_ONLY_TASKS = 'it takes tasks, and neither events nor remote control'


class ParcelChannel(Channel):
    """Publishes parcels. All other methods need the broker's database and *raise* `ConfigurationError`."""

    exchange_types: ClassVar[dict[str, type[Any]]] = {Direct.type: Unrouted, Topic.type: Unrouted, Fanout.type: Fanout}

    def _put(
        self, queues: Collection[str], message: Document, *, again: bool = False, batch: PublishBatch | None = None
    ) -> None:
        """Store a message as one parcel, whatever its queues, or add the parcel to a batch."""
        if not isinstance(message['headers'].get('task'), str):
            self._refuse(_ONLY_TASKS)
        info, now = message['properties']['delivery_info'], self.connection.couchdb.clock.now()
        docs = [parcel.new(message, info['exchange'], info['routing_key'], now)]
        self._store_or_add(docs, message, again=again, batch=batch)

    def store_docs(self, docs: Sequence[Published], *, again: bool = False) -> None:
        """Store parcels; *raises* what `Store.publish` raises. `again` says that they may be stored already."""
        _store(self.connection.store, self.connection.store.unpublished(docs) if again else docs)

    def _put_fanout(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(_ONLY_TASKS)

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return a batch for `Producer.batch()` (kombu 5.7)."""
        store = partial(_store, self.connection.store)
        return PublishBatch(self, store, self.connection.broadcaster, max_size)

    # -- Publishers declare queues before they publish, so these methods do not fail. The worker that moves a parcel
    # declares its queue in the broker's database.

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
        """Record the type of the exchange in this process; *raises* `ConfigurationError` if it is not supported."""
        check_exchange_type(exchange, type)
        super(Channel, self).exchange_declare(exchange, type, durable, auto_delete, arguments, nowait)

    def queue_declare(self, queue: str | None = None, passive: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a declaration without a request: the queue may or may not exist."""
        return Declared(str(queue), partial(self._size, str(queue)))

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = '', arguments: Any = None, **kwargs: Any
    ) -> None:
        """Do nothing."""

    # -- Methods that need the broker's database.

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


def _store(store: Store, docs: Sequence[Published]) -> None:
    """Store new parcels; *raises* what `Store.publish` raises."""
    store.publish(docs)
    for doc in docs:
        logger.debug('published message %s as a parcel', doc['_id'])
