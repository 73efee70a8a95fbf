"""A fleet of consumers on simulated time: who listens, who rests, who looks, and who rings.

The code of the consumers runs as it is, with its notifier, its feeds of both databases, bells and looks. The model
replaces the server, the network, the threads and the clocks: time passes from one event to the next, so a minute of a
fleet takes less than a second.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from heapq import heappop, heappush
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kombu_couchdb import errors
from kombu_couchdb.consumer import io_thread, unacked
from kombu_couchdb.consumer.delivery import Credit, Delivery, Mailbox, Subscription
from kombu_couchdb.couchdb import conflicts
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.changes import LIMIT, Changes, Follower
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.ids import BROADCAST, CONSUMER
from kombu_couchdb.fleet import attention, claim_order, notifier
from kombu_couchdb.fleet.attention import Peers
from kombu_couchdb.leases import lease, sweeper
from kombu_couchdb.limits import permits
from kombu_couchdb.options import Options
from kombu_couchdb.queues import quarantine
from kombu_couchdb.queues.databases import BroadcastsDatabase
from kombu_couchdb.queues.declarations import Declarations
from kombu_couchdb.queues.fanout import Listener
from kombu_couchdb.queues.topology import Topology

from .couchdb import CouchDB, ModelClient, Write, seen
from .world import QUEUE, START, ModelClock, SilentEvent, Sleep, ThreadOfModel, product_modules, wait

#: The lease in seconds.
LEASE = 20.0

#: How long a message may wait, in seconds, while a consumer with credit lives: if a listener lives that all know of,
#: and in any case. Resting consumers look every 30 seconds at least.
SERVED_SECONDS, MAX_SECONDS = 5.0, 31.0

#: A consumer that has been one of the first ranks for so long, in seconds, knows that it is a listener.
KNOWN_SECONDS = 12.0

#: The most cycles of one consumer in a second.
MAX_CYCLES = 200

#: How often the promises are checked, in seconds.
_TICK = 0.25

#: The time of a request, and the least time between two longpolls, in seconds.
_LATENCY, _LONGPOLL = 0.004, 0.015

#: No sleep ends before its time because numbers are rounded.
_ROUNDED = 1e-6


class Database(CouchDB):
    """A database of one node, with its changes."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(1)
        self._fleet = fleet
        #: The ids of the documents that were written, in order.
        self.changed: list[str] = []
        self.feeds: list[Feed] = []

    def land(self, write: Write, node: int, *, lost: bool = False) -> None:
        super().land(write, node, lost=lost)
        if stored := [answer['id'] for answer in write.answers or () if answer.get('ok')]:
            self.changed += stored
            for feed in self.feeds:
                self._fleet.after(_LATENCY, feed.check)

    def read(self, path: str, params: dict[str, Any], body: Any, at: int) -> Any:
        if path == '/':
            return {'cluster': {'n': 1}, 'update_seq': str(len(self.changed))}
        return super().read(path, params, body, at)

    def doc(self, doc_id: str) -> Document | None:
        """Return a document, or None if it does not exist."""
        return seen(doc_id, self.nodes[0].trees.get(doc_id, {}))

    def changes(self, since: int, selector: Document | None) -> tuple[list[Document], int]:
        """Return up to `LIMIT` rows of changes after `since`, and the sequence of the last."""
        last = {doc_id: number for number, doc_id in enumerate(self.changed[since:], since + 1)}
        rows: list[Document] = []
        for doc_id, number in last.items():
            doc = self.doc(doc_id) or {'_id': doc_id, '_deleted': True}
            if selector is None or matches(doc, selector):
                rows.append({'seq': str(number), 'doc': json.loads(json.dumps(doc))})
        rows.sort(key=lambda row: int(row['seq']))
        return rows[:LIMIT], int(rows[LIMIT - 1]['seq']) if len(rows) >= LIMIT else len(self.changed)


def matches(doc: Document, selector: Document) -> bool:
    """Tell whether a document matches a Mango selector, as far as the product uses the language."""
    return all(
        any(matches(doc, one) for one in wanted) if name == '$or' else _has(doc, name, wanted)
        for name, wanted in selector.items()
    )


def _has(doc: Document, name: str, wanted: Any) -> bool:
    if not isinstance(wanted, dict):
        return name in doc and bool(doc[name] == wanted)
    operators: dict[str, Callable[[Any, Any], bool]] = {
        '$in': lambda value, to: value in to,
        '$exists': lambda value, to: (value is not None) == to,
        '$gt': lambda value, to: value is not None and value > to,
        '$lt': lambda value, to: value is not None and value < to,
    }
    return all(operators[operator](doc.get(name), to) for operator, to in wanted.items())


class Feed(Follower):
    """A follower of a database of the model; nothing is silent, so the heartbeat does not matter."""

    def __init__(self, client: FleetClient, *arguments: Any, **settings: Any) -> None:
        super().__init__(client, *arguments, **settings)
        self._member, self._database = client.member, client.database
        self._fleet, self._is_secondary = client.member.fleet, client.is_secondary
        self._since: int | None = None
        self._selector: Document | None = None
        self._not_before = -inf
        self._database.feeds.append(self)

    def _ask(self, request: tuple[Any, Document] | None) -> None:
        self._asked = request
        if request is None:
            self._since = None
            return
        since, body = request
        self._since, self._selector = int(since), body.get('selector')
        self._not_before = max(self._not_before, self._fleet.elapsed + _LATENCY)
        self._fleet.after(self._not_before - self._fleet.elapsed, self.check)

    def close(self) -> None:
        super().close()
        if self in self._database.feeds:
            self._database.feeds.remove(self)

    def check(self) -> None:
        """Report changes, if there are any."""
        if self._since is None:
            return
        if (wait_for := max(self._not_before, self._member.paused_until) - self._fleet.elapsed) > 0:
            self._fleet.after(wait_for, self.check)
            return
        if self._is_secondary and (error := self._member.refused()):
            self._since = None
            self._note(Changes((), None, error), self._longpoll.generation)
            return
        rows, last = self._database.changes(self._since, self._selector)
        if self._fleet.loses_bells:
            rows = [row for row in rows if row['doc'].get('type') != 'Bell']
        if rows:
            self._since = None
            self._not_before = self._fleet.elapsed + max(_LONGPOLL, self._interval)
            late = self._fleet.feed_delay if self._is_secondary else 0.0
            report = Changes(rows, last)
            self._fleet.after(late, lambda: self._arrive(report))

    def _arrive(self, report: Changes) -> None:
        if self._member.alive:
            self._note(report, self._longpoll.generation)


class FleetClient(ModelClient):
    """A client of the broker's database, or, if it `is_secondary`, of the broadcasts database."""

    def __init__(self, member: Member, *, is_secondary: bool = False) -> None:
        name = 'broadcasts' if is_secondary else 'broker'
        super().__init__(Address(host=f'model-{member.number}-{member.fleet.number}', database=name))
        self.member, self.is_secondary, self.replicas = member, is_secondary, 1
        self.database: Database = member.fleet.broadcasts if is_secondary else member.fleet.broker
        self.clock = member.clock

    def beside(self, database: str) -> Client:
        return FleetClient(self.member, is_secondary=True)

    def close(self) -> None:
        pass

    def answer(self, method: str, path: str, params: dict[str, Any], body: Any) -> Any:
        fleet = self.member.fleet
        wait(Travel(fleet.dice.uniform(0.3, 1.0) * _LATENCY))
        if self.is_secondary and (error := self.member.refused()):
            raise error
        fleet.requests[path.rpartition('/')[2] if '/_view/' in path else method] += 1
        answer = super().answer(method, path, params, body)
        wait(Travel(_LATENCY / 2))
        return answer


@dataclass
class Travel:
    """A request or a response is under way for so many seconds."""

    seconds: float


class Wakeup:
    """The wakeup of an I/O thread."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.times: list[float] = []
        self.on_set: Callable[[float], None] = lambda at: None

    def set(self, within: float = 0.0) -> None:
        self.times.append(self._fleet.elapsed + within)
        self.on_set(self.times[-1])

    def wait(self, timeout: float) -> bool:
        wait(Sleep(min([timeout, *(at - self._fleet.elapsed for at in self.times)])))
        self.times.clear()
        return True


class Member:
    """A consuming process: its I/O thread, and kombu's thread, which runs each task for its time."""

    def __init__(self, fleet: Fleet, number: int, limit: int) -> None:
        self.fleet, self.number = fleet, number
        self.clock = ModelClock(fleet, 0.0)
        self.paused_until = -inf
        #: Whether it has no access to the broadcasts database.
        self.is_cut_off = False
        self.alive = True
        self._turn, self._sleeps = 0, False
        #: Since when it is one of the first ranks, as all documents of consumers tell.
        self.ranks_since = inf
        self._mailbox = Mailbox()
        client = FleetClient(self)
        broadcasts = BroadcastsDatabase(client)
        topology = Topology(client, broadcasts, Declarations())
        listener = Listener()
        listener.bind('news', 'news')
        options = Options(visibility_timeout=LEASE)
        self.consumer = io_thread.IOThread(client, options, self._mailbox, listener, topology, 'model')
        self.notifier = self.consumer._cycle.notifier
        self.unacked = self.consumer.unacked
        self.unacked.wakeup.on_set = self._on_set  # type: ignore[attr-defined]
        #: The broadcasts that it has received.
        self.heard: set[str] = set()
        self.unacked.broadcast = self._hear  # type: ignore[method-assign]
        self._subscriptions = [Subscription(queue, Credit(limit)) for queue in fleet.queues]
        for subscription in self._subscriptions:
            self.unacked.subscribe(subscription)
        self._thread = self.consumer._thread.greenlet  # type: ignore[attr-defined]
        #: How many cycles began in this second.
        self.cycles = 0
        self.resume(0)

    def _hear(self, queue: str, message: Document) -> None:
        self.heard.add(message['body'])

    def refused(self) -> errors.CouchDBError | None:
        """Return the error of a request to the broadcasts database; None if the server carries it out."""
        return errors.AccessDenied('locked') if self.is_cut_off or self.fleet.is_locked else None

    def _on_set(self, at: float) -> None:
        if self._sleeps:
            turn = self._turn
            self.fleet.after(at - self.fleet.elapsed, lambda: self.resume(turn))

    def resume(self, turn: int) -> None:
        """Let the I/O thread run to its next request or sleep, unless it has run since."""
        if not self.alive or turn != self._turn:
            return
        if (pause := self.paused_until - self.fleet.elapsed) > 0:
            self.fleet.after(pause, lambda: self.resume(turn))
            return
        if self._sleeps:
            self._count()
        self._turn += 1
        turn, self._sleeps = self._turn, False
        waits = self._thread.switch()
        if self._thread.dead:
            self.alive = False
            return
        self._receive()
        if isinstance(waits, Travel):
            seconds = waits.seconds
        else:
            self._sleeps = True
            times = self.unacked.wakeup.times  # type: ignore[attr-defined]
            seconds = min([waits.timeout, *(at - self.fleet.elapsed for at in times)])
        if seconds < inf:
            self.fleet.after(seconds + _ROUNDED, lambda: self.resume(turn))

    def _count(self) -> None:
        self.cycles += 1
        assert self.cycles <= MAX_CYCLES, f'consumer {self.number} has {self.cycles} cycles within a second'

    def _receive(self) -> None:
        while len(self._mailbox):
            found = self._mailbox.pop()
            if isinstance(found, Exception):
                raise AssertionError('the consumer has given up') from found
            if found is None or not self.unacked.deliver(found):
                continue
            self.fleet.after(self.fleet.messages[found.doc['_id']].seconds, self._ack_of(found))

    def _ack_of(self, delivery: Delivery) -> Callable[[], None]:
        def ack() -> None:
            if self.alive and self.paused_until > self.fleet.elapsed:
                self.fleet.after(self.paused_until - self.fleet.elapsed, ack)
            elif self.alive:
                self.unacked.ack(delivery.tag)

        return ack

    def set_limit(self, limit: int) -> None:
        """Set the prefetch count of each queue."""
        for subscription in self._subscriptions:
            self.unacked.set_credit(subscription.credit, limit)

    def kill(self) -> None:
        """Kill the process."""
        self.alive = False
        self._thread.throw()
        self._mailbox.close()

    def stop(self) -> None:
        """Let the process end in order."""
        self.consumer._closing.set()
        self.unacked.wakeup.set()

    @property
    def id(self) -> str:
        """The id of its heartbeat document."""
        return self.consumer.id

    @property
    def is_healthy(self) -> bool:
        """Whether it runs."""
        return self.alive and self.paused_until <= self.fleet.elapsed and not self.consumer._closing.is_set()

    @property
    def can_ring(self) -> bool:
        """Whether it would store a bell: it has access, and has not been refused a few seconds ago."""
        return not self.is_cut_off and self.notifier.broadcasts._database.next_look <= self.fleet.elapsed

    @property
    def is_free(self) -> bool:
        """Whether it runs, and has credit for the first queue."""
        return QUEUE in self.free_for

    @property
    def free_for(self) -> list[str]:
        """The queues for which it has credit, if it runs."""
        return [queue for queue, credit in self.unacked.credit().items() if credit > 0] if self.is_healthy else []


@dataclass
class Message:
    """A message that was published."""

    #: How long its task takes, in seconds, and when it is due.
    seconds: float
    due: float
    queue: str
    #: How long it has waited while a consumer with credit lived: in all, and while a known listener lived, too.
    waited: float = 0.0
    served: float = 0.0


class Fleet:
    """The databases, the consumers and the time.

    Each consumer looks, listens and wakes as rarely as in a fleet that is `scale` times as large.
    """

    _numbers = itertools.count()

    def __init__(self, seed: int = 0, scale: float = 20.0, queues: Sequence[str] = (QUEUE,)) -> None:
        self.number, self.queues = next(self._numbers), queues
        self.elapsed, self.wrong, self.set_at = 0.0, 0.0, -inf
        self.dice, self._scale = Random(seed), scale
        self.broker, self.broadcasts = Database(self), Database(self)
        self.members: list[Member] = []
        self.messages: dict[str, Message] = {}
        self.loses_bells = False
        self.feed_delay = 0.0
        #: Whether nobody has access to the broadcasts database.
        self.is_locked = False
        self.requests = Counter[str]()
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._serial = itertools.count(1)
        self._free: set[tuple[int, str]] = set()
        self._checked_at = self._counted_at = 0.0

    @property
    def now(self) -> float:
        """The server's time, in seconds since the epoch."""
        return START + self.elapsed

    def after(self, seconds: float, happen: Callable[[], Any]) -> None:
        """Let something happen after so many seconds."""
        heappush(self._events, (self.elapsed + max(0.0, seconds), next(self._serial), happen))

    def pass_time(self, seconds: float) -> None:
        """Let everything happen that happens in the next seconds, and check the promises."""
        end = self.elapsed + seconds
        while self.elapsed < end:
            tick = min(end, self._checked_at + _TICK)
            while self._events and self._events[0][0] <= tick:
                at, _, happen = heappop(self._events)
                self.elapsed = max(self.elapsed, at)
                happen()
            self.elapsed = tick
            if tick >= self._checked_at + _TICK:
                self.check(tick - self._checked_at)
                self._checked_at = tick

    def check_feeds(self) -> None:
        """Let the feeds of the broadcasts database learn whether they have access."""
        for feed in self.broadcasts.feeds:
            self.after(_LATENCY, feed.check)

    def join(self, limit: int = 1) -> Member:
        """Start a consumer."""
        self.members.append(Member(self, len(self.members), limit))
        return self.members[-1]

    def publish(self, seconds: float, due_in: float | None = None, queue: str = QUEUE) -> str:
        """Publish a message whose task takes so many seconds; perhaps a planned one."""
        name = f'm{next(self._serial):05x}'
        eta = {} if due_in is None else {'eta': _iso(self.now + due_in)}
        message = {'body': '', 'headers': {'id': name, **eta}, 'properties': {'delivery_tag': name}}
        doc = {**workitem.new(name, queue, message, self.now)}
        self.messages[name] = Message(seconds, self.elapsed + (due_in or 0.0), queue)
        self.broker.store([doc])
        return name

    def broadcast(self) -> str:
        """Store a broadcast, and return what it says."""
        body = f'n{next(self._serial):05x}'
        message = {'body': body, 'headers': {}, 'properties': {'delivery_tag': body}}
        doc = {'_id': BROADCAST + body, 'type': 'Broadcast', 'exchange': 'news', 'publisher': body, 'number': 1}
        database = self.broker if self.is_locked else self.broadcasts
        database.store([{**doc, 'date': self.now, 'expires': self.now + 60.0, 'message': message}])
        return body

    @property
    def living(self) -> list[Member]:
        """The members that run."""
        return [member for member in self.members if member.is_healthy]

    @property
    def listeners(self) -> list[Member]:
        """The members that follow the broker's feed now."""
        return [member for member in self.living if member.notifier.attention.listens]

    def waiting(self) -> list[str]:
        """Return the messages that are due and not claimed; forget those that are done."""
        found = []
        for name, message in list(self.messages.items()):
            doc = self.broker.doc(name)
            if doc is None:
                del self.messages[name]
            elif workitem.is_waiting(doc) and message.due <= self.elapsed:
                found.append(name)
        return found

    def check(self, seconds: float) -> None:
        """Check what the last seconds have shown."""
        self._note_ranks()
        known = any(self.elapsed - member.ranks_since >= KNOWN_SECONDS for member in self.living)
        before, self._free = self._free, {(m.number, queue) for m in self.members for queue in m.free_for}
        free_for, waiting = {queue for _, queue in self._free & before}, set(self.waiting())
        for name, message in self.messages.items():
            if name in waiting and message.queue in free_for:
                message.waited += seconds
                message.served = message.served + seconds if known else 0.0
                assert message.waited <= MAX_SECONDS, f'{name} waits for {message.waited:g} s'
                assert message.served <= SERVED_SECONDS, f'{name} waits for {message.served:g} s although one listens'
            elif name not in waiting:
                message.waited = message.served = 0.0
        if self.elapsed - self._counted_at >= 1.0:
            for member in self.members:
                member.cycles = 0
            self._counted_at = self.elapsed

    def _note_ranks(self) -> None:
        peers = Peers()
        for doc_id in self.broker.nodes[0].trees:
            if doc_id.startswith(CONSUMER) and (doc := self.broker.doc(doc_id)):
                peers.seen(doc)
        for member in self.members:
            ranks = member.id in peers.listeners and member.can_ring and member.is_healthy
            member.ranks_since = min(member.ranks_since, self.elapsed) if ranks else inf

    def close(self) -> None:
        """End all processes."""
        for member in self.members:
            member.kill()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Patch the clocks, threads, feeds and dice of the product."""
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.elapsed)
        fakes: list[tuple[Any, str, Any]] = [
            (io_thread, 'threading', SimpleNamespace(Thread=ThreadOfModel, Event=SilentEvent)),
            (io_thread, 'at_exit', mock.Mock()),
            (unacked, 'Wakeup', lambda: Wakeup(self)),
            (notifier, 'Follower', Feed),
            (attention, '_FLEET_SECONDS', attention._FLEET_SECONDS * self._scale),
            (attention, '_WAKE_SECONDS', attention._WAKE_SECONDS * self._scale),
            (attention, '_FREE_SHARE', attention._FREE_SHARE / self._scale),
            (lease, 'socket', SimpleNamespace(gethostname=lambda: 'host')),
            (lease, 'uuid', SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f'{self.dice.getrandbits(64):016x}'))),
            *(
                (module, 'random', self.dice)
                for module in (attention, claim_order, permits, quarantine, sweeper, conflicts)
            ),
            *((module, 'time', clock) for module in product_modules()),
        ]
        with ExitStack() as stack:
            for module, name, fake in fakes:
                stack.enter_context(mock.patch.object(module, name, fake))
            yield


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat()
