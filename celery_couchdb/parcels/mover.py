"""The mover of parcels. One worker, the leader of those with the option `parcels`, moves them.

The mover publishes the message of a parcel under an id derived from the parcel's id, by `publish_once`, and then
deletes the parcel, or makes it a receipt (`receipts`) if a program wrote it without Celery. So each parcel is moved
exactly once, even if the worker is killed or paused in between. The document of a refused parcel stays, with the
reason.

A `Mover` is an `Inbox`, the duty of a leader that processes the documents of a database. `start` runs it in a thread of
each worker whose transport has the option `parcels`, or `region`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from kombu import Producer

from kombu_couchdb.consumer import bodies
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import SYNC, delete_leaves
from kombu_couchdb.couchdb.shapes import exactly, members, number, revision, text
from kombu_couchdb.documents.body import stub
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import (
    ConfigurationError,
    CouchDBError,
    Unstorable,
)
from kombu_couchdb.leases.leader import Duty, LeaderLease, Led
from kombu_couchdb.log import get_logger, printable
from kombu_couchdb.options import Options
from kombu_couchdb.parcels import parcel
from kombu_couchdb.parcels.parcel import ParcelRow
from kombu_couchdb.queues.quarantine import Harmful
from kombu_couchdb.transport import Transport
from kombu_couchdb.transport.channel import Channel

from ..patches import workers
from . import PARCEL
from .parcel_checks import PRINTED, Accept, ParcelRefused, call_in, checked
from .receipts import Receipts, write

logger = get_logger(__name__)

#: If the changes feed reports more documents than this at once, the view is read, which tells how large they are.
_FEW_DOCS = 5


#: The pauses after a batch in which no document could be processed, in seconds. A node of a cluster may still show
#: processed documents, or another worker may have taken the whole batch.
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 30.0

#: The interval at which the leader in a cluster looks for documents that the feed of a node has not reported.
_CLUSTER_SECONDS = 60.0

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


class Batch(NamedTuple):
    """The number of documents in a batch, and the number of those that were processed."""

    found: int
    done: int


class Inbox(Duty):
    """Processes the documents of a database, and then follows them. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    process = 'this worker'

    #: Logged when this process becomes the leader, with the URL of the database.
    done_by_leader: ClassVar[str]

    def __init__(self, leader: LeaderLease, client: Client, selector: dict[str, Any], wake: Callable[[], None]) -> None:
        """Follow the documents of the database of `client` that match `selector`.

        Another thread calls `wake()` when they have changed.
        """
        super().__init__(leader)
        self._client, self._selector = client, selector
        self._follower = Follower(client, 'celery-couchdb-parcels-feed', wake)
        self._again_at, self._pause = inf, _MIN_PAUSE_SECONDS

    def do_these(self, ids: Sequence[str]) -> None:
        """Process these few documents, which were written just now."""
        raise NotImplementedError

    def do_batch(self) -> Batch:
        """Process a batch of documents. After a batch without documents the leader waits for the next change."""
        raise NotImplementedError

    def begin(self) -> None:
        """Say that this process leads."""
        logger.info(self.done_by_leader, self._client.url)

    def rest(self) -> float:
        """Follow nothing."""
        self._follower.pause()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Process all documents that wait."""
        changes = self._follower.take()
        is_due = time.monotonic() >= self._again_at
        if stale or changes is not None or is_due:
            if stale or changes is None or is_due or changes.last is None or len(changes.rows) > _FEW_DOCS:
                since = self._client.sequence()
                is_repeated = self._do_all() and not stale and changes is None
            else:
                self.do_these(changes.ids)
                since, is_repeated = changes.last, False
            if self._client.replicas > 1:
                # The node that was asked may not have everything that another one has reported.
                self._look_again_in(_CLUSTER_SECONDS if is_repeated else SYNC)
            self._follower.follow(since, self._selector)
        return self._again_at - time.monotonic()

    def close(self) -> None:
        """Release the lead to another process, and close the connections."""
        self._follower.close()
        super().close()
        self._client.close()

    def _do_all(self) -> bool:
        """Process batches until nothing can be done; return whether nothing could be done at all."""
        self._again_at, is_idle = inf, True
        while (batch := self.do_batch()).done:
            is_idle, self._pause = False, _MIN_PAUSE_SECONDS
            self.renew()
        if batch.found:
            self._look_again_in(self._pause)
            self._pause = min(_MAX_PAUSE_SECONDS, 2 * self._pause)
        return is_idle

    def _look_again_in(self, seconds: float) -> None:
        self._again_at = min(self._again_at, time.monotonic() + seconds)


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
            self._keep = options.receipts_retention
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
        return self._client.view(parcel.PARCELS, 'parcels', startkey=[0], endkey=[0, {}], **arguments)

    def _has_receipts(self, options: Options) -> bool:
        return bool(options.receipts_retention)

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
        stored = [change for change, result in zip(changes, results, strict=True) if result.is_stored]
        if self._receipts:
            self._receipts.add([doc for doc in stored if parcel.is_open(doc)])
        self._deleted.update(change['_id'] for change in stored if change.get('_deleted'))
        return len(stored)

    def _moved(self, doc: Document, item: WorkItem, now: float) -> Document:
        """Return what becomes of a parcel when its message is published: its receipt, or its deletion."""
        if self._receipts is None or 'message' in doc:
            return deletion(doc)
        return parcel.receipt_of(doc, item['message']['headers']['id'], item['date'], now, self._keep)

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
        message = check(doc, attached_body(self._client, doc))
        self._channel.basic_publish(message, doc.get('exchange') or '', doc.get('routing_key') or '')


def attached_body(client: Client, doc: Document) -> bytes | None:
    """Return the attached body of a document; None if it has no attachment. *Raises* `ParcelRefused`."""
    if (attachment := stub(doc)) is None:
        return None
    if attachment['length'] > _MAX_BODY_BYTES:
        raise ParcelRefused(f'its body is larger than {_MAX_BODY_BYTES:,} bytes')
    [body] = bodies.read(client, [doc])
    if body.content is None:
        raise ParcelRefused(body.reason)
    return body.content


# -- the threads of a worker

#: The movers, by the transport option with which they start. They get the app, the connected transport, a function that
#: wakes their thread, and how many tasks the worker runs at once.
KINDS: dict[str, Callable[..., Mover]] = {
    'parcels': lambda app, transport, wake, concurrency: Mover(app, transport, wake)
}

_threads: WeakKeyDictionary[Any, list[Led]] = WeakKeyDictionary()


def start(app: Any, concurrency: int = 1) -> None:
    """Start the threads for an app, unless they run, if its broker is CouchDB and has `parcels` or `region`.

    The worker runs up to `concurrency` tasks at once.
    """
    options = app.conf.broker_transport_options or {}
    wanted = [kind for option, kind in KINDS.items() if options.get(option)]
    if app in _threads or not wanted:
        return
    with app.connection_for_write() as connection:
        if issubclass(connection.get_transport_cls(), Transport):
            _threads[app] = [_started(app, kind, concurrency) for kind in wanted]


def _started(app: Any, kind: Callable[..., Mover], concurrency: int) -> Led:
    led = Led(
        app.connection_for_write(),
        lambda connection, wake: kind(app, connection.connection, wake, concurrency),
        'parcels are not moved',
    )
    led.start('celery-couchdb-parcels')
    return led


def on_worker_ready(sender: Any = None, **_: Any) -> None:
    """Start the threads for a worker that is ready."""
    if sender is not None:
        controller = getattr(sender, 'controller', None)
        start(sender.app, getattr(controller, 'concurrency', None) or 1)


def _on_worker_shutdown(sender: Any = None, **_: Any) -> None:
    for thread in _threads.pop(sender.app, ()) if sender is not None else ():
        thread.stop()


def connect_signals() -> None:
    """Start the threads in each worker that is ready from now on, and stop them when it shuts down."""
    for signal in workers.READY:
        signal.connect(on_worker_ready)
    for signal in workers.SHUTDOWN:
        signal.connect(_on_worker_shutdown)
