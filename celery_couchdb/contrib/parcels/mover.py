"""The mover of parcels. One worker, the leader of those with the option `parcels`, moves them.

It reads the database of parcels and those of all devices, in turns, so that a sender with many parcels does not delay
the others. It publishes the message of a parcel under an id derived from the parcel's id, by `publish_once`, and then
deletes the parcel, or makes it a receipt (`receipts`) if a program wrote it without Celery. So each parcel is moved
exactly once, even if the worker is killed or paused in between. The document of a refused parcel stays, with the
reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kombu import Producer

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.devices import devices_of
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import AccessDenied, DatabaseMissing
from kombu_couchdb.leases.leader import Duty, LeaderLease, Led
from kombu_couchdb.log import get_logger, printable

from .inbox import Inbox
from .messages import ParcelMessages, attached_body, in_parts
from .parcel_checks import PRINTED, Accept, ParcelRefused, call_in, checked
from .receipts import process, write
from .room import PARCEL, Origin

logger = get_logger(__name__)

#: The most parcels of one database in a turn.
_TURN_DOCS = 100

#: The interval at which it is looked for new devices, in seconds; and for those that could not be read.
_DEVICES_SECONDS = 30.0

#: The most databases that are followed. Those of more devices are polled, because each feed needs a connection and a
#: thread; at this interval, in seconds.
_MAX_FOLLOWED, _POLL_SECONDS = 200, 10.0

#: CouchDB sends an empty line to the feed of a device at this interval, in seconds.
_DEVICE_HEARTBEAT = 20.0


class Mover(Duty):
    """Moves the parcels of an app. Use it in one thread. *Every* method raises the errors of `kombu_couchdb.errors`."""

    process = 'this worker'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None]) -> None:
        """Use the connected `transport`. Another thread calls `wake()` when there are parcels to move."""
        options = transport.options
        super().__init__(LeaderLease(transport.couchdb, f'parcels:{options.parcels}'))
        self._app, self._broker, self._wake, self._keep = app, transport.couchdb, wake, options.receipts_retention
        self._accept = Accept(options.parcels_accept, app.amqp.queues)
        self._messages = ParcelMessages(transport)
        self._own = Inbox(transport.couchdb.beside(options.parcels), wake)
        #: By name of the database.
        self._inboxes: dict[str, Inbox] = {options.parcels: self._own}
        #: Why the databases of devices cannot be read.
        self._errors: dict[str, str] = {}
        self._devices_at = 0.0

    def begin(self) -> None:
        """Forget what a former term knew."""
        logger.info('this worker moves the parcels of %s from now on', self._own.client.url)
        self._forget()

    def rest(self) -> float:
        """Follow nothing."""
        self._forget()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Move all parcels that wait, and bring the receipts up to date."""
        if stale:
            self._forget()
        if time.monotonic() >= self._devices_at:
            self._find_devices()
        for database, inbox in [*self._inboxes.items()]:
            self._turn(database, inbox)
            self.renew()
        return min(self._devices_at, *(inbox.next_at for inbox in self._inboxes.values())) - time.monotonic()

    def close(self) -> None:
        """Release the lead to another process, and close the connections."""
        for database in [*self._inboxes]:
            self._drop(database)
        super().close()

    # -- the databases

    def _forget(self) -> None:
        for inbox in self._inboxes.values():
            inbox.reset()

    def _find_devices(self) -> None:
        self._devices_at = time.monotonic() + _DEVICES_SECONDS
        own = self._own.client.address.database
        databases = {*devices_of(self._broker, own).values()}
        for database in self._inboxes.keys() - databases - {own}:
            self._drop(database)
        for database in sorted(databases - self._inboxes.keys()):
            client = self._broker.beside(database)
            poll = _POLL_SECONDS if len(self._inboxes) >= _MAX_FOLLOWED else 0.0
            self._inboxes[database] = Inbox(client, self._wake, heartbeat=_DEVICE_HEARTBEAT, poll=poll)

    def _drop(self, database: str) -> None:
        inbox = self._inboxes.pop(database)
        inbox.close()
        inbox.client.close()

    def _turn(self, database: str, inbox: Inbox) -> None:
        """Process some documents of a database."""
        try:
            docs = [doc for doc in inbox.take(_TURN_DOCS).values() if doc]
            for part in in_parts(list(filter(parcel.is_waiting, docs))):
                self._move(database, inbox.client, part)
            if self._keep and (receipts := [doc for doc in docs if doc.get('type') == 'Receipt']):
                process(self._broker, inbox, receipts, self._keep)
            self._errors.pop(database, None)
        except (DatabaseMissing, AccessDenied) as exc:
            if inbox is self._own:
                raise
            # It was removed, or is not set up yet: it is tried again with the next look for devices.
            self._drop(database)
            if self._errors.get(database) != str(exc):
                self._errors[database] = str(exc)
                logger.warning('the database of a device cannot be used: %s', exc)

    # -- parcels

    def _move(self, database: str, client: Client, docs: Sequence[Document]) -> None:
        """Move or refuse parcels.

        A parcel that another process changes meanwhile comes again. If its message is published by then, `publish_once`
        does not publish it again.
        """
        items, refused = self._messages.make(database, docs, partial(self._publish, database, client))
        reasons = {doc_id: str(exc) for doc_id, exc in refused.items()}
        reasons |= self._messages.store(items)
        now = client.clock.now()
        changes = [
            parcel.refused(doc, reasons[doc['_id']], now)
            if doc['_id'] in reasons
            else self._moved(doc, items[doc['_id']][0], now)
            for doc in docs
        ]
        for doc_id, reason in reasons.items():
            logger.warning('parcel %s is refused: %s', doc_id, reason)
        for result in write(client, changes):
            logger.debug('parcel %s was processed: %s', result.id, result)

    def _moved(self, doc: Document, item: WorkItem, now: float) -> Document:
        """Return what becomes of a parcel when its message is published: its receipt, or its deletion."""
        if not self._keep or 'message' in doc:
            return deletion(doc)
        return parcel.receipt_of(doc, item['message']['headers']['id'], item['date'], now, self._keep)

    def _publish(self, database: str, client: Client, doc: Document) -> None:
        """Publish the message of a parcel to the collecting channel."""
        channel = self._messages.channel
        if own := parcel.own_members(doc):
            raise ParcelRefused(f'a parcel has no member {own[0]!r} of its program: give it another name')
        if 'message' in doc:
            content = self._app.conf.accept_content
            self._messages.publish(checked(doc, attached_body(client, doc), self._accept, content), doc)
        else:
            call = call_in(doc, self._accept, parcel.moved_id(database, doc['_id']))
            if self._keep:
                task_id, now = call.options['task_id'], client.clock.now()
                origin = Origin(database, doc['_id'], task_id, doc['_rev'], now, self._keep)
                call.options['headers'] = {PARCEL: [*origin]}
            self._app.send_task(
                call.task, call.args, call.kwargs, producer=Producer(channel), retry=False, **call.options
            )
        for item in channel.items:
            if reason := self._accept.wrong_queue(item['queue']):
                raise ParcelRefused(reason)
            headers = item['message']['headers']
            headers.update({name: printable(headers[name]) for name in PRINTED if headers.get(name)})


# -- the thread of a worker


def loop(app: Any) -> Led:
    """Return the loop of a worker that moves the parcels of an app when it leads."""
    return Led(
        app.connection_for_write(),
        lambda connection, wake: Mover(app, connection.connection, wake),
        'parcels are not moved',
        'parcels are moved again',
    )
