"""A state machine of events that may happen in any order, with the invariants and the final state that must hold."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kombu_couchdb.documents import workitem

from .couchdb import leaves
from .world import DELIVERIES, LEASE, Process, World

PROCESS = NODE = st.integers(0, 2)

#: How far a thread runs: to its next request, to its next write, or until it sleeps.
UNTIL = ('next', 'write', 'idle')

#: After the last fault, all work must be done within this number of rounds, of this number of seconds each.
ROUNDS, ROUND = 80, 10.0

#: Errors of a clock in seconds: longer than a lease, and longer than all rounds together.
WRONG = (0.0, LEASE + 30.0, -LEASE - 30.0, 2 * ROUNDS * ROUND, -2 * ROUNDS * ROUND)

#: Errors of the server's clock in seconds while the items were published. Afterwards the clock is right.
PUBLISHED = (0.0, -2 * ROUNDS * ROUND, 2 * ROUNDS * ROUND)


class Protocol(RuleBasedStateMachine):
    """Three consumers and two items. Each rule is one event that may happen."""

    nodes = 1
    #: The headers of the items.
    headers: ClassVar[dict[str, Any]] = {}
    #: How many items may be held at the same time.
    most = 2

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self._world: World | None = None
        logging.disable(logging.CRITICAL)

    @property
    def world(self) -> World:
        """The world, which `begin` makes."""
        assert self._world is not None
        return self._world

    @initialize(
        skews=st.tuples(*[st.sampled_from([0.0, 1.9])] * 3),
        credit=st.integers(1, 2),
        salt=st.integers(0, 9),
        wrong=st.sampled_from(PUBLISHED),
        ahead=st.integers(0, 2),
        keeps=st.booleans(),
    )
    def begin(
        self,
        skews: tuple[float, ...],
        credit: int,
        salt: int,
        wrong: float = 0.0,
        ahead: int = 0,
        keeps: bool = False,
    ) -> None:
        self._world = World(self.nodes, salt)
        self.world.ahead, self.world.keeps = ahead, keeps
        self.stack.enter_context(self.world.in_place())
        self.world.wrong = wrong
        for name in ('a', 'b'):
            self.world.publish(name, self.headers)
        self.world.wrong = 0.0
        for skew in skews:
            self.world.start(skew, credit)

    # -- rules

    @rule(who=PROCESS, until=st.sampled_from(UNTIL), at=NODE)
    def go(self, who: int, until: str, at: int) -> None:
        """The I/O thread of a consumer runs: past one request, until it is about to write, or until it sleeps."""
        self.run(self.world.running(who), until, at)

    @rule(who=PROCESS, at=NODE)
    def pause(self, who: int, at: int) -> None:
        """A process pauses for longer than its lease, while the others run."""
        for _ in range(4):
            self.world.pass_time(LEASE / 3)
            for other in {0, 1, 2} - {who}:
                self.run(self.world.running(other), 'idle', at)

    @rule(seconds=st.sampled_from([0.2, LEASE / 3, LEASE + 5.0]))
    def tick(self, seconds: float) -> None:
        """Time passes, and no process runs meanwhile."""
        self.world.pass_time(seconds)

    @rule(wrong=st.sampled_from(WRONG))
    def set_server_clock(self, wrong: float) -> None:
        """The server's clock is set forward or back. Each process learns of it from its next response."""
        self.world.set_server_clock(wrong)

    @rule(who=PROCESS, wrong=st.sampled_from(WRONG))
    def set_clock(self, who: int, wrong: float) -> None:
        """The local clock of a process is set. Only its next response tells the process that it disagrees."""
        self.world.processes[who].clock.wrong, self.world.set_at = wrong, self.world.now

    @rule(first=PROCESS, at=NODE)
    def hang(self, first: int, at: int) -> None:
        """The server responds to no process for longer than a lease.

        Afterwards no process ends the lease of another.
        """
        processes = [self.world.running(number % 3) for number in range(first, first + 3)]
        for _ in range(2):
            for process in processes:
                self.run(process, 'idle', at)
        before = [process.consumer.id for process in processes]
        for _ in range(4):
            self.world.pass_time(LEASE / 3)
            for process in processes:
                self.time_out(process)
        for _ in range(3):
            for process in processes:
                for _ in range(3):
                    self.run(process, 'idle', at)
        # In a cluster, a heartbeat may have reached only one node, so that it is not proven.
        assert self.nodes > 1 or [process.consumer.id for process in processes] == before, 'a lease was lost'

    @rule(which=st.integers(0, 7), at=NODE, lost=st.booleans())
    @precondition(lambda self: self.world.couchdb.under_way)
    def land(self, which: int, at: int, lost: bool) -> None:
        """A write reaches one node, before the sender gets its response or long after; if `lost`, that node is down."""
        under_way = self.world.couchdb.under_way
        self.world.couchdb.land(under_way[which % len(under_way)], at % self.nodes, lost=lost and self.nodes > 1)

    @rule(one=NODE, other=NODE)
    @precondition(lambda self: self.nodes > 1)
    def replicate(self, one: int, other: int) -> None:
        """A node replicates from another."""
        self.world.couchdb.nodes[one].learn(self.world.couchdb.nodes[other])

    @rule(first=PROCESS, at=NODE)
    @precondition(lambda self: self.nodes > 1)
    def claim_at_once(self, first: int, at: int) -> None:
        """Two consumers claim at once, each on another node, and neither gets a response."""
        for node, process in enumerate((self.world.running(first), self.world.running((first + 1) % 3)), at):
            for _ in range(4):
                if not process.claims:
                    self.run(process, 'write', at)
            if process.write and process.claims:
                self.world.couchdb.land(process.write, node % self.nodes)
        for process in self.those('claims'):
            process.cut()

    @rule(which=PROCESS)
    @precondition(lambda self: self.those('asks'))
    def cut(self, which: int) -> None:
        """A connection breaks, and the response is lost."""
        self.those('asks', which).cut()

    @rule(which=PROCESS)
    @precondition(lambda self: self.those('has_mail'))
    def receive(self, which: int) -> None:
        """kombu receives a delivery from the mailbox."""
        self.deliver(self.those('has_mail', which))

    @rule(which=PROCESS)
    @precondition(lambda self: self.those('working'))
    def ack(self, which: int) -> None:
        """A task succeeds, hands over its result, and its message is acknowledged."""
        self.those('working', which).ack()

    @rule(which=PROCESS)
    @precondition(lambda self: self.those('has_results'))
    def store_result(self, which: int) -> None:
        """The oldest result that a process has handed over is stored."""
        self.those('has_results', which).results.store_next()

    @rule(which=PROCESS)
    @precondition(lambda self: self.those('working'))
    def requeue(self, which: int) -> None:
        """A message is requeued."""
        self.those('working', which).requeue()

    @rule(who=PROCESS, limit=st.integers(1, 2))
    def set_prefetch(self, who: int, limit: int) -> None:
        """The prefetch count is set. If it is less than before, the messages claimed ahead are given back."""
        process = self.world.processes[who]
        process.set_prefetch(min(limit, process.credit))

    @rule(paused=st.booleans())
    def pause_queue(self, paused: bool) -> None:
        """The queue is paused or resumed. Each process learns of it in its next pass."""
        self.world.paused = paused

    @rule(who=PROCESS)
    def crash(self, who: int) -> None:
        """A process is killed, and another starts in its place."""
        self.world.restart(who)

    @rule(who=PROCESS)
    def stop(self, who: int) -> None:
        """A process is asked to end. Later another starts in its place."""
        self.world.processes[who].stop()

    def deliver(self, process: Process) -> None:
        """Let kombu receive a delivery, and check that no other process has it and that its attempts are counted."""
        delivery = process.receive()
        if delivery:
            name = delivery.doc['_id']
            assert not any(name in other.held for other in self.world.processes if other is not process), (
                f'{name} runs twice'
            )
            assert name not in self.world.completed, f'{name} runs again, and it was completed'
            self.removed_item_may_start(process, delivery.doc)
            # In a cluster, a node that was cut off may not know yet that it is done.
            assert self.nodes > 1 or not self.done_leaves(name), f'{name} runs although it is done'
            # In a cluster, the count of an unacknowledged delivery is lost if its leaf revision loses a conflict.
            if self.nodes == 1:
                assert self.world.delivered[name] <= delivery.doc['attempts'] <= DELIVERIES, (
                    f'the attempts of {name} miscount its deliveries'
                )

    def removed_item_may_start(self, process: Process, doc: dict[str, Any]) -> None:
        """Check that an item that was removed is not claimed afterwards, and not started by who must know of it."""
        name = doc['_id']
        if self.nodes == 1 and name in self.world.removed:
            assert doc['claimed'] == self.world.removed[name], f'{name} was claimed after its removal'
            assert name not in process.must_know - process.told, f'the worker is not told that {name} was removed'

    def done_leaves(self, name: str) -> list[str]:
        """Return the leaf revisions of an item that say that it is completed, and kept."""
        tree = self.world.couchdb.tree(name)
        return [rev for rev in leaves(tree) if workitem.is_done(tree[rev].body)]

    def time_out(self, process: Process) -> None:
        """Let a thread run until it sleeps, without any response."""
        if not process.asks and not process.ended:
            process.go()
        while process.asks:
            process.cut()

    def those(self, which: str, number: int | None = None) -> Any:
        """Return the processes of which the property `which` is true, or one of them."""
        found = [process for process in self.world.processes if getattr(process, which)]
        return found if number is None else found[number % len(found)]

    def run(self, process: Process, until: str, at: int) -> None:
        for _ in range(200):
            process.go(at)
            if until == 'next' or not process.asks or (until == 'write' and process.write):
                break

    # -- at every moment

    @invariant()
    def at_every_moment(self) -> None:
        """Check the promises that hold at every moment."""
        if self._world:
            self.one_holder()
            self.nothing_is_lost()
            self.results_come_first()
            self.prefetch_count_holds()
            self.paused_queue_delivers_nothing()
            # In a cluster, only the holder may know that its lease is proven, so that others may end it early.
            assert self.nodes > 1 or not self.world.robbed, f'leases ended too early: {self.world.robbed}'

    def one_holder(self) -> None:
        """Check that no two consumers with valid leases hold the same item."""
        held = [name for process in self.world.processes for name in process.held]
        assert len(held) == len(set(held)), f'held twice: {held}'
        assert len(held) <= self.most, f'held at the same time: {held}'

    def nothing_is_lost(self) -> None:
        """Check that each item that was not acknowledged exists."""
        for name in self.world.published - self.world.acked - self.world.unwanted:
            tree = self.world.couchdb.tree(name)
            assert any(not tree[rev].deleted for rev in leaves(tree)), f'{name} is lost'

    def results_come_first(self) -> None:
        """Check that an item exists as long as its result is not stored."""
        for name in self.world.published - self.world.results - self.world.unwanted:
            tree = self.world.couchdb.tree(name)
            assert any(not tree[rev].deleted for rev in leaves(tree)), f'{name} was completed without a result'

    def prefetch_count_holds(self) -> None:
        """Check that kombu never has more messages than its prefetch count, whatever is claimed ahead."""
        for process in self.world.processes:
            assert process.handed <= process.credit, f'kombu has {process.handed} messages'

    def paused_queue_delivers_nothing(self) -> None:
        """Check that kombu receives nothing from a process that knows of the pause."""
        for process in self.world.processes:
            assert not (process.topology.paused and process.can_deliver), 'kombu can receive an item of a paused queue'

    # -- in the end

    def teardown(self) -> None:
        try:
            if self._world:
                self.end_faults()
                self.at_rest()
        finally:
            if self._world:
                self.world.close()
            self.stack.close()
            logging.disable(logging.NOTSET)

    def end_faults(self) -> None:
        """End all faults: clocks are right, writes reach all nodes, nodes replicate, and consumers work."""
        self.world.wrong, self.world.paused = 0.0, False
        for _ in range(ROUNDS):
            for write in list(self.world.couchdb.under_way):
                if not any(process.asks and process.write is write for process in self.world.processes):
                    for node in range(self.nodes):
                        self.world.couchdb.land(write, node)
            for who in range(len(self.world.processes)):
                self.work(self.world.running(who))
            self.world.couchdb.synchronise()
            self.at_every_moment()
            if not self.unfinished():
                break
            self.world.pass_time(ROUND)

    def work(self, process: Process) -> None:
        """Let a consumer do all of its work."""
        self.run(process, 'idle', 0)
        while process.has_mail:
            self.deliver(process)
        while process.working:
            process.ack()
        while process.has_results:
            process.results.store_next()

    def unfinished(self) -> list[str]:
        """Return what is still to be done, as sentences."""
        found = []
        living = {process.consumer.id for process in self.world.processes}
        for doc_id in self.world.couchdb.ids():
            tree = self.world.couchdb.tree(doc_id)
            live = [tree[rev].body for rev in leaves(tree) if not tree[rev].deleted]
            if live and workitem.is_dead(live[0]):
                continue  # a dead letter: leaf revisions behind it become visible when it is removed
            if len(live) > 1 and doc_id not in living:
                found.append(f'{doc_id} has conflicting leaves')
            if any(workitem.claimant(doc) not in {None, *living} for doc in live):
                found.append(f'{doc_id} is claimed by a consumer that has ended')
            if any(doc['type'] == 'Consumer' for doc in live) and doc_id not in living:
                found.append(f'{doc_id} has ended and its heartbeat still exists')
            if any(doc['type'] == 'Slot' for doc in live):
                found.append(f'{doc_id} is still taken')
            if any(doc['type'] == 'WorkItem' for doc in live):
                found.append(f'{doc_id} is still in the queue')
        return found

    def at_rest(self) -> None:
        """Check that each item was acknowledged or is a dead letter, and that nothing else is left."""
        assert not self.unfinished(), self.unfinished()
        for name in self.world.published:
            tree = self.world.couchdb.tree(name)
            if done := self.done_leaves(name):
                assert done == [rev for rev in leaves(tree) if not tree[rev].deleted], (
                    f'{name} is done and something else'
                )


class Single(Protocol):
    """One node: every response is exact."""


class Cluster(Protocol):
    """Three nodes, each of which decides by its own copy."""

    nodes = 3
