"""Deliveries: messages, broadcasts and responses to `basic_get`, from the I/O thread to kombu's thread.

With the subscriptions that they are for, their credit, and the mailbox in which they arrive.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import inf
from typing import Any, NamedTuple

from kombu.utils.json import object_hook

from ..couchdb.client import Document
from ..couchdb.fork_safety import close_in_child, reset_in_child
from ..documents import dead_letter, workitem
from ..documents.body import attachments_with, body_stub
from ..documents.validation import MAX_LEVELS
from ..errors import CouchDBError
from ..flow import Throughput
from ..values import nesting, revision_parts

#: The prefix of the delivery tags of broadcasts.
BROADCAST_TAG = 'broadcast-'


@dataclass(eq=False)
class Credit:
    """How many messages a channel may hold: AMQP's prefetch count. The lock of `Unacked` guards it.

    A channel without a prefetch limit starts with one message that is claimed ahead. The number doubles when kombu's
    thread asks for more messages and finds none. So a program that receives one message and stops holds no others.
    """

    #: The prefetch count; 0 is no limit.
    limit: int = 0
    #: How many messages are claimed for the channel and not decided yet.
    held: int = 0
    #: How many of those are not delivered to kombu yet.
    waiting: int = 0
    #: How many of those that are held were put into the mailbox. The others are on the shelf, or wait for their bodies.
    handed: int = 0
    #: How many of those in the mailbox are tasks that have begun, and whose acks are not stored.
    begun: int = 0
    #: The messages claimed ahead.
    shelf: Shelf = field(default_factory=lambda: Shelf(), repr=False)
    #: Without a limit: how many messages were delivered to kombu since its thread last asked for more.
    delivered: int = 0
    #: Without a limit: how many messages are claimed ahead.
    ahead: int = 1
    #: With a limit: how fast the messages are worked off.
    rate: Throughput = field(default_factory=Throughput, repr=False)

    @property
    def free(self) -> int:
        """How many more may be claimed now. Without a limit a message counts until kombu's thread asks for more."""
        return self.limit - self.held if self.limit else self.ahead - self.waiting - self.delivered

    @property
    def is_full(self) -> bool:
        """Whether kombu has as many messages as the limit, and perhaps as many tasks whose acks are not stored."""
        return 0 < self.limit <= self.handed - min(self.begun, self.limit)

    def surplus(self, stock: float) -> int:
        """Return how many messages may be claimed beyond the limit, so that all last for `stock` seconds."""
        return self.rate.ahead(self.limit, stock, time.monotonic()) if self.limit else 0

    def room(self, stock: float | None) -> int:
        """Return how many more may be claimed now; if `stock` is given, also beyond the limit."""
        return self.free if stock is None else self.free + self.surplus(stock)

    def is_low(self, stock: float) -> bool:
        """Tell whether half of what may be claimed is worked off, or there is no limit: to claim more is urgent."""
        surplus = self.surplus(stock)
        return not self.limit or 2 * (self.free + surplus) >= self.limit + surplus

    def count(self, number: int) -> None:
        """Count so many more messages as claimed, and as not delivered yet."""
        self.held += number
        self.waiting += number

    def count_delivery(self) -> None:
        """Note that kombu's thread has received a message."""
        self.waiting -= 1
        if not self.limit:
            self.delivered += 1

    def request_more(self, most: int, *, found_nothing: bool) -> bool:
        """Note that kombu's thread asks for messages; tell whether more may be claimed, because there is no limit.

        If it `found_nothing`, twice as many messages as before are claimed ahead, up to `most`.
        """
        more, self.delivered = self.delivered > 0, 0
        if more and found_nothing:
            self.ahead = min(2 * self.ahead, most)
        return more

    def reset_ahead(self) -> None:
        """Forget how many messages are claimed ahead without a limit: the channel has no subscription any more."""
        self.delivered, self.ahead = 0, 1


class Shelf:
    """The messages of one channel that are claimed ahead. The queues take turns: a long one starves no other."""

    def __init__(self) -> None:
        #: By queue, the one that is served next first: its messages by delivery tag, in the order of their claims, and
        #: the monotonic times from which each has waited for too long.
        self.queues: dict[str, dict[str, tuple[Delivery, float]]] = {}

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for messages in self.queues.values() for delivery, _ in messages.values())

    @property
    def overdue_at(self) -> float:
        """The monotonic time at which the first message has waited for too long; infinite without one."""
        return min((next(iter(messages.values()))[1] for messages in self.queues.values()), default=inf)

    def put(self, delivery: Delivery, overdue_at: float) -> None:
        """Add a message, behind those of its queue."""
        self.queues.setdefault(delivery.doc['queue'], {})[delivery.tag] = delivery, overdue_at

    def pop(self) -> Delivery | None:
        """Remove and return the next message, or None."""
        if not self.queues:
            return None
        queue, messages = next(iter(self.queues.items()))
        delivery, _ = next(iter(messages.values()))
        self.remove(delivery)
        if queue in self.queues:
            self.queues[queue] = self.queues.pop(queue)  # the others are served before it
        return delivery

    def remove(self, delivery: Delivery) -> None:
        """Remove a message, if it is here."""
        messages = self.queues.get(delivery.doc['queue'], {})
        if messages.pop(delivery.tag, None) is not None and not messages:
            del self.queues[delivery.doc['queue']]


@dataclass(eq=False)
class Subscription:
    """One `basic_consume`. Without a reference to its channel: the I/O thread must not keep a dropped connection."""

    queue: str
    credit: Credit
    #: How many messages were claimed for it: of subscriptions with equal credit, the one with the fewest is next.
    claimed: int = 0


@dataclass(eq=False)
class Delivery:
    """A claimed message, or a broadcast.

    `doc` is the document as the claim stored it; with `basic_get` and `no_ack`, as it was before it was deleted.
    """

    doc: Document
    subscription: Subscription
    #: Whether kombu's callback for the message returned without an error. If the consumer then stops without an ack,
    #: the delivery does not count as an attempt.
    received_by_kombu: bool = False
    #: Whether the message had expired when it was delivered to kombu; see `workitem.delivers_expired`.
    expired: bool = False
    #: Whether the message needs no ack: a broadcast, or a message that was deleted by `basic_get` with `no_ack`.
    final: bool = False
    #: The message's body if it is an attachment. It is read after the claim (for `basic_get` before the claim), and is
    #: not part of the documents that are written.
    body: bytes | None = None
    #: How often the read of the body failed, and how often with an error that says that it can never be read.
    failures: int = 0
    final_failures: int = 0
    #: Whether the message was put into the mailbox, and whether kombu has taken it from there.
    handed: bool = False
    delivered: bool = False
    #: Whether a worker has it and has not begun to work on it, see `Message.set_waiting`.
    waiting: bool = False
    #: Whether its task has begun, so that its ack must be stored at once. Who waits for that before the task begins.
    begun: bool = False
    #: Whether CouchDB has refused the ack of a task that has begun: another consumer may have the message.
    is_refused: bool = False
    #: Keeps the message as a dead letter when that ack is stored: its task has failed.
    on_stored: Callable[[], None] | None = field(default=None, repr=False)
    confirmed: Callable[[bool], None] | None = field(default=None, repr=False)
    #: Since when the message was ready, by the clock of this machine, as of its delivery to kombu.
    ready_since: float = 0.0
    tag: str = field(init=False)

    def __post_init__(self) -> None:
        # The tag contains the revision, so two deliveries of one message have different tags: a late ack of the first
        # delivery does not acknowledge the second.
        self.tag = f'{self.doc["_id"]}:{self.doc.get("_rev", "")}'

    @property
    def credit(self) -> Credit:
        """The credit of its channel."""
        return self.subscription.credit

    @property
    def needs_body(self) -> bool:
        """Whether the body has not been read yet."""
        return self.body is None and body_stub(self.doc) is not None

    def settle(self, stored: bool) -> None:
        """Note whether the ack of its task, which has begun, is stored. If not, the task may run elsewhere."""
        self.is_refused = not stored
        if stored and self.on_stored is not None:
            self.on_stored()

    def kept(self, failed: Document) -> Document:
        """Return the dead letter to write, after its ack, for a task that has failed; it has an id of its own.

        A process that is killed between the two writes leaves no failure, and no message, as always then.
        """
        doc = dead_letter.copy(failed)
        return doc if self.body is None else {**doc, '_attachments': attachments_with(self.body)}

    def payload(self) -> dict[str, Any]:
        """Return the message as kombu's virtual transports have it; *raises* `ValueError` or `TypeError`."""
        if self.final and nesting(self.doc['message'])[0] > MAX_LEVELS:  # a broadcast: nothing has checked this yet
            raise ValueError('the message is nested in too many levels')
        message = {**self.doc['message'], 'headers': _decoded(self.doc['message']['headers'])}
        date = self.doc.get('date')
        if isinstance(date, (int, float)) and date > time.time():
            # It is due by the server's clock, but not by this machine's: without this, Celery would wait.
            message['headers']['eta'] = datetime.now(timezone.utc).isoformat()
        if self.expired:
            # It has expired by the server's clock. Celery compares with this machine's clock, and must not run it.
            message['headers']['expires'] = datetime.fromtimestamp(0, timezone.utc).isoformat()
        attempts = self.doc.get('attempts') or 1
        info = {
            **message['properties'].get('delivery_info', {}),
            'redelivered': attempts > 1 or 'consumer' in self.doc,
            'delivery_count': attempts,
            # The newer of two deliveries of a message has the higher number.
            'delivery': revision_parts(self.doc.get('_rev'))[0],
            'queue': self.doc.get('queue'),
            'ready_since': self.ready_since,
        }
        if 'key' in self.doc:
            info['claimed'] = self.doc.get('claimed')  # publishers may change the revision of the claim
        if self.body is not None:
            message['body'] = self.body
        return {**message, 'properties': {**message['properties'], 'delivery_tag': self.tag, 'delivery_info': info}}


class Snapshot(NamedTuple):
    """What the I/O thread reads of the unacknowledged messages at one moment."""

    #: By queue: how many messages may be claimed within the prefetch counts.
    credit: dict[str, int]
    #: The queues from which messages are claimed ahead, and the monotonic time from which one has waited for too long.
    shelved: set[str]
    overdue_at: float
    #: Whether the bodies of some messages have not been read yet.
    awaits_bodies: bool


class Pull:
    """One `basic_get`: kombu's thread waits while the I/O thread claims one message."""

    def __init__(self, queue: str, no_ack: bool) -> None:
        self.queue, self.no_ack = queue, no_ack
        #: As in AMQP, a message that `basic_get` returns does not count for the channel's prefetch count.
        self.subscription = Subscription(queue, Credit(limit=1))
        #: The ids of messages whose claims CouchDB refused.
        self.refused: set[str] = set()
        self._done = threading.Event()
        self._result: Delivery | Exception | None = None

    def set_result(self, result: Delivery | Exception | None) -> None:
        """End the wait of the other thread with a delivery, with None (the queue has no message) or with an error."""
        self._result = result
        self._done.set()

    def wait(self, thread: threading.Thread) -> Delivery | None:
        """Wait for the result; *raises* it if it is an error, or `CouchDBError` if the I/O thread has ended."""
        while not self._done.wait(1.0):
            if not thread.is_alive():
                raise CouchDBError('the connection was closed')
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def broadcast(message: Document, subscription: Subscription) -> Delivery:
    """Return a broadcast as a delivery: it needs no credit and no ack."""
    return Delivery(
        {'_id': BROADCAST_TAG + workitem.new_id(time.time()), 'message': message},
        subscription,
        final=True,
    )


class Mailbox:
    """The queue of deliveries from the I/O thread to kombu's thread, with a socket pair that wakes the reader.

    An event loop can watch the reading socket, and a blocking reader waits for the same socket. The pair is made when
    one of them begins: a connection that only publishes has no sockets here. (kombu's own
    `hub.call_soon` wakes its loop in 0.2 ms if a file descriptor is registered, and in 55 ms if none is: measured with
    kombu 5.7.) A reader waits with the socket's own timeout, because gevent and eventlet replace that.
    """

    def __init__(self) -> None:
        self._items: deque[Delivery | Exception | Callable[[], None]] = deque()
        self._closed = False
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Begin anew, empty, in a forked child: deliveries and sockets belong to the parent."""
        self._items.clear()
        self._lock = threading.Lock()
        self._signalled = False
        #: The socket that is read and the one that is written.
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when an item arrives; -1 if the mailbox is closed."""
        reader = self._reader()
        return -1 if reader is None else reader.fileno()

    def put(self, item: Delivery | Exception | Callable[[], None]) -> None:
        """Add an item and wake the reader, which also calls the functions."""
        with self._lock:
            self._items.append(item)
            self._signal()

    def pop(self) -> Delivery | Exception | None:
        """Return the oldest delivery or error, or None; call the functions before it."""
        while True:
            with self._lock:
                if not self._items:
                    if self._ends and self._signalled:
                        self._signalled = False
                        self._ends[0].settimeout(1.0)  # the byte has arrived already
                        self._ends[0].recv(1)
                    return None
                item = self._items.popleft()
            if isinstance(item, (Delivery, Exception)):
                return item
            item()

    def wait(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds (None: without end) for an item; tell whether one arrived.

        *Raises* `OSError` if the mailbox is closed.
        """
        if self._items:
            return True
        if (reader := self._reader()) is None:
            raise OSError(errno.EBADF, 'this connection is closed')
        reader.settimeout(max(timeout, 0.000001) if timeout is not None else None)
        try:
            # Only peek, so that the descriptor stays readable for an event loop: `pop` removes the byte.
            reader.recv(1, socket.MSG_PEEK)
        except (TimeoutError, BlockingIOError):
            return False
        return True

    def close(self) -> None:
        """Close the sockets. Items may still be put and popped."""
        with self._lock:
            self._closed = True
            ends, self._ends = self._ends, None
            for end in ends or ():
                end.close()

    def _reader(self) -> socket.socket | None:
        """Return the socket that is read, None if the mailbox is closed."""
        with self._lock:
            if self._ends is None and not self._closed:
                reader, writer = socket.socketpair()
                self._ends = close_in_child(reader), close_in_child(writer)
                if self._items:
                    self._signal()
            return self._ends[0] if self._ends else None

    def _signal(self) -> None:
        """Make the descriptor readable. The lock is held."""
        if self._ends and not self._signalled:
            self._signalled = True
            self._ends[1].send(b'\0')


def _decoded(value: Any) -> Any:
    """Return a header with dates, UUIDs and decimals in the place of kombu's `{"__type__": …}`."""
    if isinstance(value, dict):
        members = {name: _decoded(member) for name, member in value.items()}
        try:
            return object_hook(members) if '__type__' in members else members
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return members  # an object of the publisher that has a member of this name
    return [_decoded(member) for member in value] if isinstance(value, list) else value
