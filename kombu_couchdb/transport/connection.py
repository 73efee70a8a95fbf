"""kombu's transport: one connection to one CouchDB database.

* URL: `couchdb://user:password@host:5984/database`, or `couchdbs://…` for TLS. User, password and database are
  percent-encoded; the default database is `celery`. A list `url;url` names the nodes of a cluster, each of which is asked
  while the others do not answer.
* Options: see `kombu_couchdb.options.Options`.
* A connection that only publishes has no thread; one that consumes has two, for I/O and for the feed of changes, as long as it
  has something to do. They end also when the connection is dropped without `close()`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import requests
from kombu.transport import virtual

from .. import errors
from ..consumer.delivery import Credit, Delivery, Subscription
from ..consumer.io_thread import Consumer
from ..consumer.mailbox import Mailbox
from ..consumer.notifier import Notifier
from ..consumer.pull import Pull
from ..consumer.unacked import Unacked
from ..couchdb.address import Address
from ..couchdb.client import Client, Document
from ..couchdb.urls import joined
from ..couchdb.write_result import WriteResult
from ..documents.ids import BROADCAST, CONSUMER
from ..errors import CouchDBError
from ..leases.peers import queues_of
from ..leases.temporary import Gets
from ..log import get_logger
from ..options import Options
from ..queues.database import SEEN, ensure
from ..queues.fanout import Broadcaster, Listener
from ..queues.store import Store
from ..queues.topology import Topology
from .channel import Channel
from .failover import hide_alternates, others
from .parcel_channel import ParcelChannel

__all__ = ['Transport']

logger = get_logger(__name__)

#: Messages delivered at a stretch, before the event loop looks at its other descriptors.
_BURST = 100


class Transport(virtual.Transport):
    """A connection to CouchDB, as `kombu.Connection` uses it."""

    Channel = Channel

    driver_type = 'couchdb'
    driver_name = 'requests'
    can_parse_url = False
    polling_interval = None

    implements = virtual.Transport.implements.extend(
        asynchronous=True,
        batch_publish=True,
        exchange_type=frozenset(['direct', 'topic', 'fanout']),
    )

    connection_errors = (*virtual.Transport.connection_errors, *errors.RETRIED)
    channel_errors = virtual.Transport.channel_errors
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()

    def __init__(self, client: Any, **kwargs: Any) -> None:
        self.options = Options.of(client.transport_options)
        super().__init__(client, **kwargs)
        self.polling_interval = None  # the virtual transport would sleep for it between polls
        self.address = Address.of(
            scheme=str(client.transport_cls),
            host=client.hostname,
            port=client.port,
            database=client.virtual_host,
            default_database='celery',
            user=client.userid,
            password=client.password,
            tls=client.ssl,
            credentials=self.options.credentials,
            auth=self.options.auth,
        )
        self.address = joined(self.address, others(self.address, client), 'broker_url')
        hide_alternates(client)
        self._named = self.address
        self.couchdb = Client(self.address, self.options.request_timeout, self.options.connect_timeout)
        self.store, self.topology = Store(self.couchdb), Topology(self.couchdb)
        self.gets = Gets(self.topology)
        self.broadcaster = Broadcaster(self.couchdb, self.options.fanout_retention)
        self.listener = Listener()
        #: Queues declared here that go with their last consumer.
        self.temporary: set[str] = set()
        self._mailbox: Mailbox[Delivery | Exception] = Mailbox()
        #: What takes the deliveries of each subscription: the I/O thread knows nothing of channels.
        self._receivers: dict[Subscription | None, Callable[[Delivery], None]] = {}
        self._consumer: Consumer | None = None
        self._abandon: weakref.finalize[Any, Any]
        self._pid = os.getpid()

    @property
    def default_port(self) -> int:
        """CouchDB's port: 5984, or 6984 with TLS."""
        return 6984 if self.client is not None and self.client.transport_cls == 'couchdbs' else 5984

    def driver_version(self) -> str:
        """Return the version of requests."""
        return str(requests.__version__)

    # -- connections

    def establish_connection(self) -> Transport:
        """Reach the database, and make it if it is missing; *raises* `CouchDBError`."""
        began = time.monotonic()
        rows, takes_parcels = ensure(self.couchdb, self.options.create_database)
        self.topology.saw(rows, began, SEEN)
        self._name_node()
        self.Channel = ParcelChannel if takes_parcels else Channel
        super().establish_connection()
        return self

    def _name_node(self) -> None:
        """Let kombu's connection name the node in use: its `port`, its `as_uri()`, and Celery's "Connected to …"."""
        node, client = self.couchdb.node, self.client
        if node is not self._named and client is not None:
            self._named = node
            client.hostname, client.port, client.virtual_host = node.host, node.port, node.database
            client.userid, client.password = node.user, node.password
            client.transport_cls = 'couchdbs' if node.tls else 'couchdb'

    def close_connection(self, connection: Any) -> None:
        """Give back all that is held and close."""
        if self._pid != os.getpid():
            return  # a copy after fork(): everything here is the parent's
        super().close_connection(connection)
        if self._consumer is not None:
            self._abandon.detach()
            self._consumer.close(self.options.request_timeout + self.options.connect_timeout)
            self._consumer = None
        self._mailbox.close()
        self.store.close()

    _collect = close_connection

    @property
    def consumer(self) -> Consumer:
        """The I/O thread, started with the first use, and again after it has retired."""
        if self._consumer is None or self._consumer.unacked.retired:
            if self._consumer is not None:
                self._abandon.detach()
            name = f'couchdb-{self.address.database}'
            notifier = Notifier(self.couchdb, self.topology, self.listener, name)
            self._consumer = Consumer(self.couchdb, self.options, self._mailbox, notifier, self.topology, name)
            # A connection that is dropped without close(): the thread refers to nothing that would keep it.
            self._abandon = weakref.finalize(self, self._consumer.abandon)
            self._abandon.atexit = False
        return self._consumer

    @property
    def unacked(self) -> Unacked:
        """What this connection holds."""
        return (self._consumer or self.consumer).unacked

    def _engage(self, take: Callable[[Unacked], bool]) -> Consumer:
        """Return the consumer whose holdings `take` something in: those of one that has retired do not."""
        while not take((consumer := self.consumer).unacked):
            pass
        return consumer

    # -- events

    def drain_events(self, connection: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Deliver one message; *raises* `TimeoutError` if none came within `timeout` seconds, or what ended the I/O thread.

        One and not more: who expects two answers (kombu's pidbox) calls twice.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._ask()
        while not self._hand_over(1):
            if self._consumer is not None and self._consumer.ended and not len(self._mailbox):
                raise CouchDBError(f'{self.address.url}: this connection has given up; connect again')
            if not self._mailbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError('no message arrived in time')  # socket.timeout is its older name

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let the event loop deliver what arrives."""
        loop.add_reader(self._mailbox.fileno(), lambda *args: self._deliver_burst())

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Take the mailbox out of the event loop."""
        loop.remove_reader(self._mailbox.fileno())

    def _deliver_burst(self) -> None:
        try:
            self._hand_over(_BURST)
        finally:
            self._ask()  # the event loop comes again when there is more

    def _ask(self) -> None:
        self._name_node()
        if self._consumer is not None:
            self._consumer.unacked.ask()

    def _hand_over(self, limit: int) -> int:
        """Deliver up to `limit` messages that are in the mailbox, and return how many there were."""
        delivered = 0
        while delivered < limit and (item := self._mailbox.pop()) is not None:
            if isinstance(item, Exception):
                raise item
            receive = self._receivers.get(item.subscription)
            if receive is not None and self.unacked.hand_over(item):
                delivered += 1
                receive(item)
                item.accepted = True  # what ends its consumer here still counts as an attempt
        return delivered

    # -- for channels

    def publish(self, docs: list[Document]) -> None:
        """Store new items, and keep their queues within their lengths; *raises* what `Store.publish` does."""
        self._name_node()
        self.store.publish(docs)
        self._trim_all({doc['queue'] for doc in docs})

    def publish_once(self, docs: list[Document]) -> list[WriteResult]:
        """Store those of new items that an earlier try has not stored, and return what `Store.publish_once` does."""
        self._name_node()
        refused = self.store.publish_once(docs) if docs else []
        self._trim_all({doc['queue'] for doc in docs})
        return refused

    def _trim_all(self, queues: set[str]) -> None:
        try:
            self._trim(queues)
        except CouchDBError as exc:
            # They are stored: to publish them again would be wrong. A sweep trims the queue later.
            logger.warning('a queue could not be kept within its length just now: %s', exc)

    def _trim(self, queues: set[str]) -> None:
        for queue in queues:
            known = self.topology.limits.of(queue).length
            # What another process has declared since counts; it is asked for only when something is to be dropped.
            if known is not None and self.store.exceeds(queue, known):
                length = self.topology.limit(queue).length
                if length is not None:
                    self.store.trim(queue, length)

    def subscribe(self, subscription: Subscription, receive: Callable[[Delivery], None]) -> None:
        """Begin to deliver the messages of a queue to `receive(delivery)`, in the thread that drains events."""
        self._receivers[subscription] = receive
        self._engage(lambda unacked: unacked.subscribe(subscription))

    def cancel(self, subscription: Subscription) -> None:
        """Deliver nothing more; what was not handed over goes back to its queue at once."""
        self.unacked.cancel(subscription)
        self._receivers.pop(subscription, None)

    def pull(self, queue: str, no_ack: bool) -> Delivery | None:
        """Claim the next message of a queue and return it, or None if there is none; *raises* `CouchDBError`."""
        pull = Pull(queue, no_ack)
        return self._engage(lambda unacked: unacked.pull(pull)).wait(pull)

    def set_credit(self, credit: Credit, limit: int) -> None:
        """Change how many messages a channel may hold."""
        if self._consumer is None:
            credit.limit = limit
        else:
            self._consumer.unacked.set_credit(credit, limit)

    def listen(self, exchange: str, queue: str) -> None:
        """Let a queue have what is broadcast to `exchange` from now on."""
        if not self.listener.primed:
            self.listener.prime(row['doc'] for row in self.couchdb.id_range(BROADCAST, docs=True))
        self.listener.bind(exchange, queue)

    def used(self, queue: str) -> bool:
        """Tell whether any consumer, here or elsewhere, has a subscription to the queue.

        One that was killed counts until a sweep has ended its lease: no clock can tell that it is gone.
        """
        if any(queue in channel._active_queues for channel in self.channels):
            return True
        own = self._consumer and self._consumer.id
        return any(
            queue in queues_of(row['doc']) for row in self.couchdb.id_range(CONSUMER, docs=True) if row['id'] != own
        )

    def joined(self, queue: str) -> None:
        """A consumer of the queue was added: if the queue is temporary, wait until others can see that it is used.

        Not for longer than a request may take: while the server is away the I/O thread goes on trying.
        """
        if queue in self.temporary:
            self.consumer.announced.wait_for(queue, self.options.request_timeout)

    def left(self, queue: str) -> None:
        """A consumer of the queue was cancelled: if the queue is temporary and that was the last one, delete it.

        Not in a forked child: its parent may go on consuming.
        """
        if queue not in self.temporary or self._pid != os.getpid():
            return
        try:
            if self.used(queue):
                self.consumer.watch(queue)  # the others may be leaving just now, too
            else:
                self.temporary.discard(queue)
                self.listener.unbind(queue)
                self.store.purge(queue)
                self.topology.delete_queue(queue)
        except CouchDBError as exc:
            logger.warning('queue %r could not be removed and is left to its expiry: %s', queue, exc)
