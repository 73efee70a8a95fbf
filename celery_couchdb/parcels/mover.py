"""The mover of parcels. One worker, the leader of those with the option `parcels`, moves them.

The mover publishes the message of a parcel under an id derived from the parcel's id, by `publish_once`, and then
deletes the parcel, or makes it a receipt (`receipts`) if a program wrote it without Celery. So each parcel is moved
exactly once, even if the worker is killed or paused in between. The document of a refused parcel stays, with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kombu import Producer

from kombu_couchdb.consumer import bodies
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.couchdb.conflicts import delete_leaves
from kombu_couchdb.couchdb.shapes import exactly, members, number, revision, text
from kombu_couchdb.documents.body import stub
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import (
    ConfigurationError,
    CouchDBError,
    Unstorable,
)
from kombu_couchdb.leases.leader import LeaderLease
from kombu_couchdb.log import get_logger, printable
from kombu_couchdb.options import Options
from kombu_couchdb.parcels import parcel, parcel_views, receipt
from kombu_couchdb.parcels.parcel_views import ParcelRow
from kombu_couchdb.queues.quarantine import Harmful
from kombu_couchdb.transport.channel import Channel

from .accept import PRINTED, Accept
from .inbox import Batch, Inbox
from .origin_headers import PARCEL
from .parcel_checks import ParcelRefused, call_in, checked
from .receipts import Receipts, write

logger = get_logger(__name__)

#: The maximum number of parcels in a batch, and their maximum size in characters (but a batch has one parcel at least).
_BATCH_DOCS, _BATCH_CHARACTERS = 100, 1_000_000

#: The maximum size of the attached bodies, in bytes, that are in memory together (but one body may be larger).
_BATCH_BODY_BYTES = 16_000_000

#: Only changes of these documents wake the mover. Tombstones have no type either.
_SELECTOR = {
    'status': {'$exists': False},
    '_deleted': {'$exists': False},
    '$or': [{'type': 'Parcel'}, {'type': {'$exists': False}}],
}

#: The maximum size of a body.
_MAX_BODY_BYTES = 64_000_000

#: The shape of a row of the view `parcels`: the revision, and the size in characters.
_ROW = members(id=text, value=exactly(revision, number))


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

    def send(self, docs: Sequence[Any], *, again: bool = False) -> None:
        """Gather the items of a task."""
        if any(doc['type'] == 'Parcel' for doc in docs):
            raise ParcelRefused('its task belongs to another region, and parcels are for tasks of this one')
        self.items += docs

    def broadcast(self, message: Document, exchange: str, routing_key: str) -> None:
        """Refuse a message that no queue would receive."""
        raise ParcelRefused(f'exchange {exchange!r} is for broadcasts')


class Mover(Inbox):
    """Moves the parcels of an app. Use it in one thread. *Every* method raises the errors of `kombu_couchdb.errors`."""

    done_by_leader = 'this worker moves the parcels of %s from now on'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None]) -> None:
        """Use the connected `transport`. Another thread calls `wake()` when there are parcels to move."""
        options = transport.options
        name, database, selector = self._place(options)
        super().__init__(LeaderLease(transport.couchdb, name), transport.couchdb.beside(database), selector, wake)
        self._app, self._transport = app, transport
        self._accept = Accept(options.parcels_accept, app.amqp.queues)
        self._channel = CollectingChannel(transport)
        transport.channels.append(self._channel)
        self._harmful = Harmful(self._client, lambda text, reason, now: parcel.refused({}, reason, now))
        self._deleted = set[str]()  # the ids of the parcels that were deleted last
        self._receipts: Receipts | None = None
        self._receipts_error = ''
        if self._has_receipts(options):
            self._keep = options.receipts
            self._receipts = Receipts(app, transport, self._client, wake)

    def begin(self) -> None:
        """Forget the receipts that were open in a former term."""
        super().begin()
        if self._receipts is not None:
            self._receipts.reset()

    def rest(self) -> float:
        """Follow nothing."""
        if self._receipts is not None:
            self._receipts.reset()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Move all parcels that wait, and bring the receipts up to date."""
        seconds = super().work(stale=stale)
        if self._receipts is not None:
            try:
                self._receipts.step()
                self._receipts_error = ''
            except CouchDBError as exc:
                self._receipts.reset()
                if self._receipts_error != str(exc):
                    self._receipts_error = str(exc)
                    logger.warning('receipts are not written just now: %s', exc)
        return seconds

    def close(self) -> None:
        """Release the lead to another process, and close the connections."""
        if self._receipts is not None:
            self._receipts.close()
        super().close()

    def do_batch(self) -> Batch:
        """Move or refuse the oldest parcels."""
        self._harmful.replace()
        batch, size = list[ParcelRow](), 0
        for row in map(ParcelRow.of, self._rows(limit=_BATCH_DOCS, shape=_ROW, reduce=False)):
            if batch and size + row.size > _BATCH_CHARACTERS:
                break
            batch, size = [*batch, row], size + row.size
        return Batch(len(batch), self._move_or_refuse([row.id for row in batch]))

    def do_these(self, ids: Sequence[str]) -> None:
        """Move or refuse these parcels."""
        self._move_or_refuse([doc_id for doc_id in ids if not doc_id.startswith('_design/')])

    def _place(self, options: Options) -> tuple[str, str, dict[str, Any]]:
        """Return the name of the leader, the database with the parcels, and the selector for its changes."""
        assert options.parcels, 'the thread is started only with this option'
        return f'parcels:{options.parcels}', options.parcels, _SELECTOR

    def _rows(self, **arguments: Any) -> Sequence[Any]:
        """Return rows of the waiting parcels; the `arguments` are those of `Client.view`."""
        return self._client.view(parcel_views.PARCELS, 'parcels', startkey=[0], endkey=[0, {}], **arguments)

    def _has_receipts(self, options: Options) -> bool:
        return bool(options.receipts)

    def _is_waiting(self, doc: Document) -> bool:
        return parcel.is_waiting(doc)

    def _move_or_refuse(self, ids: Sequence[str]) -> int:
        """Move or refuse those of these parcels that wait, and return their number."""
        docs = self._client.fetch(ids)
        done, part, size = 0, list[Document](), 0
        deleted, self._deleted = self._deleted, set()
        for doc in docs:
            if doc and doc['_id'] in deleted:
                # A conflict of a moved parcel shows now. One after the other, each would be a batch.
                done += delete_leaves(self._client, [doc])
            elif doc and self._is_waiting(doc):
                length = attachment['length'] if (attachment := stub(doc)) else 0
                if part and size + length > _BATCH_BODY_BYTES:
                    done += self._move(part)
                    part, size = [], 0
                part, size = [*part, doc], size + length
        return done + self._move(part)

    def _move(self, docs: Sequence[Document]) -> int:
        """Move or refuse parcels, and return the number of those whose documents were deleted or marked as refused.

        A parcel that another process changes meanwhile is left for the next batch. If its message is published by then,
        `publish_once` does not publish it again.
        """
        reasons: dict[str, str] = {}
        messages: dict[str, list[WorkItem]] = {}  # by the ids of the parcels
        for doc in docs:
            try:
                items = self._items_of(doc)
            except (ParcelRefused, Unstorable, ConfigurationError) as exc:
                reasons[doc['_id']] = str(exc)
                continue
            except CouchDBError:
                raise
            except Exception as exc:  # a publisher can cause any error; the other parcels must be moved
                reasons[doc['_id']] = f'it cannot be published: {exc!r:.300}'
                continue
            messages[doc['_id']] = items
        parcel_of = {item['_id']: doc_id for doc_id, items in messages.items() for item in items}
        new = [item for items in messages.values() for item in items]
        try:
            if self._receipts and not all('message' in doc for doc in docs):
                self._receipts.prepare()
            reasons.update(
                (parcel_of[result.id], f'CouchDB refuses its message: {result.reason}')
                for result in self._transport.store_items(new, once=True)
            )
            now = self._client.clock.now()
            changes = [
                parcel.refused(doc, reasons[doc['_id']], now)
                if doc['_id'] in reasons
                else self._moved(doc, messages[doc['_id']][0], now)
                for doc in docs
            ]
            for doc_id, reason in reasons.items():
                logger.warning('parcel %s is refused: %s', doc_id, reason)
            results = write(self._client, changes)
        except CouchDBError:
            if self._receipts:
                # It is unknown which messages were published, so that their tasks may end before the next try, and
                # which receipts were written: the next step looks up the results of all.
                self._receipts.reset()
            raise
        for doc, result in zip(docs, results, strict=True):
            logger.debug(
                'parcel %s was %s; its document %s',
                doc['_id'],
                'refused' if doc['_id'] in reasons else f'moved: {", ".join(i["_id"] for i in messages[doc["_id"]])}',
                'was updated' if result.is_stored else 'has changed and was not updated',
            )
        if self._receipts:
            opened = [
                doc for doc, result in zip(changes, results, strict=True) if result.is_stored and receipt.is_open(doc)
            ]
            # A parcel that was changed may have been moved before.
            self._receipts.add([doc for doc in opened if doc['_rev'].startswith('1-')], unread=False)
            self._receipts.add([doc for doc in opened if not doc['_rev'].startswith('1-')], unread=True)
        stored = [change for change, result in zip(changes, results, strict=True) if result.is_stored]
        self._deleted.update(change['_id'] for change in stored if change.get('_deleted'))
        return len(stored)

    def _moved(self, doc: Document, item: WorkItem, now: float) -> Document:
        """Return what becomes of a parcel when its message is published: its receipt, or its deletion."""
        if self._receipts is None or 'message' in doc:
            return deletion(doc)
        return receipt.opened(doc, item['message']['headers']['id'], item['date'], now, self._keep)

    def _items_of(self, doc: Document) -> list[WorkItem]:
        """Return the WorkItems for the message of a parcel.

        *Raises* `ParcelRefused`, `Unstorable`, `ConfigurationError`, or what Celery raises for a call that cannot be
        sent.
        """
        self._channel.tag, self._channel.items = parcel.moved_id(doc['_id']), []
        self._publish(doc)
        if not self._channel.items:
            raise ParcelRefused(
                f'exchange {doc.get("exchange")!r} has no queue for routing key {doc.get("routing_key")!r}'
            )
        return self._channel.items

    def _publish(self, doc: Document) -> None:
        """Publish the message of a parcel to the collecting channel."""
        if 'message' in doc:
            self._publish_message(doc, partial(checked, accept=self._accept, content=self._app.conf.accept_content))
        else:
            call = call_in(doc, self._accept)
            if self._receipts:
                call.options['headers'] = {PARCEL: [doc['_id'], call.options['task_id']]}
            self._app.send_task(
                call.task, call.args, call.kwargs, producer=Producer(self._channel), retry=False, **call.options
            )
        for item in self._channel.items:
            if reason := self._accept.wrong_queue(item['queue']):
                raise ParcelRefused(reason)
            headers = item['message']['headers']
            headers.update({name: printable(headers[name]) for name in PRINTED if headers.get(name)})

    def _publish_message(self, doc: Document, check: Callable[[Document, bytes | None], Document]) -> None:
        """Publish the message that `check` returns for a parcel and its attached body."""
        attachment = stub(doc)
        if attachment and attachment['length'] > _MAX_BODY_BYTES:
            raise ParcelRefused(f'its body is larger than {_MAX_BODY_BYTES:,} bytes')
        body = bodies.read(self._client, [doc])[0] if attachment else None
        if body and body.content is None:
            raise ParcelRefused(body.reason)
        message = check(doc, body.content if body else None)
        self._channel.basic_publish(message, doc.get('exchange') or '', doc.get('routing_key') or '')
