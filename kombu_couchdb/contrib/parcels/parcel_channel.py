"""The channel of a connection to a database of parcels: it stores tasks that a worker moves into the broker's database.

The transport chooses this channel if it finds the design document of parcels when it connects, so a publisher needs
only the URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from ...couchdb.client import Document
from ...errors import ConfigurationError
from ...transport.channel import Channel, Declared
from ...transport.exchanges import Direct, Fanout, check_exchange_type
from . import parcel

__all__ = ['ParcelChannel']


def _refusal(reason: str) -> Any:
    """Return a method that raises `ConfigurationError`."""

    def refuse(self: ParcelChannel, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ConfigurationError`."""
        raise ConfigurationError(f'{self.connection.couchdb.url} is a database of parcels: {reason}')

    return refuse


class ParcelChannel(Channel):
    """Publishes parcels. All other methods need the broker's database and *raise* `ConfigurationError`."""

    broadcast = _refuse_message = _refusal('it takes tasks, and neither events nor remote control')

    def _documents(self, message: Document, exchange: str, routing_key: str, now: float) -> Sequence[Any] | None:
        """Return one parcel: the worker that moves it looks up the queues of its message."""
        if not isinstance(message['headers'].get('task'), str):
            self._refuse_message()
        if exchange and isinstance(self.typeof(exchange), Fanout):
            return None
        return [parcel.new(message, exchange, routing_key, now)]

    def store_docs(self, docs: Sequence[Any]) -> None:
        """Store parcels; *raises* what `Store.publish` raises."""
        self.connection.store.publish(docs)

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

    basic_consume = _refusal('workers and monitors need the URL of the database of the broker')
    basic_get = _refusal('messages are in the database of the broker')
    queue_delete = _has_queue = _refusal('queues are in the database of the broker')
    queue_unbind = _refusal('bindings are in the database of the broker')
    exchange_delete = _refusal('exchanges are in the database of the broker')
    _size = _purge = _refusal('messages are counted in the database of the broker')
