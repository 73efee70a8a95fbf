"""Unit tests of the silence of other consumers (`kombu_couchdb.leases.lease`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.leases import lease as module
from kombu_couchdb.leases.lease import CLOCK_SHARE, GRACE_SECONDS, IDLE_LEASES, Unchanged, Watch, ends_at, expires_of

LEASE, MONTH = 60.0, 30 * 86_400.0


class World:
    """A server whose clock may jump, a consumer that may write heartbeats, and a process that watches it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lease: float = LEASE) -> None:
        self.now, self.jumped, self.lease = 1000.0, 1_763_709_000.0, lease
        self.clock = SimpleNamespace(now=lambda: self.now + self.jumped, agrees=True)
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, 'uptime', lambda: self.now)
        self.watch = self.new_watch()
        self.holding = {'a'}
        self.heartbeat()

    def new_watch(self) -> Watch:
        return Watch(self.clock, 7.0)  # type: ignore[arg-type]

    def heartbeat(self) -> None:
        date = self.now + self.jumped
        self.doc: dict[str, Any] = {'_id': 'a', 'date': date, 'expires': date + self.lease}

    def silent(self) -> bool:
        """Look, and tell whether the consumer was silent for longer than its lease."""
        self.watch.observe({'a': expires_of(self.doc)}, self.now, lambda names: [self.doc for _ in names], self.holding)
        return bool(self.watch.silent())

    def expired_after(self, most: float = 1000.0) -> float:
        """Look at the times that the watch asks for, until the lease has expired.

        Return the seconds since the last heartbeat; fail after `most` seconds.
        """
        began = self.doc['date'] - self.jumped
        while not self.silent():
            self.now += max(0.01, self.watch.next_in())
            assert self.now < began + most, 'never'
        return self.now - began


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize('seen', [0.0, 20.0, 35.9])
def test_lease_expires_after_the_last_heartbeat(world: World, seen: float) -> None:
    world.silent()
    world.now += 10.0
    world.heartbeat()
    world.now += seen
    assert LEASE + GRACE_SECONDS <= world.expired_after() < LEASE + GRACE_SECONDS + 0.1


@pytest.mark.parametrize('silent_for', [0.0, 36.0, 60.0, MONTH])
@pytest.mark.parametrize(('holding', 'most'), [({'a'}, LEASE), (set(), IDLE_LEASES * LEASE)], ids=['busy', 'idle'])
def test_new_process_finds_an_old_heartbeat(world: World, holding: set[str], most: float, silent_for: float) -> None:
    """It need not watch for the whole lease. A consumer that holds nothing may be silent for longer."""
    world.holding = holding
    world.now += silent_for
    expired = world.expired_after(most=MONTH + 1000.0)
    assert expired == pytest.approx(max(most, silent_for + most - CLOCK_SHARE * LEASE) + GRACE_SECONDS, abs=0.1)
    assert ends_at(world.doc) == world.doc['date'] + IDLE_LEASES * LEASE


@pytest.mark.parametrize('holds', [True, False])
def test_a_missing_heartbeat_of_a_consumer_that_holds_something_is_suspect(world: World, holds: bool) -> None:
    """A process sees it also if it has just started."""
    if not holds:
        world.holding.clear()
    assert not world.silent()
    assert not world.watch.suspects
    for _ in range(3):
        world.now += LEASE / 3
        world.heartbeat()
        world.silent()
        assert not world.watch.suspects
    world.now += 0.6 * LEASE
    world.watch = world.new_watch()
    assert not world.silent()
    assert world.watch.suspects == holds


@pytest.mark.parametrize('jump', [90.0, -600.0, MONTH, -MONTH])
@pytest.mark.parametrize('restart', [False, True])
@pytest.mark.parametrize(('holding', 'pause'), [({'a'}, 20), (set(), 130)], ids=['busy', 'idle'])
def test_clock_jump_ends_no_lease_of_a_living_consumer(
    world: World, holding: set[str], pause: int, jump: float, restart: bool
) -> None:
    """It writes a heartbeat every third of its lease, or after twice its lease if it holds nothing."""
    world.holding = holding
    for _ in range(5):
        for _ in range(pause):
            world.now += 1.0
            assert not world.silent()
        world.heartbeat()
        world.jumped += jump
        if restart:  # another worker starts at that moment
            world.watch = world.new_watch()


@pytest.mark.parametrize('jump', [90.0, -90.0, 600.0, -600.0])
def test_clock_jump_ends_no_lease_early(world: World, jump: float) -> None:
    world.silent()
    world.now += 10.0
    world.heartbeat()
    world.jumped += jump
    world.now += 5.0
    written = world.now - 5.0
    while not world.silent():
        world.now += max(0.01, world.watch.next_in())
    assert LEASE + GRACE_SECONDS <= world.now - written <= LEASE + GRACE_SECONDS + 5.1


def test_first_look_ignores_the_server_time_if_the_local_clock_differs(world: World) -> None:
    world.clock.agrees = False
    world.jumped += 90.0
    world.now += 10.0
    world.watch.observe({'a': expires_of(world.doc)}, world.now, lambda names: [world.doc], {'a'})
    assert world.watch.next_in() == pytest.approx(CLOCK_SHARE * LEASE)
    world.now += LEASE + GRACE_SECONDS - 0.1
    assert not world.silent()
    world.now += 0.2
    assert world.silent()


@pytest.mark.parametrize('outage', [5.0, 90.0, 600.0])
def test_silence_during_an_outage_of_the_server_does_not_count(world: World, outage: float) -> None:
    world.silent()
    world.now += 20.0 + outage
    world.watch.interrupted(outage)
    world.now += 20.0
    assert not world.silent()
    assert world.expired_after() == pytest.approx(LEASE + GRACE_SECONDS + outage, abs=0.1)


def test_repeated_short_interruptions_do_not_extend_a_lease_for_ever(world: World) -> None:
    """If the network loses a request per second, the messages of an expired consumer are released all the same."""
    world.silent()
    for _ in range(200):
        world.now += 1.0
        world.watch.interrupted(0.2)
        if world.silent():
            break
    assert world.silent()


def test_length_of_the_lease_is_read_from_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lease=300.0)
    world.silent()
    assert world.expired_after() == pytest.approx(302.0, abs=0.1)


@pytest.mark.parametrize(
    'malformed',
    [
        {},
        {'date': 'x', 'expires': []},
        {'date': 5, 'expires': 1},
        {'date': 10**400, 'expires': 10**400},
        {'date': -1e300, 'expires': 1e300},
    ],
)
def test_malformed_heartbeat_has_the_default_lease(world: World, malformed: dict[str, Any]) -> None:
    world.doc = {'_id': 'a', **malformed}
    assert not world.silent()
    world.now += 7.0 + GRACE_SECONDS + 0.1
    assert world.silent()
    assert world.watch.expires('a') == expires_of(world.doc)


def test_dates_that_are_no_numbers_count_as_in_the_view() -> None:
    """A sweeper deletes a heartbeat only if its document has the `expires` that the view emitted."""
    assert [expires_of({'expires': value}) for value in (True, 'x', None, 1e300, -1e300)] == [0.0] * 3 + [1e12, -1e12]


def test_value_that_has_changed_is_proven_anew(world: World) -> None:
    values, proven = Unchanged(10.0), []
    for seconds, seen in ((0, {'a': 5, 'b': 5}), (10, {'a': 5, 'b': 6}), (9, {'b': 6}), (1, {'a': 5, 'b': 6})):
        world.now += seconds
        proven.append(values.observe(seen, world.now))
    assert proven == [[], ['a'], [], ['b']]
    assert values.left() == [10.0]
