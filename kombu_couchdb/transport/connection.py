"""kombu's transport: one connection to one CouchDB database.

* URL: `couchdb://user:password@host:5984/database`, or `couchdbs://…` for TLS. User, password and database are
  percent-encoded; the default database is `celery`. A list `url;url` names the nodes of a cluster: if a node does not
  respond, the next one is used.
* Options: see `kombu_couchdb.options.Options`.
* A connection that only publishes has no thread. A connection that consumes has one for I/O and up to two for changes
  feeds, while it has something to do. They also end when the connection is garbage-collected without `close()`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import requests
from kombu.transport import virtual

from .. import errors
from ..consumer.delivery import Credit, Delivery, Mailbox, Pull, Subscription
from ..consumer.io_thread import IOThread
from ..consumer.unacked import Unacked
from ..couchdb.address import MASK, Address, joined, parse, redacted
from ..couchdb.client import Client
from ..couchdb.fork_safety import finalize
from ..couchdb.write_result import WriteResult
from ..documents.ids import CONSUMER
from ..documents.types import TaskError, WorkItem
from ..errors import CouchDBError
from ..leases.housekeeping import Lifetimes
from ..leases.lease import queues_of
from ..log import get_logger
from ..options import Options, login_options
from ..queues.databases import MAX_SEEN_ROWS, BroadcastsDatabase, ensure
from ..queues.fanout import Broadcaster, Listener
from ..queues.store import Store
from ..queues.topology import Topology
from ..rooms import rooms
from .channel import Channel
from .exchanges import EXCHANGE_TYPES
from .temporary_queues import TemporaryQueues

logger = get_logger(__name__)

#: The maximum number of messages delivered in a row, before the event loop serves its other file descriptors.
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
        exchange_type=frozenset(EXCHANGE_TYPES),
    )

    connection_errors = (*virtual.Transport.connection_errors, *errors.RETRIED)
    channel_errors = virtual.Transport.channel_errors
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()

    def __init__(self, client: Any, **kwargs: Any) -> None:
        self.options = Options.of(client.transport_options)
        super().__init__(client, **kwargs)
        self.polling_interval = None  # otherwise kombu's virtual transport sleeps between polls
        self.address = Address.of(
            scheme=str(client.transport_cls),
            host=client.hostname,
            port=client.port,
            database=client.virtual_host,
            default_database='celery',
            user=client.userid,
            password=client.password,
            tls=client.ssl,
            login_method=client.login_method,
            **login_options(self.options),
        )
        self.address = joined(self.address, _failover_nodes(self.options, self.address, client), 'broker_url')
        _hide_passwords(client)
        self._named = self.address
        self.couchdb = Client(self.address, self.options.http)
        #: What optional rooms store in another place than the queues.
        self.publishers = [publisher for room in rooms() if (publisher := room.publisher(self))]
        self.broadcasts = BroadcastsDatabase(self.couchdb, create=self.options.create_database)
        self.store, self.topology = Store(self.couchdb), Topology(self.couchdb, self.broadcasts)
        self.lifetimes = Lifetimes(self.topology)
        self.broadcaster = Broadcaster(self.broadcasts, self.options.fanout_retention)
        self.listener = Listener()
        self.temporary_queues = TemporaryQueues(self)
        self._mailbox = Mailbox()
        #: By subscription, the function that receives its deliveries: the I/O thread knows no channels.
        self._receivers: dict[Subscription, Callable[[Delivery], None]] = {}
        self._consumer: IOThread | None = None
        # For a connection that is garbage-collected without close(). If there is an I/O thread, it closes the mailbox.
        self._abandon = finalize(self, self._mailbox.close)
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
        """Connect to the database, and create it if it is missing; *raises* `CouchDBError`."""
        began = time.monotonic()
        channels = {room.database: room.channel for room in rooms() if room.database}
        rows, kind = ensure(self.couchdb, self.options.create_database, channels)
        self.topology.known.saw(rows, began, MAX_SEEN_ROWS)
        self.name_node()
        self.Channel = channels[kind]() if kind else Channel
        super().establish_connection()
        return self

    def name_node(self) -> None:
        """Copy the address of the node in use to kombu's connection.

        Its `port`, its `as_uri()` and Celery's "Connected to …" then show this node.
        """
        node, client = self.couchdb.node, self.client
        if node is not self._named and client is not None:
            self._named = node
            client.hostname, client.port, client.virtual_host = node.host, node.port, node.database
            client.userid, client.password, client.login_method = node.user, node.password, node.auth
            client.transport_cls = 'couchdbs' if node.tls else 'couchdb'

    def close_connection(self, connection: Any) -> None:
        """Release all claimed messages, and close the connection."""
        if self._pid != os.getpid():
            return  # in a forked child: the messages and threads belong to the parent
        super().close_connection(connection)
        self.temporary_queues.close()
        self._abandon.detach()
        if self._consumer is not None:
            timeout = self.options.http.seconds
            self._consumer.close(timeout, in_outage=self.temporary_queues.in_outage)
            self._consumer = None
        self._mailbox.close()
        self.store.close()
        self.broadcasts.close()
        for publisher in self.publishers:
            publisher.close()

    _collect = close_connection

    @property
    def consumer(self) -> IOThread:
        """The I/O thread; it is started when it is first used, and again after it has ended for lack of work."""
        if self._consumer is None or self._consumer.unacked.retired:
            self._abandon.detach()
            name = f'couchdb-{self.address.database}'
            self._consumer = IOThread(self.couchdb, self.options, self._mailbox, self.listener, self.topology, name)
            # The thread has no reference to this object, so a connection that is not closed can be garbage-collected.
            self._abandon = finalize(self, self._consumer.abandon)
        return self._consumer

    @property
    def unacked(self) -> Unacked:
        """The unacknowledged messages of this connection."""
        return (self._consumer or self.consumer).unacked

    @property
    def in_outage(self) -> bool:
        """Whether CouchDB did not respond to the last request of the I/O thread."""
        return self._consumer is not None and self._consumer.in_outage

    def _engage(self, take: Callable[[Unacked], bool]) -> IOThread:
        """Give work to the I/O thread and return the thread.

        `take` passes the work to an `Unacked`. It returns false if the I/O thread ends at this moment: then it is
        called again with that of a new thread.
        """
        while not take((consumer := self.consumer).unacked):
            pass
        return consumer

    # -- events

    def drain_events(self, connection: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Deliver one message, never more: kombu's pidbox calls this once for each reply that it expects.

        *Raises* `TimeoutError` if no message arrives within `timeout` seconds, or the error that ended the I/O thread.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._request_more()
        while not self._deliver_mail(1):
            if self._consumer is not None and self._consumer.ended and not len(self._mailbox):
                raise CouchDBError(f'{self.address.url}: this connection has ended after an error; connect again')
            if not self._mailbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError('no message arrived in time')  # socket.timeout is its older name

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let the event loop deliver messages when they arrive."""
        loop.add_reader(self._mailbox.fileno(), lambda *args: self._deliver_burst())

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Remove the mailbox from the event loop."""
        loop.remove_reader(self._mailbox.fileno())

    def _deliver_burst(self) -> None:
        try:
            self._deliver_mail(_BURST)
        finally:
            self._request_more()  # the event loop calls again if there are more messages

    def _request_more(self) -> None:
        self.name_node()
        if self._consumer is not None:
            self._consumer.unacked.request_more()

    def _deliver_mail(self, limit: int) -> int:
        """Deliver up to `limit` messages from the mailbox, and return how many were delivered."""
        delivered = 0
        while delivered < limit and (item := self._mailbox.pop()) is not None:
            if isinstance(item, Exception):
                raise item
            receive = self._receivers.get(item.subscription)
            if receive is not None and self.unacked.deliver(item):
                delivered += 1
                receive(item)
                item.received_by_kombu = True  # last: if `receive` raises an error, the delivery counts as an attempt
        return delivered

    def call_soon(self, function: Callable[[], None]) -> None:
        """Let the thread that drains events call a function. Any thread may call this."""
        self._mailbox.put(function)

    # -- for channels

    def store_items(self, docs: Sequence[WorkItem]) -> list[WriteResult]:
        """Store new WorkItems, and delete messages from the front of queues that exceed their length limit.

        It returns and *raises* what `Store.publish_each` does.
        """
        self.name_node()
        refused = self.store.publish_each(docs)
        if logger.isEnabledFor(logging.DEBUG):
            failed = {result.id for result in refused}
            for doc in docs:
                if doc['_id'] not in failed:
                    logger.debug('published message %s to queue %s', doc['_id'], doc['queue'])
        try:
            if self.topology.known.limits:
                self._trim({doc['queue'] for doc in docs})
            self.store.delete_without_queue(docs)
        except CouchDBError as exc:
            # The messages are stored, so an error would make the caller publish them twice.
            logger.warning('messages over the length limit of a queue are left to a sweep: %s', exc)
        return refused

    def _trim(self, queues: set[str]) -> None:
        for queue in queues:
            known = self.topology.known.limit(queue).length
            # Another process may have declared another limit since, so read it again before messages are deleted.
            if known is not None and self.store.exceeds(queue, known):
                length = self.topology.limit(queue).length
                if length is not None:
                    self.store.trim(queue, length)

    def subscribe(self, subscription: Subscription, receive: Callable[[Delivery], None]) -> None:
        """Start to deliver the messages of a queue to `receive(delivery)`, in the thread that drains events."""
        self._receivers[subscription] = receive
        self._engage(lambda unacked: unacked.subscribe(subscription))

    def cancel(self, subscription: Subscription) -> None:
        """Cancel a subscription; messages that are claimed for it and not delivered are released at once."""
        self.unacked.cancel(subscription)
        self._receivers.pop(subscription, None)

    def pull(self, queue: str, no_ack: bool) -> Delivery | None:
        """Claim the next message of a queue and return it, or None if there is none; *raises* `CouchDBError`.

        With `no_ack` the message is acknowledged instead of claimed.
        """
        pull = Pull(queue, no_ack)
        return self._engage(lambda unacked: unacked.pull(pull)).wait(pull)

    def keep_failure(self, delivery: Delivery, error: TaskError) -> None:
        """Keep a message whose task has failed after it was acknowledged as a dead letter; any thread may call this."""
        self._engage(lambda unacked: unacked.keep_failure(delivery, error))

    def set_credit(self, credit: Credit, limit: int) -> None:
        """Set the maximum number of unacknowledged messages of a channel; 0 is no limit."""
        if self._consumer is None:
            credit.limit = limit
        else:
            self._consumer.unacked.set_credit(credit, limit)

    def listen(self, exchange: str, queue: str) -> None:
        """Let a queue receive the broadcasts to `exchange` from now on."""
        if not self.listener.primed:
            self.listener.prime(self.broadcasts.stored())
        self.listener.bind(exchange, queue)

    def has_consumer(self, queue: str) -> bool:
        """Tell whether this or another connection has subscribed to the queue.

        A connection whose process was killed counts until a sweep deletes its heartbeat document.
        """
        if any(queue in channel._active_queues for channel in self.channels):
            return True
        own = self._consumer and self._consumer.id
        return any(
            queue in queues_of(row['doc']) for row in self.couchdb.id_range(CONSUMER, docs=True) if row['id'] != own
        )


def _failover_nodes(options: Options, address: Address, client: Any) -> tuple[Address, ...]:
    """Return the other addresses in kombu's failover list, starting with those after `address`."""
    login = login_options(options)
    given = [parse(url, 'broker_url', 'celery', tls=client.ssl, **login) for url in client.alt]
    given = [other for other in given if other.password != MASK]  # the URLs of a pickled connection have no passwords
    at = given.index(address) if address in given else -1
    return tuple(dict.fromkeys(other for other in given[at + 1 :] + given[: at + 1] if other != address))


def _hide_passwords(client: Any) -> None:
    """Show the URLs of regions and of failover nodes without passwords, in `inspect stats` for example.

    kombu's connection itself keeps the failover URLs: its clones need them, and kombu needs them when it switches to
    the next one. But Celery before 5.7 sends those in `client.info()` to remote control.
    """
    if regions := client.transport_options.get('regions'):
        shown = {name: redacted(url, '********') for name, url in regions.items()}
        client.transport_options = {**client.transport_options, 'regions': shown}
    if not client.alt or 'info' in vars(client):
        return
    original = client.info

    def info() -> dict[str, Any]:
        info: dict[str, Any] = original()
        info['alternates'] = [redacted(url) if isinstance(url, str) else url for url in info['alternates']]
        return info

    client.info = info
