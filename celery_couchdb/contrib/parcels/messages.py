"""The messages of parcels: published in the broker's database under ids that are derived from those of the parcels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from kombu.serialization import prepare_accept_content

from kombu_couchdb.consumer import bodies
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents.body import body_stub, decoded, loaded
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.documents.unique_merge import once_id
from kombu_couchdb.errors import ConfigurationError, CouchDBError, Unstorable
from kombu_couchdb.transport.channel import Channel
from kombu_couchdb.unique import MOVED, collect_outcomes

from .parcel_checks import ParcelRefused

#: The maximum size of the attached bodies, in bytes, that are in memory together (but one body may be larger).
_BATCH_BODY_BYTES = 16_000_000


class Unroutable(ParcelRefused):
    """No queue receives the message of a parcel: none is bound yet."""


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

    def send(self, docs: Sequence[Any]) -> None:
        """Gather the items of a task."""
        if any(doc['type'] == 'Parcel' for doc in docs):
            raise ParcelRefused('its task belongs to another region, and parcels are for tasks of this one')
        self.items += docs

    def broadcast(self, message: Document, exchange: str, routing_key: str) -> None:
        """Refuse a message that no queue would receive."""
        raise ParcelRefused(f'exchange {exchange!r} is for broadcasts')


def in_parts(docs: Sequence[Document]) -> Iterator[list[Document]]:
    """Yield parcels in parts whose attached bodies can be in memory together."""
    part, size = list[Document](), 0
    for doc in docs:
        length = attachment['length'] if (attachment := body_stub(doc)) else 0
        if part and size + length > _BATCH_BODY_BYTES:
            yield part
            part, size = [], 0
        part, size = [*part, doc], size + length
    if part:
        yield part


class ParcelMessages:
    """Makes and stores the WorkItems of parcels. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, transport: Any) -> None:
        """Use the connected `transport` of the broker."""
        self._transport, self.channel = transport, CollectingChannel(transport)
        transport.channels.append(self.channel)
        #: Of the parcels that were stored last, those whose messages were merged into unique jobs, and the ids of the
        #: tasks that run instead.
        self.merged: dict[str, str | None] = {}

    def make(
        self, source: str, docs: Sequence[Document], publish: Callable[[Document], None]
    ) -> tuple[dict[str, list[WorkItem]], dict[str, ParcelRefused]]:
        """Return the items of these parcels, and for the others why they are refused; both by the ids of the parcels.

        `publish(doc)` publishes the message of a parcel to `channel`.
        """
        items, refused = dict[str, list[WorkItem]](), dict[str, ParcelRefused]()
        for doc in docs:
            self.channel.tag, self.channel.items = parcel.moved_id(source, doc['_id']), []
            try:
                publish(doc)
                if not self.channel.items:
                    exchange, key = doc.get('exchange'), doc.get('routing_key')
                    raise Unroutable(f'exchange {exchange!r} has no queue for routing key {key!r}')
                items[doc['_id']] = self.channel.items
            except ParcelRefused as exc:
                refused[doc['_id']] = exc
            except (Unstorable, ConfigurationError) as exc:
                refused[doc['_id']] = ParcelRefused(str(exc))
            except CouchDBError:
                raise
            except Exception as exc:  # a publisher can cause any error; the other parcels must be moved
                refused[doc['_id']] = ParcelRefused(f'it cannot be published: {exc!r:.300}')
        return items, refused

    def store(self, items: Mapping[str, Collection[WorkItem]]) -> dict[str, str]:
        """Store items that were never stored, and return why CouchDB refuses those of some parcels."""
        parcel_of = {once_id(item): doc_id for doc_id, its_items in items.items() for item in its_items}
        new = [item for its_items in items.values() for item in its_items]
        with collect_outcomes() as outcomes:
            refused = {result.id: result.reason for result in self._transport.store_items(new)}
        jobs = [item for item in new if 'key' in item and once_id(item) not in refused]
        self.merged = {
            parcel_of[once_id(item)]: outcome.task_id
            for item, outcome in zip(jobs, outcomes, strict=True)
            if outcome.what == MOVED
        }
        return {parcel_of[name]: f'CouchDB refuses its message: {reason}' for name, reason in refused.items()}

    def publish(self, message: Document, doc: Mapping[str, Any]) -> None:
        """Publish a message to `channel`, where its parcel says."""
        self.channel.basic_publish(message, doc.get('exchange') or '', doc.get('routing_key') or '')


def attached_body(client: Client, doc: Document) -> bytes | None:
    """Return the attached body of a document; None if it has no attachment. *Raises* `ParcelRefused`."""
    if (attachment := body_stub(doc)) is None:
        return None
    if attachment['length'] > parcel.MAX_BODY_BYTES:
        raise ParcelRefused(f'its body is larger than {parcel.MAX_BODY_BYTES:,} bytes')
    [body] = bodies.read(client, [doc])
    if body.content is None:
        raise ParcelRefused(body.reason)
    return body.content


def embedded_in(message: Mapping[str, Any], body: bytes | None, content: Collection[str]) -> dict[str, Any]:
    """Return the callbacks, errbacks, chain and chord in the body of a task; `body` is the attached body, or None.

    `content` are the accepted content types. *Raises* errors of many kinds if it cannot be decoded.
    """
    text = decoded(message['body'] if body is None else body, message['properties'].get('body_encoding'))
    found: dict[str, Any] = loaded(message, text, prepare_accept_content(content))[2]
    return found
