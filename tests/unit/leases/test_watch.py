"""How long others have been silent (`kombu_couchdb.leases.watch`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.leases import watch as module
from kombu_couchdb.leases.watch import CREDIT, GRACE, Watch, mark_of

LEASE, MONTH = 60.0, 30 * 86_400.0


class World:
    """A server whose clock may jump, one consumer that writes heartbeats or not, and who watches it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lease: float = LEASE) -> None:
        self.now, self.clock = 1000.0, SimpleNamespace(now=lambda: self.now + self.jumped, agrees=True)
        self.jumped, self.lease = 1_763_709_000.0, lease
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: self.now))
        self.watch = self.new_watch()
        self.beat()

    def new_watch(self) -> Watch:
        return Watch(self.clock, 7.0)  # type: ignore[arg-type]

    def beat(self) -> None:
        date = self.now + self.jumped
        self.doc: dict[str, Any] = {'_id': 'a', 'date': date, 'expires': date + self.lease}

    def silent(self) -> bool:
        """Look, and tell whether the consumer is found to be silent."""
        self.watch.look({'a': mark_of(self.doc)}, self.now, lambda names: [self.doc for _ in names])
        return bool(self.watch.silent())

    def fenced_after(self, most: float = 1000.0) -> float:
        """Look whenever the watch says, until the consumer is found to be silent; return the seconds since the last heartbeat."""
        began = self.doc['date'] - self.jumped
        while not self.silent():
            self.now += max(0.01, self.watch.next_in())
            assert self.now < began + most, 'never'
        return self.now - began


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize('seen', [0.0, 20.0, 36.0])
def test_who_was_seen_alive_is_silent_after_its_lease(world: World, seen: float) -> None:
    world.silent()
    world.now += 10.0
    world.beat()
    world.now += seen
    assert LEASE + GRACE <= world.fenced_after() < LEASE + GRACE + 0.1


@pytest.mark.parametrize('dead_for', [0.0, 10.0, 36.0, 60.0, MONTH])
def test_who_is_seen_first_when_it_is_long_dead(world: World, dead_for: float) -> None:
    """A process that is started later need not watch for the whole lease."""
    world.now += dead_for
    fenced = world.fenced_after(most=MONTH + 1000.0)
    assert fenced == pytest.approx(max(LEASE, dead_for + (1 - CREDIT) * LEASE) + GRACE, abs=0.1)


@pytest.mark.parametrize('jump', [90.0, -90.0, 600.0, -600.0, MONTH, -MONTH])
@pytest.mark.parametrize('anew', [False, True])
def test_who_lives_is_not_silent_though_the_clock_jumps(world: World, jump: float, anew: bool) -> None:
    for _ in range(10):
        for _ in range(20):
            world.now += 1.0
            assert not world.silent()
        world.beat()
        world.jumped += jump
        if anew:  # a worker is started at that moment
            world.watch = world.new_watch()


@pytest.mark.parametrize('jump', [90.0, -90.0, 600.0, -600.0])
def test_no_lease_ends_early_because_the_clock_jumped(world: World, jump: float) -> None:
    world.silent()
    world.now += 10.0
    world.beat()
    world.jumped += jump
    world.now += 5.0
    beaten = world.now - 5.0
    while not world.silent():
        world.now += max(0.01, world.watch.next_in())
    assert LEASE + GRACE <= world.now - beaten <= LEASE + GRACE + 5.1


def test_first_look_trusts_no_clock_that_the_local_one_contradicts(world: World) -> None:
    world.clock.agrees = False
    world.jumped += 90.0
    world.now += 10.0
    world.watch.look({'a': mark_of(world.doc)}, world.now, lambda names: [world.doc])
    assert world.watch.next_in() == pytest.approx(CREDIT * LEASE)
    world.now += LEASE + GRACE - 0.1
    assert not world.silent()
    world.now += 0.2
    assert world.silent()


@pytest.mark.parametrize('away', [5.0, 90.0, 600.0])
def test_silence_while_the_server_was_away_does_not_count(world: World, away: float) -> None:
    world.silent()
    world.now += 20.0 + away
    world.watch.interrupted(away)
    world.now += 20.0
    assert not world.silent()
    assert world.fenced_after() == pytest.approx(LEASE + GRACE + away, abs=0.1)


def test_heartbeat_of_the_time_when_the_server_was_away_counts_from_its_return(world: World) -> None:
    world.silent()
    world.now += 1.0
    world.beat()
    world.now += 90.0
    world.watch.interrupted(90.0)
    assert not world.silent()
    assert world.fenced_after() == pytest.approx(LEASE + GRACE + 90.0, abs=0.1)


def test_one_interruption_after_another_does_not_save_the_dead(world: World) -> None:
    """A network that loses a request a second must not keep a dead consumer's messages for ever."""
    world.silent()
    for _ in range(200):
        world.now += 1.0
        world.watch.interrupted(0.2)
        if world.silent():
            break
    assert world.silent()


def test_lease_is_the_one_that_the_document_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lease=300.0)
    world.silent()
    assert world.fenced_after() == pytest.approx(302.0, abs=0.1)


@pytest.mark.parametrize(
    'spoilt',
    [
        {},
        {'date': None},
        {'date': 'x', 'expires': []},
        {'date': 5, 'expires': 1},
        {'date': True},
        {'date': 10**400, 'expires': 10**400},
        {'date': -1e300, 'expires': 1e300},
    ],
)
def test_spoilt_heartbeat_lasts_no_longer_than_another(world: World, spoilt: dict[str, Any]) -> None:
    world.doc = {'_id': 'a', **spoilt}
    assert not world.silent()
    world.now += 7.0 + GRACE + 0.1
    assert world.silent()
    assert world.watch.mark('a') == mark_of(world.doc)


def test_who_is_gone_is_not_looked_for(world: World) -> None:
    world.silent()
    world.watch.look({}, world.now, lambda names: [])
    assert world.watch.next_in() == float('inf')
    assert world.watch.mark('a') is None
