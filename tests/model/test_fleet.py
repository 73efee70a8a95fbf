"""A fleet: no message waits for long while a consumer with credit lives, and nobody works for nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kombu_couchdb.consumer.cycle import Cycle
from kombu_couchdb.fleet.attention import Attention, BellRinger, Peers
from kombu_couchdb.fleet.notifier import BroadcastFeed, Notifier

from .exploring import Fault, examples_until_found, explore, finds_faults, put_in
from .fleet import LEASE, MAX_SECONDS, Fleet, Member
from .world import QUEUE

WHO = st.integers(0, 9)

#: The second queue, which some fleets have.
OTHER = 'other'

#: The most consumers at the same time.
MOST = 9

#: How long tasks take, in seconds.
TASKS = st.sampled_from([0.0, 0.05, 1.0, 8.0, 40.0])


class Events(RuleBasedStateMachine):
    """Consumers of one or two queues. Each rule is one event that may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self._fleet: Fleet | None = None
        logging.disable(logging.CRITICAL)

    @property
    def fleet(self) -> Fleet:
        """The fleet, which `begin` makes."""
        assert self._fleet is not None
        return self._fleet

    @initialize(
        seed=st.integers(0, 999),
        size=st.integers(1, 8),
        limit=st.integers(1, 2),
        scale=st.sampled_from([1, 20, 20]),
        queues=st.sampled_from([[QUEUE], [QUEUE, OTHER]]),
    )
    def begin(self, seed: int, size: int, limit: int, scale: int, queues: list[str]) -> None:
        self._fleet = Fleet(seed, scale, queues)
        self.stack.enter_context(self.fleet.in_place())
        for _ in range(size):
            self.fleet.join(limit)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 15.0, 2 * LEASE]))
    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.fleet.pass_time(seconds)

    @rule(seconds=TASKS, count=st.sampled_from([1, 1, 2, 7, 30]), last=st.booleans())
    def publish(self, seconds: float, count: int, last: bool) -> None:
        """Messages are published, to the first queue or to the last."""
        for _ in range(count if seconds < 8.0 else min(count, 7)):
            self.fleet.publish(seconds, queue=self.fleet.queues[-last])
        self.fleet.pass_time(0.3)

    @rule(seconds=st.sampled_from([8.0, 40.0]))
    def occupy(self, seconds: float) -> None:
        """As many long tasks come, one by one, as there are listeners; and then a message for one of the others."""
        for _ in range(sum(member.is_free for member in self.fleet.listeners)):
            self.fleet.publish(seconds)
            self.fleet.pass_time(0.5)
        self.fleet.publish(0.0)
        self.fleet.pass_time(0.5)

    @rule(seconds=TASKS, due_in=st.sampled_from([0.5, 4.0, 7.0, 30.0]))
    def plan(self, seconds: float, due_in: float) -> None:
        """A message is published that is due later."""
        self.fleet.publish(seconds, due_in)

    @rule(limit=st.integers(1, 3))
    @precondition(lambda self: len(self.fleet.living) < MOST)
    def join(self, limit: int) -> None:
        """A consumer starts."""
        self.fleet.join(limit)

    @rule(who=WHO)
    @precondition(lambda self: len(self.fleet.living) > 1)
    def kill(self, who: int) -> None:
        """A consumer is killed."""
        self.one(who).kill()

    @rule()
    @precondition(lambda self: len(self.fleet.living) > len(self.fleet.listeners))
    def kill_listeners(self) -> None:
        """All listeners are killed at once."""
        for member in self.fleet.listeners:
            member.kill()

    @rule(who=WHO)
    @precondition(lambda self: len(self.fleet.living) > 1)
    def stop(self, who: int) -> None:
        """A consumer ends in order."""
        self.one(who).stop()

    @rule(who=WHO, seconds=st.sampled_from([0.5, 3.0, 15.0, 1.5 * LEASE]))
    @precondition(lambda self: len(self.fleet.living) > 1)
    def pause(self, who: int, seconds: float) -> None:
        """A process is not run for some time."""
        self.one(who).paused_until = self.fleet.elapsed + seconds

    @rule(who=WHO, is_cut_off=st.booleans())
    def cut_off(self, who: int, is_cut_off: bool) -> None:
        """A consumer loses its access to the broadcasts database, or gets it back."""
        self.one(who).is_cut_off = is_cut_off
        self.fleet.check_feeds()

    @rule(is_locked=st.booleans())
    def lock(self, is_locked: bool) -> None:
        """All consumers lose their access to the broadcasts database, or get it back."""
        self.fleet.is_locked = is_locked
        self.fleet.check_feeds()

    @rule(seconds=st.sampled_from([0.0, 0.2, 2.0]))
    def delay(self, seconds: float) -> None:
        """What the broadcasts database reports arrives late from now on, after what it has reported before."""
        before, self.fleet.feed_delay = self.fleet.feed_delay, seconds
        self.fleet.pass_time(before)

    @rule(who=WHO, other=WHO)
    def forget(self, who: int, other: int) -> None:
        """A consumer does not know of another one, and computes other ranks."""
        if self.one(who) is not self.one(other):
            self.one(who).notifier.peers.seen({'_id': self.one(other).id, '_deleted': True})

    @rule()
    @precondition(lambda self: not self.fleet.is_locked)
    def broadcast(self) -> None:
        """A broadcast is published. Consumers that were there before, and are not disturbed, receive it soon."""
        able = [member for member in self.settled() if member.notifier.broadcasts.is_followed]
        news = self.fleet.broadcast()
        self.fleet.pass_time(1.0 + 2 * self.fleet.feed_delay)
        for member in able:
            assert news in member.heard, f'consumer {member.number} misses a broadcast'

    def settled(self) -> list[Member]:
        """Return the consumers that are in no trouble."""
        return [member for member in self.fleet.living if not member.is_cut_off]

    @rule(who=WHO, limit=st.integers(1, 3))
    def set_limit(self, who: int, limit: int) -> None:
        """The prefetch count is set."""
        self.one(who).set_limit(limit)

    def one(self, number: int) -> Member:
        living = self.fleet.living
        return living[number % len(living)]

    def teardown(self) -> None:
        try:
            if self._fleet:
                self.heal()
                self.fleet.pass_time(3 * LEASE)
                self.all_gets_done()
        finally:
            if self._fleet:
                self.fleet.close()
            self.stack.close()
            logging.disable(logging.NOTSET)

    def heal(self) -> None:
        self.fleet.is_locked, self.fleet.feed_delay = False, 0.0
        for member in self.fleet.members:
            member.is_cut_off = False

    def all_gets_done(self) -> None:
        """Check that everything gets done, as long as tasks take."""
        for _ in range(60):
            self.fleet.waiting()
            if not self.fleet.messages:
                return
            self.fleet.pass_time(LEASE)
        raise AssertionError(f'in the end these wait: {self.fleet.waiting()}, of {[*self.fleet.messages]}')


@pytest.mark.slow
def test_nothing_waits_in_any_order_of_events() -> None:
    explore(Events, 25, steps=40)


@contextmanager
def settled(size: int, seconds: float = 30.0, queues: Sequence[str] = (QUEUE,)) -> Iterator[Fleet]:
    """A fleet of idle consumers with a prefetch count of 1 that know of each other."""
    fleet = Fleet(1, queues=queues)
    with fleet.in_place():
        try:
            for _ in range(size):
                fleet.join()
            fleet.pass_time(seconds)
            yield fleet
        finally:
            fleet.close()


def test_idle_fleet_listens_with_few_and_looks_rarely() -> None:
    with settled(12) as fleet:
        assert 1 <= len(fleet.listeners) <= 3
        fleet.requests.clear()
        fleet.pass_time(60.0)
        # Each that rests looks once in 7.5 s at most.
        assert fleet.requests['waiting'] <= 10 * 60.0 / 7.5 + 3
        assert sum(fleet.requests.values()) <= 12 * 60.0


def test_burst_wakes_everybody() -> None:
    with settled(12) as fleet:
        for _ in range(12):
            fleet.publish(seconds=10.0)
        fleet.pass_time(1.5)
        assert not any(member.is_free for member in fleet.members)


def test_message_for_the_only_free_consumer_is_found_soon() -> None:
    with settled(8) as fleet:
        for _ in range(7):
            fleet.publish(seconds=1000.0)
        fleet.pass_time(60.0)
        for _ in range(20):
            fleet.publish(seconds=0.0)
            fleet.pass_time(1.5)
            assert not fleet.waiting()


def test_last_free_consumer_finds_messages_though_it_hears_no_bell() -> None:
    with settled(8) as fleet:
        for _ in range(7):
            fleet.publish(seconds=1000.0)
        fleet.pass_time(60.0)
        [last] = [member for member in fleet.members if member.is_free]
        last.is_cut_off = True
        fleet.check_feeds()
        for _ in range(5):
            fleet.pass_time(20.0)
            fleet.publish(seconds=0.0)
            fleet.pass_time(6.0)  # checks that nothing waits for longer than 5 s


def test_message_is_found_when_all_listeners_were_killed() -> None:
    with settled(8) as fleet:
        for member in fleet.listeners:
            member.kill()
        fleet.publish(seconds=0.0)
        fleet.pass_time(MAX_SECONDS + 1.0)
        assert not fleet.waiting()


def test_busy_fleet_waits() -> None:
    with settled(8) as fleet:
        for _ in range(30):
            fleet.publish(seconds=1000.0)
        fleet.pass_time(30.0)
        fleet.requests.clear()
        fleet.pass_time(60.0)
        assert sum(fleet.requests.values()) <= 8 * 60.0


def test_busy_queue_does_not_delay_another_one() -> None:
    with settled(4, queues=[QUEUE, OTHER]) as fleet:
        for _ in range(12):
            fleet.publish(seconds=1000.0)
        fleet.pass_time(10.0)
        for _ in range(20):
            fleet.publish(seconds=0.0, queue=OTHER)
            fleet.pass_time(1.5)
            assert {fleet.messages[name].queue for name in fleet.waiting()} == {QUEUE}


def test_everybody_receives_broadcasts() -> None:
    with settled(8) as fleet:
        news = fleet.broadcast()
        fleet.pass_time(1.0)
        assert all(news in member.heard for member in fleet.members)


#: The tests above, each of a state that the events may reach, but not soon.
STATES = (
    test_burst_wakes_everybody,
    test_message_for_the_only_free_consumer_is_found_soon,
    test_last_free_consumer_finds_messages_though_it_hears_no_bell,
    test_message_is_found_when_all_listeners_were_killed,
    test_busy_fleet_waits,
    test_busy_queue_does_not_delay_another_one,
    test_everybody_receives_broadcasts,
)


FAULTS = [
    Fault('nobody looks now and then', Events, Attention, '_pause', 'random.uniform(0.75, 1.0) * seconds', 'inf'),
    Fault('the bell never rings', Events, BellRinger, 'check', 'now < waiting.ring_at', 'True'),
    Fault(
        'a consumer that rests does not hear the bell', Events, Attention, 'heard', 'self._rung.add(queue)', 'return'
    ),
    Fault('who is cut off from bells rests', Events, Notifier, '_attend', 'self.broadcasts.is_followed', 'True'),
    Fault(
        'each process computes ranks of its own, and nobody looks',
        Events,
        Peers,
        'listeners',
        'crc32(name.encode())',
        '-list(self._queues).index(name)',
    ),
    Fault(
        'a consumer that rests misses broadcasts',
        Events,
        Notifier,
        'take',
        'self.broadcasts.take()',
        '(self.broadcasts.take(), [])[not self.attention.listens]',
    ),
    Fault(
        'a listener without credit does not know what waits',
        Events,
        Cycle,
        '_ring',
        'bell.waits(',
        '(lambda *a: None)(',
    ),
    Fault('the feed of broadcasts ends', Events, BroadcastFeed, 'take', 'self._follower.follow(report.last)', 'pass'),
    Fault(
        'a listener reads without a wait',
        Events,
        BellRinger,
        'check',
        'now + min(self._reads_every, waiting.pause)',
        'now',
    ),
    Fault(
        'the first ranks are those of consumers without the queue',
        Events,
        Peers,
        'listeners',
        'count[queue] > 1',
        'False',
    ),
]


@finds_faults
@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(fault, monkeypatch)
    assert any(map(fails, STATES)) or examples_until_found(fault.machine)


def fails(test: Callable[[], None]) -> bool:
    """Tell whether a test fails."""
    try:
        test()
    except AssertionError:
        return True
    return False
