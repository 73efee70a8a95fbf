"""A channel for messages that are moved from another database into the broker's database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.transport.channel import Channel

from .check import Refused

__all__ = ['CollectingChannel']


class CollectingChannel(Channel):
    """A channel that publishes nothing. It collects the WorkItems of the published messages in `items`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag, self.items = '', list[WorkItem]()

    def _prepared(self, message: Document, exchange: str, routing_key: str) -> Document:
        prepared = super()._prepared(message, exchange, routing_key)
        prepared['properties']['delivery_tag'] = self.tag
        return prepared

    def basic_publish(self, message: Document, exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Gather the items of a task; the event that the task was sent is not published."""
        if 'task' in message['headers']:
            super().basic_publish(message, exchange, routing_key, **kwargs)

    def send(self, docs: Sequence[Any], message: Document, batch: Any) -> None:
        """Gather the items of a task."""
        if any(doc['type'] == 'Parcel' for doc in docs):
            raise Refused('its task belongs to another region, and parcels are for tasks of this one')
        self.items += docs

    def broadcast(self, message: Document, exchange: str, routing_key: str, batch: Any = None) -> None:
        """Refuse a message that no queue would receive."""
        raise Refused(f'exchange {exchange!r} is for broadcasts')
