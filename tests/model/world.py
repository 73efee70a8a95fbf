"""The real consumers of the broker, run one step at a time against the model of CouchDB.

Time passes only when the test says so, and equally for all processes. The wall clocks of the server and of each process
may be wrong.

The model replaces only the edges of the product: `Client.request` asks the model of CouchDB, threads are greenlets that
stop at each request and each sleep, clocks are those of the world, and there is no changes feed (each consumer reads
its queues in each pass). The code of `IOThread`, `Claims`, `Unacked`, `Lease`, `Sweeper`, `Store` and `conflict_rules`
is explored as it is.
"""

from __future__ import annotations

import itertools
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from math import inf
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from greenlet import getcurrent, greenlet

import kombu_couchdb
from kombu_couchdb import errors
from kombu_couchdb.admin import jobs
from kombu_couchdb.consumer import cycle, io_thread, unacked, worker_hooks
from kombu_couchdb.consumer.delivery import Credit, Delivery, Mailbox, Subscription
from kombu_couchdb.couchdb import conflicts
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.failures import from_answer
from kombu_couchdb.documents import workitem
from kombu_couchdb.fleet.attention import Attention, Peers
from kombu_couchdb.flow import Throughput
from kombu_couchdb.leases import lease, sweeper
from kombu_couchdb.options import Options
from kombu_couchdb.queues.declarations import Declarations
from kombu_couchdb.queues.fanout import Listener
from kombu_couchdb.queues.topology import Topology

from .couchdb import CouchDB, ModelClient, Write

if TYPE_CHECKING:
    from .fleet import Fleet

Document = dict[str, Any]

QUEUE = 'q'

#: The lease in seconds, and the delivery limit.
LEASE, DELIVERIES = 60.0, 3

START = 1_763_709_000.0

#: For how long completed items are kept, in seconds: longer than any exploration.
_KEPT = 1e8

#: The modules of the product whose clocks must be the world's: with one that is not, the model would prove nothing.
TIMED = {
    'attention',
    'candidates',
    'conflicts',
    'cycle',
    'delivery',
    'flow',
    'gate',
    'housekeeping',
    'io_thread',
    'lease',
    'permits',
    'store',
    'sweeper',
    'unacked',
}


class Request(NamedTuple):
    """A request whose response a thread waits for."""

    path: str
    params: dict[str, Any]
    body: Any
    #: The write in progress, if the request writes.
    write: Write | None


class Sleep(NamedTuple):
    """A thread that waits for a wakeup or an event."""

    timeout: float


class World:
    """A database, the processes that consume from it, and the time."""

    def __init__(self, nodes: int, salt: int = 0) -> None:
        self.now = START
        #: The error of the server's clock in seconds, and the last time at which any clock was set.
        self.wrong, self.set_at = 0.0, float('-inf')
        self.couchdb = CouchDB(nodes, salt)
        self.processes: list[Process] = []
        #: How often each item was delivered to kombu, and the items that were acknowledged.
        self.delivered: Counter[str] = Counter()
        self.acked: set[str] = set()
        #: The items that are published, and those whose completion is proven.
        self.published: set[str] = set()
        self.completed: set[str] = set()
        #: The items whose results are stored.
        self.results: set[str] = set()
        #: The items that an operator has tried to remove, and the claims at that time of those that are proven to be.
        self.unwanted: set[str] = set()
        self.removed: dict[str, Any] = {}
        #: Consumers whose leases another process ended while they were still valid.
        self.robbed: list[str] = []
        #: How many messages each consumer may claim beyond its prefetch count.
        self.ahead = 0
        #: Whether the queue is paused.
        self.paused = False
        #: Whether completed items are kept.
        self.keeps = False
        self._serial = itertools.count(1)

    def publish(self, name: str, headers: Document) -> None:
        """Store an item on all nodes."""
        properties = {'delivery_tag': name, **({'keep_done': _KEPT} if self.keeps else {})}
        message = {'body': '', 'headers': {'id': name, **headers}, 'properties': properties}
        self.couchdb.store([{**workitem.new(name, QUEUE, message, self.now + self.wrong)}])
        self.published.add(name)

    def client(self, skew: float) -> _ModelClient:
        """Return the client of a process whose clock is `skew` seconds ahead."""
        return _ModelClient(self, skew)

    def set_server_clock(self, wrong: float) -> None:
        """Make the server's clock wrong by this number of seconds."""
        self.wrong, self.set_at = wrong, self.now

    def pass_time(self, seconds: float) -> None:
        """Let time pass.

        After more than a second, a write that has reached one node reaches the others that did not lose it.
        """
        self.now += seconds
        if seconds > 1.0:
            for write in [write for write in self.couchdb.under_way if len(write.pending) < len(self.couchdb.nodes)]:
                for node in range(len(self.couchdb.nodes)):
                    self.couchdb.land(write, node)

    def start(self, skew: float, credit: int) -> None:
        """Start a process that consumes, with a clock that is `skew` seconds ahead."""
        self.processes.append(Process(self, skew, credit))

    def restart(self, number: int) -> Process:
        """Kill a process and start another in its place."""
        self.processes[number].kill()
        self.processes[number] = Process(self, self.processes[number].skew, self.processes[number].credit)
        return self.processes[number]

    def running(self, number: int) -> Process:
        """Return a process; if it has ended, start a new one in its place first."""
        return self.restart(number) if self.processes[number].ended else self.processes[number]

    def _tell(self, task_id: str) -> None:
        """Note that a consumer tells its worker not to start a task."""
        next(process for process in self.processes if process.is_current).told.add(task_id)

    def close(self) -> None:
        for process in self.processes:
            process.kill()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Patch the clocks, threads and identities in the modules of the product with those of this world."""
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now - START)
        fakes: list[tuple[Any, str, Any]] = [
            (io_thread, 'threading', SimpleNamespace(Thread=ThreadOfModel, Event=SilentEvent)),
            (io_thread, 'at_exit', mock.Mock()),
            (unacked, 'Wakeup', _Wakeup),
            (cycle, 'Notifier', lambda client, topology, *others: _SilentNotifier(self, topology)),
            # Nobody works at a rate here: the consumers claim ahead as if they did.
            (Throughput, 'ahead', lambda rate, limit, stock, now: self.ahead),
            *(
                (module, 'random', SimpleNamespace(uniform=lambda low, high: (low + high) / 2))
                for module in (conflicts, sweeper)
            ),
            (worker_hooks, '_hooks', {'on_removed': self._tell}),
            (lease, 'socket', SimpleNamespace(gethostname=lambda: 'host')),
            (lease, 'os', SimpleNamespace(getpid=lambda: 1)),
            (lease, 'uuid', SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f'{next(self._serial):04x}'))),
        ]
        with ExitStack() as stack:
            for module, name, fake in [*fakes, *((module, 'time', clock) for module in product_modules())]:
                stack.enter_context(mock.patch.object(module, name, fake))
            yield


class Actor:
    """A thread that sends requests: it stops at each, and waits until the caller decides what the response is."""

    waiting: Request | Sleep
    _thread: greenlet

    def __init__(self, world: World) -> None:
        self._world = world

    def go(self, at: int = 0) -> None:
        """Let the thread run to its next request or sleep.

        A pending request gets its response first; reads ask node `at`.
        """
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
        for doc, answer in zip(write.docs, write.answers or [], strict=True):
            self._on_response(doc, answer)
        return self._resume(self._shape(write.response))

    def _on_response(self, doc: Document, answer: Document) -> None:
        """Note the response to the write of a document, which the thread is about to get."""

    def _shape(self, answers: Any) -> Any:
        assert isinstance(self.waiting, Request)
        if self.waiting.path == '/_bulk_docs':
            return answers
        answer = answers[0]
        return from_answer(answer, 'model') if answer.get('error') else answer

    def cut(self) -> None:
        """Break the connection: the thread gets no response, whether or not its request was carried out."""
        self._resume(errors.ServerUnavailable('cut'))

    def _resume(self, answer: Any) -> None:
        waiting = self._thread.throw(answer) if isinstance(answer, Exception) else self._thread.switch(answer)
        if not self._thread.dead:
            self.waiting = waiting

    @property
    def asks(self) -> bool:
        """Whether the thread waits for a response."""
        return not self.ended and isinstance(self.waiting, Request)

    @property
    def write(self) -> Write | None:
        """The write whose response the thread waits for, or None."""
        return self.waiting.write if isinstance(self.waiting, Request) else None

    @property
    def claims(self) -> bool:
        """Whether the thread waits for the response to a claim."""
        return not self.ended and self.write is not None and any(doc.get('claimed') for doc in self.write.docs)

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return bool(self._thread.dead)


class Process(Actor):
    """A consuming process.

    Its I/O thread stops at requests and sleeps; the caller of `receive` and `ack` acts as kombu's thread.
    """

    def __init__(self, world: World, skew: float, credit: int) -> None:
        super().__init__(world)
        self.skew, self.credit = skew, credit
        self._mailbox = Mailbox()
        client = world.client(skew)
        self.clock: ModelClock = client.clock
        #: What the process knows of the queues; it learns of a pause in its next pass.
        self.topology = client.topology = Topology(client, known=Declarations())
        self.consumer = io_thread.IOThread(
            client,
            Options(visibility_timeout=LEASE, delivery_limit=DELIVERIES),
            self._mailbox,
            Listener(),
            self.topology,
            'model',
        )
        self.unacked = self.consumer.unacked
        self._subscription = Subscription(QUEUE, Credit(credit))
        self.unacked.subscribe(self._subscription)
        #: The results of its tasks. The world decides when one is stored.
        self.results = Results(world)
        self.unacked.writes._preconditions = [self.results]
        #: Deliveries that kombu has received and neither acknowledged nor released.
        self.working: list[Delivery] = []
        #: The removed tasks that the worker was told of because it had lost its connection or its lease, and those that
        #: it must have been told of: they were removed before it was back.
        self.told, self.must_know = set[str](), set[str]()
        self._was_cut, self._removed_before = False, set[str]()
        self._thread = self.consumer._thread.greenlet  # type: ignore[attr-defined]
        self.waiting = self._thread.switch()

    # -- the I/O thread

    def go(self, at: int = 0) -> None:
        if isinstance(self.waiting, Sleep):
            self._removed_before = {*self._world.removed}
        super().go(at)
        if isinstance(self.waiting, Sleep) and self._was_cut:  # the end of a pass that got all responses
            self.must_know |= self._removed_before
            self._was_cut = False

    def _on_response(self, doc: Document, answer: Document) -> None:
        if doc.get('_deleted') and self._ended_early(doc['_id'], answer):
            self._world.robbed.append(doc['_id'])
        is_completion = (doc.get('_deleted') and not doc.get('void')) or workitem.is_done(doc)
        if is_completion and answer.get('ok') and not answer.get('accepted'):
            self._world.completed.add(doc['_id'])

    def _ended_early(self, doc_id: str, deletion: Document) -> bool:
        """Tell whether this process has just deleted, with proof, the heartbeat of another valid lease."""
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

    def cut(self) -> None:
        super().cut()
        self._was_cut, self._removed_before = True, set()

    @property
    def is_current(self) -> bool:
        """Whether the code that runs now is that of the I/O thread."""
        return bool(self._thread is getcurrent())

    @property
    def has_results(self) -> bool:
        """Whether results were handed over that are not stored."""
        return bool(self.results.waiting)

    def stop(self) -> None:
        """Ask the process to end; it releases its messages first."""
        self.consumer._closing.set()

    def kill(self) -> None:
        """Kill the process; writes that it has sent may still reach the nodes."""
        self._thread.throw()
        self._mailbox.close()

    # -- kombu's thread

    @property
    def has_mail(self) -> bool:
        """Whether the mailbox has a delivery."""
        return len(self._mailbox) > 0

    @property
    def can_deliver(self) -> bool:
        """Whether the mailbox has a delivery that is still held: kombu does not get the others."""
        return any(delivery.handed and not delivery.delivered for delivery in self.unacked._held.values())

    def receive(self) -> Delivery | None:
        """Return the next delivery of the mailbox as kombu does; None if it may no longer be delivered."""
        found = self._mailbox.pop()
        if isinstance(found, Exception):
            raise found
        if found is None or not self.unacked.deliver(found):
            return None
        self.working.append(found)
        self._world.delivered[found.doc['_id']] += 1
        return found

    def ack(self) -> None:
        """Acknowledge the oldest delivery."""
        delivery = self.working.pop(0)
        if delivery.tag in self.unacked._held:
            self._world.acked.add(delivery.doc['_id'])
        self.results.waiting.append(delivery.doc['_id'])
        self.unacked.ack(delivery.tag)

    def requeue(self) -> None:
        """Release the oldest delivery."""
        self.unacked.release(self.working.pop(0).tag)

    def set_prefetch(self, limit: int) -> None:
        """Set the prefetch count."""
        self.unacked.set_credit(self._subscription.credit, limit)

    @property
    def handed(self) -> int:
        """How many messages kombu has received, or can receive from the mailbox."""
        return sum(delivery.handed for delivery in self.unacked._held.values())

    @property
    def held(self) -> Mapping[str, Document]:
        """The documents that this process holds under a valid lease, by id."""
        if self.ended or not self.consumer._cycle.lease.valid:
            return {}
        return {delivery.doc['_id']: delivery.doc for delivery in self.unacked._held.values()}


class Operator(Actor):
    """A person who removes a job. What becomes of it after a response was lost is not known."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world)
        self._thread = greenlet(lambda: self._remove(name))
        self.waiting = self._thread.switch()

    def _remove(self, name: str) -> None:
        try:
            jobs.remove(_ModelClient(self._world, 0.0), [name])
        except errors.CouchDBError:
            pass

    def _on_response(self, doc: Document, answer: Document) -> None:
        if answer.get('ok') and not answer.get('accepted'):
            self._world.removed.setdefault(doc['_id'], doc.get('claimed'))


class Results:
    """The results that the tasks of one process have handed over: a precondition of its acknowledgements."""

    def __init__(self, world: World) -> None:
        self._world, self._stored = world, 0
        self.waiting: list[str] = []

    def store_next(self) -> None:
        """Store the result that was handed over first."""
        self._world.results.add(self.waiting.pop(0))
        self._stored += 1

    def mark(self) -> int:
        return self._stored + len(self.waiting)

    def is_stored(self, mark: int) -> bool:
        return self._stored >= mark

    def wait(self) -> bool:
        """Return False: a process that ends does not wait here, and what is not stored then is lost."""
        return False


class ModelClock:
    """The clock of a process, as `ServerClock` has it: the server's time at the last response, and the time since."""

    def __init__(self, world: World | Fleet, skew: float) -> None:
        #: `skew` is the error in seconds that no response reveals.
        self._world, self._skew, self._began = world, skew, world.now
        #: The error of the local clock in seconds.
        self.wrong = 0.0
        self._offset, self._difference = world.wrong, world.wrong

    def now(self) -> float:
        return self._world.now + self._skew + self._offset

    @property
    def agrees(self) -> bool:
        # A process that starts just after a clock was set cannot know how old a heartbeat is: see
        # docs/development/model.rst.
        return self._difference == 0.0 and self._began - self._world.set_at > LEASE

    def observe(self) -> None:
        self._offset, self._difference = self._world.wrong, self._world.wrong - self.wrong


class _ModelClient(ModelClient):
    def __init__(self, world: World, skew: float) -> None:
        super().__init__(Address(host='model'))
        self._world, self.replicas = world, len(world.couchdb.nodes)
        self.topology: Topology | None = None
        self.clock = ModelClock(world, skew)

    def answer(self, method: str, path: str, params: dict[str, Any], body: Any) -> Any:
        docs = body['docs'] if path == '/_bulk_docs' else [body] if method == 'PUT' else None
        # In a cluster, the decision about an unproven claim may write a claim once more.
        if self.topology is not None and self.topology.paused and self.replicas == 1:
            assert not any(doc.get('claimed') for doc in docs or ()), 'an item of a paused queue was claimed'
        new_edits = method == 'PUT' or body.get('new_edits', True) if docs else True
        write = self._world.couchdb.begin(docs, new_edits=new_edits) if docs else None
        answer = wait(Request(path, params, body, write))
        self.clock.observe()
        return answer

    def pending_changes(self, design: str, *, if_running: bool = False) -> int:
        """Get no response: a client asks after a view that did not respond why it did not."""
        return 0


class _SilentNotifier:
    """A notifier without changes: the consumer reads its queues in each pass, and no bell is heard."""

    def __init__(self, world: World, topology: Topology) -> None:
        self._world, self._topology, self.peers = world, topology, Peers()
        self.attention = Attention(self.peers)
        self.listener = SimpleNamespace(binds=False)
        self.coordination = SimpleNamespace(know=lambda living: [])
        self.broadcasts = SimpleNamespace(ring=lambda queue: None)

    def take(self, own: str, candidates: Mapping[str, Any], with_credit: set[str]) -> tuple[list[Any], list[Any]]:
        for queue_candidates in candidates.values():
            queue_candidates.clear()
        self._topology.known.paused = frozenset({QUEUE} if self._world.paused else ())
        return [], []

    def take_before(self, messages: Iterable[Any]) -> list[Any]:
        return []

    def due_at(self) -> float:
        return inf

    close = on_outage = lambda self: None


def wait(what: object) -> Any:
    """Stop this thread until what it waits for has come; return that."""
    return getcurrent().parent.switch(what)


def product_modules() -> list[ModuleType]:
    """Return the modules of the product that import `time`."""
    modules = [
        import_module(found.name)
        for found in pkgutil.walk_packages(kombu_couchdb.__path__, 'kombu_couchdb.')
        if not found.name.endswith('.__main__')
    ]
    timed = [module for module in modules if vars(module).get('time') is time]
    assert {module.__name__.rpartition('.')[2] for module in timed} >= TIMED, (
        'the list TIMED names a module that does not import time'
    )
    return timed


class ThreadOfModel:
    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.greenlet = greenlet(target)

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return not self.greenlet.dead


class SilentEvent:
    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> None:
        wait(Sleep(timeout))


class _Wakeup:
    def set(self, within: float = 0.0) -> None:
        pass

    interrupt = set

    def wait(self, timeout: float) -> bool:
        wait(Sleep(timeout))
        return True
