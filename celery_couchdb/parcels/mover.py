"""Moves parcels: of all workers that have the option `parcels` one, the leader, does so.

A parcel is published under an id that is made of its own, by `Store.publish_once`, and deleted afterwards. So it is moved once,
whatever is killed or paused in between. What is not accepted stays in its document, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kombu import Producer

from kombu_couchdb import design
from kombu_couchdb.consumer import bodies
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.changes import ContinuousFeed
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.couchdb.shapes import exactly, members, number, revision, text
from kombu_couchdb.design.rows import ParcelRow
from kombu_couchdb.documents import parcel
from kombu_couchdb.documents.body import stub
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import ConfigurationError, Conflict, CouchDBError, NestedTooDeeply, NotFound, Unstorable
from kombu_couchdb.leases.leader import Leader
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport.channel import Channel

from .accept import Accept
from .check import Refused, call_in, checked

__all__ = ['Mover']

logger = get_logger(__name__)

#: Parcels read from the view at a time, and how many characters of them are moved together.
_PAGE, _TOGETHER = 100, 1_000_000

#: What the feed tells of; other documents are looked at when there is something else to do, and at first.
_SELECTOR = {'status': {'$exists': False}, '$or': [{'type': 'Parcel'}, {'task': {'$exists': True}}]}

#: The most bytes of one body that are read.
_LARGEST = 64_000_000

_ROW = members(id=text, value=exactly(revision, number))


class _Channel(Channel):
    """Publishes nothing: it gathers the items that a message would be stored as."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag, self.items = '', list[WorkItem]()

    def _prepared(self, message: Document, exchange: str, routing_key: str) -> Document:
        prepared = super()._prepared(message, exchange, routing_key)
        prepared['properties']['delivery_tag'] = self.tag
        return prepared

    def basic_publish(self, message: Document, exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Gather the items of a task; the event that the task was sent is dropped."""
        if 'task' in message['headers']:
            super().basic_publish(message, exchange, routing_key, **kwargs)

    def _put(self, queues: Collection[str], message: Document, **kwargs: Any) -> None:
        self.items += self._items(queues, message)

    def _put_fanout(self, exchange: str, message: Document, routing_key: str, **kwargs: Any) -> None:
        raise Refused(f'exchange {exchange!r} is for broadcasts')


class Mover:
    """Moves the parcels of an app; for one thread. *Raises* the errors of `kombu_couchdb.errors`."""

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None]) -> None:
        """Use an established connection; `wake()` is called from another thread when there is something to move."""
        options = transport.options
        self._app, self._transport, self._wake = app, transport, wake
        self._accept = Accept(options.parcels_accept, app.amqp.queues)
        self._leader = Leader(transport.couchdb, f'parcels:{options.parcels}')
        self._client = transport.couchdb.beside(options.parcels)
        self._channel = _Channel(transport)
        transport.channels.append(self._channel)
        self._feed: ContinuousFeed | None = None
        self._stale = True

    def step(self) -> None:
        """Move all parcels that are there, if this process is the leader; call this when woken, and every `RENEWAL_SECONDS` seconds."""
        led = self._leader.leads
        if not self._leader.step():
            self._stale = True
            if self._feed is not None:
                self._feed.rest()
            return
        if not led:
            logger.info('this worker moves the parcels of %s from now on', self._client.url)
        if not self._stale:
            return
        since = self._client.sequence()
        while self._move_some():
            if not self._leader.step():
                return
        self._stale = False
        if self._feed is None:
            self._feed = ContinuousFeed(
                self._client,
                lambda rows, last: self._tell(),
                lambda exc: self._tell(),
                'celery-couchdb-parcels-feed',
                docs=False,
            )
        self._feed.watch(since, _SELECTOR)

    def close(self) -> None:
        """Let another process lead."""
        if self._feed is not None:
            self._feed.close()
        self._leader.release()
        self._client.close()

    def _tell(self) -> None:
        self._stale = True
        self._wake()

    def _move_some(self) -> int:
        """Move or refuse the oldest parcels, and return how many that were."""
        rows = self._client.view(
            design.PARCELS, 'parcels', _ROW, startkey=[0], endkey=[0, {}], limit=_PAGE, reduce=False
        )
        chosen, size = list[ParcelRow](), 0
        for row in map(ParcelRow.of, rows):
            if chosen and size + row.size > _TOGETHER:
                break
            chosen, size = [*chosen, row], size + row.size
        docs = self._client.fetch([row.id for row in chosen])
        unread = sum(self._refuse_unread(row.id) for row, doc in zip(chosen, docs, strict=True) if doc is None)
        return self._settle([doc for doc in docs if doc and parcel.is_waiting(doc)]) + unread

    def _refuse_unread(self, doc_id: str) -> bool:
        """Refuse a parcel that is nested too deeply to be read; tell whether it was, and not deleted by somebody."""
        try:
            self._client.get_or_none(doc_id)
            return False
        except NestedTooDeeply:
            reason = 'it is nested too deeply to be read'
        logger.warning('parcel %s is refused: %s', doc_id, reason)
        try:
            self._client.extend(doc_id, self._client.raw(doc_id), parcel.refused({}, reason, self._client.clock.now()))
        except (Conflict, NotFound):
            return False
        return True

    def _settle(self, docs: Sequence[Document]) -> int:
        """Move parcels, or refuse them; return how many of them were settled."""
        reasons: dict[str, str] = {}
        items: dict[str, str] = {}  # the parcel of each item
        new: list[WorkItem] = []
        for doc in docs:
            try:
                made = self._items_of(doc)
            except (Refused, Unstorable, ConfigurationError) as exc:
                reasons[doc['_id']] = str(exc)
                continue
            except CouchDBError:
                raise
            except Exception as exc:  # whatever is in it, the others are moved
                reasons[doc['_id']] = f'it cannot be published: {exc!r:.300}'
                continue
            items.update((item['_id'], doc['_id']) for item in made)
            new += made
        reasons.update(
            (items[result.id], f'CouchDB refuses its message: {result.reason}')
            for result in self._transport.store_items(new, once=True)
        )
        now = self._client.clock.now()
        changes = [
            parcel.refused(doc, reasons[doc['_id']], now) if doc['_id'] in reasons else deletion(doc) for doc in docs
        ]
        for doc_id, reason in reasons.items():
            logger.warning('parcel %s is refused: %s', doc_id, reason)
        return sum(result.is_stored for result in self._client.bulk(changes))

    def _items_of(self, doc: Document) -> list[WorkItem]:
        """Return the items that the message of a parcel is stored as.

        *Raises* `Refused`, `Unstorable`, `ConfigurationError`, or what Celery raises for a call that cannot be sent.
        """
        self._channel.tag, self._channel.items = parcel.moved_id(doc['_id']), []
        if 'message' in doc:
            self._publish_again(doc)
        else:
            call = call_in(doc, self._accept)
            self._app.send_task(
                call.task, call.args, call.kwargs, producer=Producer(self._channel), retry=False, **call.options
            )
        for item in self._channel.items:
            if reason := self._accept.wrong_queue(item['queue']):
                raise Refused(reason)
        if not self._channel.items:
            raise Refused(f'exchange {doc.get("exchange")!r} has no queue for routing key {doc.get("routing_key")!r}')
        return self._channel.items

    def _publish_again(self, doc: Document) -> None:
        attachment = stub(doc)
        if attachment and attachment['length'] > _LARGEST:
            raise Refused(f'its body is larger than {_LARGEST:,} bytes')
        body = bodies.read(self._client, [doc])[0] if attachment else None
        if body and body.content is None:
            raise Refused(body.reason)
        message = checked(doc, body.content if body else None, self._accept, self._app.conf.accept_content)
        self._channel.basic_publish(message, doc.get('exchange') or '', doc.get('routing_key') or '')
