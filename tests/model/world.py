"""The broker's own consumers over the model of CouchDB, under a scheduler: one step at a time, and nothing passes by itself.

Time passes for all alike. What the server's clock shows, and that of each process, is another matter: they may be set.

Nothing of the product is copied or replaced but what reaches outside: `Client.request` asks the model, threads are greenlets that
stop at each request and each sleep, clocks are the world's, and the feed is deaf (a consumer looks at its queues in each turn).
So whatever `Consumer`, `Claims`, `Unacked`, `Lease`, `Sweeper`, `Store` and `conflict_rules` do is what is explored.
"""

from __future__ import annotations

import itertools
import json
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from greenlet import getcurrent, greenlet

import kombu_couchdb
from kombu_couchdb import errors
from kombu_couchdb.consumer import io_thread, pending_writes
from kombu_couchdb.consumer.delivery import Credit, Delivery, Subscription
from kombu_couchdb.consumer.mailbox import Mailbox
from kombu_couchdb.couchdb import conflicts
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import Shape, anything
from kombu_couchdb.documents import workitem
from kombu_couchdb.leases import lease, sweeper
from kombu_couchdb.leases.peers import Peers
from kombu_couchdb.options import Options
from kombu_couchdb.queues.topology import Topology

from .couchdb import CouchDB, Write

Document = dict[str, Any]

QUEUE = 'q'

#: The lease in seconds, and how often an item is delivered.
LEASE, DELIVERIES = 60.0, 3

START = 1_763_709_000.0

#: The modules of the product whose clocks must be the world's: with one that is not, the model would prove nothing.
TIMED = {
    'candidates',
    'conflicts',
    'cycle',
    'io_thread',
    'janitor',
    'lease',
    'probes',
    'store',
    'sweeper',
    'unproven',
    'watch',
}


class Request(NamedTuple):
    """What a thread waits for an answer to."""

    path: str
    params: dict[str, Any]
    body: Any
    #: Set if it writes.
    write: Write | None


class Sleep(NamedTuple):
    """A thread that waits for a bell or an event."""

    timeout: float


class World:
    """A database, what consumes it, and the time."""

    def __init__(self, nodes: int, salt: int = 0) -> None:
        self.now = START
        #: By how many seconds the server's clock is wrong, and when one was set last.
        self.wrong, self.set_at = 0.0, float('-inf')
        self.couchdb = CouchDB(nodes, salt)
        self.processes: list[Process] = []
        #: How often each item was given to kombu, and which have been acknowledged.
        self.delivered: Counter[str] = Counter()
        self.acked: set[str] = set()
        #: Consumers whose leases were ended by others while they still relied on them.
        self.robbed: list[str] = []
        self._serial = itertools.count(1)

    def publish(self, name: str) -> None:
        """Store an item at all nodes."""
        message = {'body': '', 'headers': {}, 'properties': {'delivery_tag': name}}
        self.couchdb.store([workitem.new(name, QUEUE, message, self.now + self.wrong)])

    def set_server_clock(self, wrong: float) -> None:
        """Set the server's clock so many seconds wrong."""
        self.wrong, self.set_at = wrong, self.now

    def pass_time(self, seconds: float) -> None:
        """Let time pass: within seconds a write that reached one node reaches the others, unless it never does."""
        self.now += seconds
        if seconds > 1.0:
            for write in [write for write in self.couchdb.under_way if len(write.pending) < len(self.couchdb.nodes)]:
                for node in range(len(self.couchdb.nodes)):
                    self.couchdb.land(write, node)

    def start(self, skew: float, credit: int) -> None:
        """Start a process that consumes, with a clock that is `skew` seconds ahead."""
        self.processes.append(Process(self, skew, credit))

    def restart(self, who: int) -> Process:
        """End a process at once and start another in its place."""
        self.processes[who].kill()
        self.processes[who] = Process(self, self.processes[who].skew, self.processes[who].credit)
        return self.processes[who]

    def running(self, who: int) -> Process:
        """Return a process, a new one if it has ended."""
        return self.restart(who) if self.processes[who].ended else self.processes[who]

    def close(self) -> None:
        for process in self.processes:
            process.kill()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the product's modules find this world's clocks, threads and identities instead of the machine's."""
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now - START)
        modules = [
            import_module(found.name)
            for found in pkgutil.walk_packages(kombu_couchdb.__path__, 'kombu_couchdb.')
            if not found.name.endswith('.__main__')
        ]
        fakes: list[tuple[Any, str, Any]] = [
            (io_thread, 'threading', SimpleNamespace(Thread=_Thread, Event=_Event)),
            (io_thread, 'atexit', mock.Mock()),
            (pending_writes, 'Wakeup', _Wakeup),
            *(
                (module, 'random', SimpleNamespace(uniform=lambda low, high: (low + high) / 2))
                for module in (conflicts, sweeper)
            ),
            (lease, 'socket', SimpleNamespace(gethostname=lambda: 'host')),
            (lease, 'os', SimpleNamespace(getpid=lambda: 1)),
            (lease, 'uuid', SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f'{next(self._serial):04x}'))),
        ]
        with ExitStack() as stack:
            timed = [module for module in modules if getattr(module, 'time', None) is time]
            assert {module.__name__.rpartition('.')[2] for module in timed} >= TIMED, "these go by the machine's clock"
            for module, name, fake in [*fakes, *((module, 'time', clock) for module in timed)]:
                stack.enter_context(mock.patch.object(module, name, fake))
            yield


class Process:
    """A process that consumes: the I/O thread, stopped somewhere, and kombu's thread, which is the caller of `take` and `ack`."""

    def __init__(self, world: World, skew: float, credit: int) -> None:
        self._world, self.skew, self.credit = world, skew, credit
        self._mailbox = Mailbox[Delivery | Exception]()
        client = _ModelClient(world, skew)
        self.clock: ModelClock = client.clock  # type: ignore[assignment]
        self.consumer = io_thread.Consumer(
            client,
            Options(visibility_timeout=LEASE, delivery_limit=DELIVERIES),
            self._mailbox,
            _DeafNews(),
            Topology(client),
            'model',
        )  # type: ignore[arg-type]
        self.unacked = self.consumer.unacked
        self.unacked.subscribe(Subscription(QUEUE, Credit(credit)))
        #: What kombu has been given and has not settled.
        self.working: list[Delivery] = []
        self._thread: greenlet = self.consumer._thread.greenlet  # type: ignore[attr-defined]
        self.waiting: Request | Sleep = self._thread.switch()

    # -- the I/O thread

    def go(self, at: int = 0) -> None:
        """Let the thread run to its next request or sleep; a request is answered first, from the node `at` if it reads."""
        if isinstance(self.waiting, Sleep):
            return self._resume(None)
        if self.waiting.write is None:
            try:
                answer = self._world.couchdb.read(*self.waiting[:3], at % len(self._world.couchdb.nodes))
            except errors.CouchDBError as exc:
                return self._resume(exc)
            return self._resume(answer)
        write = self.waiting.write
        for more in range(len(self._world.couchdb.nodes)):
            if write.answers is None:
                self._world.couchdb.land(write, (at + more) % len(self._world.couchdb.nodes))
        self._world.robbed += [
            doc['_id']
            for doc, answer in zip(write.docs, write.answers or [], strict=True)
            if doc.get('_deleted') and self._ended_early(doc['_id'], answer)
        ]
        return self._resume(self._shape(write.answers))

    def _ended_early(self, doc_id: str, deletion: Document) -> bool:
        """Tell whether this process has just proven the deletion of the heartbeat of another one, whose lease is honoured."""
        return (
            bool(deletion.get('ok'))
            and not deletion.get('accepted')
            and any(
                other is not self
                and not other.ended
                and other.consumer.id == doc_id
                and other.consumer._cycle.lease.valid
                for other in self._world.processes
            )
        )

    def _shape(self, answers: Any) -> Any:
        assert isinstance(self.waiting, Request)
        if self.waiting.path == '/_bulk_docs':
            return answers
        answer = answers[0]
        return errors.Conflict(answer['id']) if answer.get('error') == 'conflict' else answer

    def cut(self) -> None:
        """Let the connection break: the thread gets no answer, whatever became of its request."""
        self._resume(errors.ServerUnavailable('cut'))

    def _resume(self, answer: Any) -> None:
        waiting = self._thread.throw(answer) if isinstance(answer, Exception) else self._thread.switch(answer)
        if not self._thread.dead:
            self.waiting = waiting

    @property
    def asks(self) -> bool:
        """Whether the I/O thread waits for an answer."""
        return not self.ended and isinstance(self.waiting, Request)

    @property
    def ended(self) -> bool:
        """Whether the I/O thread has come to its end."""
        return bool(self._thread.dead)

    def stop(self) -> None:
        """Ask it to end: it gives back what it holds."""
        self.consumer._closing.set()

    def kill(self) -> None:
        """End it at once; what it has sent is under way all the same."""
        self._thread.throw()
        self._mailbox.close()

    # -- kombu's thread

    @property
    def has_mail(self) -> bool:
        """Whether there is something in the mailbox."""
        return len(self._mailbox) > 0

    def take(self) -> Delivery | None:
        """Take the next delivery and return it if it may be handed over, to be worked at."""
        found = self._mailbox.pop()
        if isinstance(found, Exception):
            raise found
        if found is None or not self.unacked.deliver(found):
            return None
        self.working.append(found)
        self._world.delivered[found.doc['_id']] += 1
        return found

    def ack(self) -> None:
        """Be done with the oldest delivery."""
        delivery = self.working.pop(0)
        if delivery.tag in self.unacked._held:
            self._world.acked.add(delivery.doc['_id'])
        self.unacked.ack(delivery.tag)

    def requeue(self) -> None:
        """Give the oldest delivery back."""
        self.unacked.release(self.working.pop(0).tag)

    @property
    def held(self) -> Mapping[str, Document]:
        """What this process may believe to hold, by id: under a lease that is honoured."""
        if self.ended or not self.consumer._cycle.lease.valid:
            return {}
        return {delivery.doc['_id']: delivery.doc for delivery in self.unacked._held.values()}


class ModelClock:
    """What `ServerClock` tells a process: its local clock, corrected with each answer."""

    def __init__(self, world: World, skew: float) -> None:
        self._world, self._skew, self._began = world, skew, world.now
        #: By how many seconds the local clock is wrong, beyond the skew that no answer reveals.
        self.wrong = 0.0
        self._offset = world.wrong

    def now(self) -> float:
        return self._world.now + self._skew + self.wrong + self._offset

    @property
    def agrees(self) -> bool:
        # Who starts when a clock has just been set cannot know how old a heartbeat is: see docs/explanation/model.rst.
        return self._offset == 0.0 and self._began - self._world.set_at > LEASE

    def observe(self) -> None:
        self._offset = self._world.wrong - self.wrong


class _ModelClient(Client):
    def __init__(self, world: World, skew: float) -> None:
        super().__init__(Address(host='model'))
        self._world, self.replicas = world, len(world.couchdb.nodes)
        self.clock = ModelClock(world, skew)  # type: ignore[assignment]

    def request(
        self,
        method: str,
        path: str | None,
        params: Any = None,
        body: Any = None,
        *,
        repeat: bool = False,
        shape: Shape = anything,
    ) -> Any:
        path = path or '/'
        body = json.loads(body) if isinstance(body, bytes) else body
        docs = body['docs'] if path == '/_bulk_docs' else [body] if method == 'PUT' else None
        answer = _wait(Request(path, dict(params or {}), body, self._world.couchdb.begin(docs) if docs else None))
        self.clock.observe()  # type: ignore[call-arg]
        assert shape(answer), f'the model answers {path} as CouchDB does not: {answer}'
        return answer


class _DeafNews:
    """Tells nothing: each turn looks at the queues anew."""

    def __init__(self) -> None:
        self.peers = Peers()
        self.listener = SimpleNamespace(binds=False)

    def take(self, candidates: Mapping[str, Any], eager: set[str]) -> tuple[list[Any], list[Any]]:
        for queue_candidates in candidates.values():
            queue_candidates.clear()
        return [], []

    def due_at(self) -> float | None:
        return None

    def start(self, on_change: Callable[[], None]) -> None:
        pass

    close = on_outage = lambda self: None


def _wait(what: Request | Sleep) -> Any:
    return getcurrent().parent.switch(what)


class _Thread:
    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.greenlet = greenlet(target)

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return not self.greenlet.dead


class _Event:
    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> None:
        _wait(Sleep(timeout))


class _Wakeup:
    def set(self, within: float = 0.0) -> None:
        pass

    def wait(self, timeout: float) -> None:
        _wait(Sleep(timeout))
