"""What may happen, in any order, and what must hold at every moment and in the end."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kombu_couchdb.documents import workitem

from .couchdb import leaves
from .world import DELIVERIES, LEASE, Process, World

WHO = NODE = st.integers(0, 2)

#: How far a thread goes on: to its next request, to the next that writes, or until it sleeps.
UNTIL = ('next', 'write', 'idle')

#: The rounds in which everything must come to rest when all faults are over, and the seconds of each.
ROUNDS, ROUND = 80, 10.0

#: By how many seconds a clock is set wrong: by more than a lease, and by more than all rounds take.
WRONG = (0.0, LEASE + 30.0, -LEASE - 30.0, 2 * ROUNDS * ROUND, -2 * ROUNDS * ROUND)

#: By how many seconds the server's clock was wrong when the items were published. It is right then.
PUBLISHED = (0.0, -2 * ROUNDS * ROUND, 2 * ROUNDS * ROUND)


class Protocol(RuleBasedStateMachine):
    """Three consumers and two items. Every rule is one thing that may happen in the world."""

    nodes = 1

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
    )
    def begin(self, skews: tuple[float, ...], credit: int, salt: int, wrong: float = 0.0) -> None:
        self._world = World(self.nodes, salt)
        self.stack.enter_context(self.world.in_place())
        self.world.wrong = wrong
        for name in ('a', 'b'):
            self.world.publish(name)
        self.world.wrong = 0.0
        for skew in skews:
            self.world.start(skew, credit)

    # -- rules

    @rule(who=WHO, until=st.sampled_from(UNTIL), at=NODE)
    def go(self, who: int, until: str, at: int) -> None:
        """A consumer's I/O thread goes on: over one request, or until it is about to write, or has nothing more to do."""
        self.run(self.world.running(who), until, at)

    @rule(who=WHO, at=NODE)
    def pause(self, who: int, at: int) -> None:
        """A process is stopped, for longer than its lease, while the others go on."""
        for _ in range(4):
            self.world.pass_time(LEASE / 3)
            for other in {0, 1, 2} - {who}:
                self.run(self.world.running(other), 'idle', at)

    @rule(seconds=st.sampled_from([0.2, LEASE / 3, LEASE + 5.0]))
    def tick(self, seconds: float) -> None:
        """Time passes, and nobody goes on meanwhile."""
        self.world.pass_time(seconds)

    @rule(wrong=st.sampled_from(WRONG))
    def set_server_clock(self, wrong: float) -> None:
        """The server's clock is set, forward or back: all learn of it with their next answers."""
        self.world.set_server_clock(wrong)

    @rule(who=WHO, wrong=st.sampled_from(WRONG))
    def set_clock(self, who: int, wrong: float) -> None:
        """The clock of a process' machine is set: until the next answer it is believed."""
        self.world.processes[who].clock.wrong, self.world.set_at = wrong, self.world.now

    @rule(first=WHO, at=NODE)
    def hang(self, first: int, at: int) -> None:
        """The server answers nobody for longer than a lease. Whoever comes back first ends no lease of the others."""
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
        # In a cluster a heartbeat may be on one node only, and none is proven.
        assert self.nodes > 1 or [process.consumer.id for process in processes] == before, 'a lease was lost'

    @rule(which=st.integers(0, 7), at=NODE, lost=st.booleans())
    @precondition(lambda self: self.world.couchdb.under_way)
    def land(self, which: int, at: int, lost: bool) -> None:
        """A write reaches one node, before its answer reaches the one who sent it, or long after; or that node is down."""
        under_way = self.world.couchdb.under_way
        self.world.couchdb.land(under_way[which % len(under_way)], at % self.nodes, lost=lost and self.nodes > 1)

    @rule(one=NODE, other=NODE)
    @precondition(lambda self: self.nodes > 1)
    def replicate(self, one: int, other: int) -> None:
        """A node tells another what it knows."""
        self.world.couchdb.nodes[one].learn(self.world.couchdb.nodes[other])

    @rule(which=WHO)
    @precondition(lambda self: self.those('asks'))
    def cut(self, which: int) -> None:
        """A connection breaks, so that the answer is lost."""
        self.those('asks', which).cut()

    @rule(which=WHO)
    @precondition(lambda self: self.those('has_mail'))
    def take(self, which: int) -> None:
        """kombu takes a delivery from the mailbox."""
        self.handed(self.those('has_mail', which))

    @rule(which=WHO)
    @precondition(lambda self: self.those('working'))
    def ack(self, which: int) -> None:
        """A task is done."""
        self.those('working', which).ack()

    @rule(which=WHO)
    @precondition(lambda self: self.those('working'))
    def requeue(self, which: int) -> None:
        """A task is rejected and shall be delivered again."""
        self.those('working', which).requeue()

    @rule(who=WHO)
    def crash(self, who: int) -> None:
        """A process is killed, and another is started."""
        self.world.restart(who)

    @rule(who=WHO)
    def stop(self, who: int) -> None:
        """A process is asked to end; when it has, another is started."""
        self.world.processes[who].stop()

    def handed(self, process: Process) -> None:
        """Let kombu take a delivery, and check what is promised of it."""
        delivery = process.take()
        if delivery:
            name = delivery.doc['_id']
            assert not any(name in other.held for other in self.world.processes if other is not process), (
                f'{name} runs twice'
            )
            # In a cluster a delivery that nobody settled may be forgotten with a leaf that did not prevail.
            if self.nodes == 1:
                assert self.world.delivered[name] <= delivery.doc['attempts'] <= DELIVERIES, (
                    f'{name}: not all were counted'
                )

    def time_out(self, process: Process) -> None:
        """Let a thread go on, and get no answer, until it sleeps."""
        if not process.asks and not process.ended:
            process.go()
        while process.asks:
            process.cut()

    def those(self, which: str, number: int | None = None) -> Any:
        """Return the processes of which something is true, or one of them."""
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
        """What is promised always."""
        if self._world:
            self.one_holder()
            self.nothing_is_lost()
            # In a cluster an honoured lease may have been proven to one only: its holder asks.
            assert self.nodes > 1 or not self.world.robbed, f'leases ended too early: {self.world.robbed}'

    def one_holder(self) -> None:
        """No two consumers with honoured leases hold the same item."""
        held = [name for process in self.world.processes for name in process.held]
        assert len(held) == len(set(held)), f'held twice: {held}'

    def nothing_is_lost(self) -> None:
        """An item that no holder has acknowledged is there."""
        for name in {'a', 'b'} - self.world.acked:
            tree = self.world.couchdb.tree(name)
            assert any(not tree[rev].deleted for rev in leaves(tree)), f'{name} is lost'

    # -- in the end

    def teardown(self) -> None:
        try:
            if self._world:
                self.heal()
                self.at_rest()
        finally:
            if self._world:
                self.world.close()
            self.stack.close()
            logging.disable(logging.NOTSET)

    def heal(self) -> None:
        """All faults are over: clocks are right, writes land, nodes learn, consumers go on and do what they are given."""
        self.world.wrong = 0.0
        for _ in range(ROUNDS):
            for write in list(self.world.couchdb.under_way):
                if not any(process.asks and process.write is write for process in self.world.processes):
                    for node in range(self.nodes):
                        self.world.couchdb.land(write, node)
            for who in range(len(self.world.processes)):
                self.turn(self.world.running(who))
            self.world.couchdb.synchronise()
            self.at_every_moment()
            if not self.unsettled():
                break
            self.world.pass_time(ROUND)

    def turn(self, process: Process) -> None:
        """Let a consumer do all that it has to do now."""
        self.run(process, 'idle', 0)
        while process.has_mail:
            self.handed(process)
        while process.working:
            process.ack()

    def unsettled(self) -> list[str]:
        """Return what is not as it shall be at rest."""
        found = []
        living = {process.consumer.id for process in self.world.processes}
        for doc_id in self.world.couchdb.ids():
            tree = self.world.couchdb.tree(doc_id)
            live = [tree[rev].body for rev in leaves(tree) if not tree[rev].deleted]
            if live and live[0].get('status'):
                continue  # a dead letter: what stands behind it comes to light when it is removed
            if len(live) > 1 and doc_id not in living:
                found.append(f'{doc_id} has conflicting leaves')
            if any(workitem.claimant(doc) not in {None, *living} for doc in live):
                found.append(f'{doc_id} is claimed by one who is gone')
            if any(doc['type'] == 'Consumer' for doc in live) and doc_id not in living:
                found.append(f'{doc_id} is gone and its heartbeat is there')
            if any(doc['type'] == 'WorkItem' for doc in live):
                found.append(f'{doc_id} is not done')
        return found

    def at_rest(self) -> None:
        """Every item was done or is a dead letter after all its deliveries, and nothing else is left."""
        assert not self.unsettled(), self.unsettled()


class Single(Protocol):
    """One node: every answer is exact."""


class Cluster(Protocol):
    """Three nodes, which decide each by its own copy."""

    nodes = 3
