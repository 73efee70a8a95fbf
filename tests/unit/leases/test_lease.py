"""When a consumer writes heartbeats (`kombu_couchdb.leases.lease`), with a clock that is set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kombu_couchdb.leases import lease as module
from kombu_couchdb.leases.lease import CLOCK_SHARE, GRACE_SECONDS, IDLE_LEASES, Lease

TIMEOUT = 60.0


class World:
    """One lease, and time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, 'uptime', lambda: self.now)
        self.lease = Lease(TIMEOUT)

    def beat(self, *, proven: bool = True) -> None:
        doc = self.lease.heartbeat_document(self.now, ['q'], {})
        assert doc['expires'] == self.now + TIMEOUT
        self.lease.heartbeat_stored('1-a', proven=proven)

    def is_due(self, queues: str = 'q') -> bool:
        return self.lease.needs_heartbeat([*queues])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize(('idle', 'seconds'), [(False, 20.0), (True, 120.0)])
def test_heartbeat_is_due_after_a_part_of_the_lease(world: World, idle: bool, seconds: float) -> None:
    world.beat()
    world.lease.idle = idle
    assert world.lease.next_heartbeat == world.now + seconds
    world.now += seconds - 0.1
    assert not world.is_due()
    world.now += 0.2
    assert world.is_due()
    assert world.lease.valid or idle


def test_first_claim_writes_the_heartbeat_that_an_idle_consumer_has_left_out(world: World) -> None:
    world.beat()
    world.lease.idle = True
    world.now += 25.0
    assert not world.is_due()
    world.lease.idle = False
    assert world.is_due()
    world.beat()
    assert not world.is_due()
    assert world.lease.next_heartbeat == world.now + 20.0


def test_changed_queues_need_a_heartbeat_of_an_idle_consumer_too(world: World) -> None:
    world.beat()
    world.lease.idle = True
    assert not world.is_due()
    assert world.is_due('qr')


@pytest.mark.parametrize(('idle', 'leases'), [(False, 1.0), (True, IDLE_LEASES)])
def test_a_living_consumer_writes_in_the_time_that_a_sweeper_measures(world: World, idle: bool, leases: float) -> None:
    """Even with a wrong clock: the sweeper believes the server's time only for `CLOCK_SHARE` of a lease."""
    world.beat()
    world.lease.idle = idle
    assert world.lease.next_heartbeat - world.now < (leases - CLOCK_SHARE) * TIMEOUT + GRACE_SECONDS


def test_unproven_heartbeat_does_not_extend_the_lease(world: World) -> None:
    world.beat()
    world.now += 20.0
    world.beat(proven=False)
    world.now += 41.0
    assert not world.lease.valid


def test_lease_ends_while_the_machine_is_suspended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.beat()
    assert world.lease.valid
    monkeypatch.setattr(module, 'uptime', lambda: world.now + TIMEOUT)
    assert not world.lease.valid
    world.beat()
    assert world.lease.valid
