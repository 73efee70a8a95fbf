"""Jumps of the server's clock: valid leases and used queues survive, and messages of killed workers are redelivered."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from kombu import Queue

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases.sweeper import Sweeper
from tests.support import Inbox, Peer, publish

from .conftest import Connect

#: The lease in seconds of consumers that must keep it, even if the machine stalls for some seconds.
LEASE = 9.0
#: The lease in seconds of consumers that are killed.
SHORT = 2.0

HOUR = 3600.0


@pytest.fixture
def jump(client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets the server's clock ahead by `seconds`, as all connections of this process see it."""
    true = client.clock.now
    return lambda seconds: monkeypatch.setattr(client.clock, 'now', lambda: true() + seconds)


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic times of all sweeps of this process."""
    times, sweep = list[float](), Sweeper.sweep

    def counted(self: Sweeper, *args: object) -> set[str]:
        living = sweep(self, *args)  # type: ignore[arg-type]
        times.append(time.monotonic())
        return living

    monkeypatch.setattr(Sweeper, 'sweep', counted)
    return times


def queues(client: Client) -> set[str]:
    return {row['doc']['name'] for row in client.id_range('broker:queue:', docs=True)}


@pytest.mark.parametrize('seconds', [-600.0, 600.0])
def test_messages_of_a_killed_consumer_are_redelivered_despite_a_clock_jump(
    url: str, connect: Connect, jump: Callable[[float], None], seconds: float
) -> None:
    publish(connect(), 'hello')
    with Peer(url, options={'visibility_timeout': SHORT}) as peer:
        assert peer.next()['got'] == 'hello'
        peer.signal(signal.SIGKILL)
        peer.process.wait()
        jump(seconds)
        assert Inbox(connect()).wait(1) == ['hello']


def test_temporary_queue_in_use_survives_a_clock_jump(
    url: str, connect: Connect, client: Client, jump: Callable[[float], None], sweeps: list[float]
) -> None:
    with Peer(url, ack=True, queue_name='temporary', auto_delete=True, options={'visibility_timeout': LEASE}) as peer:
        publish(connect(), 'before', 'temporary')
        assert peer.next()['got'] == 'before'
        jump(2 * HOUR)
        inbox = Inbox(connect(visibility_timeout=LEASE), Queue('temporary', auto_delete=True), 'other')
        inbox.consumer.cancel_by_queue('temporary')
        sweeps.clear()
        inbox.drain_until(lambda: sweeps and sweeps[-1] - sweeps[0] > LEASE, 'sweeps for the length of a lease')
        assert queues(client) >= {'temporary'}
        publish(connect(), 'after', 'temporary')
        assert peer.next()['got'] == 'after'
