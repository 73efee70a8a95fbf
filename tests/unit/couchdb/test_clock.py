"""The server's time (`kombu_couchdb.couchdb.clock`)."""

from __future__ import annotations

import logging
from email.utils import formatdate
from types import SimpleNamespace

import pytest

from kombu_couchdb.couchdb import clock as module
from kombu_couchdb.couchdb.clock import ServerClock

LOCAL, MONOTONIC = 1_763_709_000.4, 5000.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine whose clocks stand still; a test may set them."""
    machine = SimpleNamespace(local=LOCAL, monotonic=MONOTONIC)
    clocks = SimpleNamespace(time=lambda: machine.local, monotonic=lambda: machine.monotonic)
    monkeypatch.setattr(module, 'time', clocks)
    return machine


@pytest.fixture
def clock(machine: SimpleNamespace) -> ServerClock:
    """A server clock on a machine whose local time is LOCAL."""
    return ServerClock()


def observe(clock: ServerClock, server: float, took: float = 0.01, lag: float = 0.0, at: float = MONOTONIC) -> None:
    """Observe a response of a server whose time is `server` and whose header lags by `lag` seconds."""
    clock.observe(formatdate(server - lag, usegmt=True), at - took / 2, at + took / 2)


@pytest.mark.parametrize('step', [-86_400.0, -3600.0, -1.0, 1.0, 3600.0, 86_400.0])
def test_a_step_of_the_local_clock_changes_nothing(clock: ServerClock, machine: SimpleNamespace, step: float) -> None:
    observe(clock, LOCAL)
    machine.local += step + 10.0
    machine.monotonic += 10.0
    assert abs(clock.now() - LOCAL - 10.0) < 0.001
    observe(clock, LOCAL + 10.0, at=MONOTONIC + 10.0)
    assert abs(clock.now() - LOCAL - 10.0) < 0.001
    assert not clock.agrees or abs(step) <= 1.0


@pytest.mark.parametrize('lag', [0.0, 0.5, 1.0])
@pytest.mark.parametrize('wrong', [-0.3, 0.0, 0.3])
def test_a_correct_clock_is_not_changed(clock: ServerClock, wrong: float, lag: float) -> None:
    observe(clock, LOCAL + wrong, lag=lag)
    assert clock.now() == LOCAL


@pytest.mark.parametrize('wrong', [-86_400.0, -600.0, -120.0, -10.0, 10.0, 120.0, 600.0, 86_400.0])
@pytest.mark.parametrize('lag', [0.0, 1.0])
def test_a_wrong_clock_is_corrected_in_both_directions(clock: ServerClock, wrong: float, lag: float) -> None:
    observe(clock, LOCAL + wrong, lag=lag)
    assert abs(clock.now() - (LOCAL + wrong)) < 1.5


def test_a_wrong_clock_is_logged_once(clock: ServerClock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for second in range(5):
            observe(clock, LOCAL + 300 + second / 3)
    assert [record.getMessage().count('300 s') + record.getMessage().count('301 s') for record in caplog.records] == [1]


def test_the_local_clock_is_used_again_after_it_was_set_right(
    clock: ServerClock, caplog: pytest.LogCaptureFixture
) -> None:
    observe(clock, LOCAL + 300)
    assert clock.now() != LOCAL
    caplog.clear()
    observe(clock, LOCAL)
    assert clock.now() == LOCAL
    assert caplog.records == []


def test_time_that_the_server_has_run_ahead(clock: ServerClock) -> None:
    """Somebody has set its clock forward, or no clock of this machine went on while it was paused."""
    observe(clock, LOCAL)
    observe(clock, LOCAL + 2, at=MONOTONIC + 2)
    assert clock.gained == 0.0
    observe(clock, LOCAL + 100, at=MONOTONIC + 4)
    gained = clock.gained
    assert 90 < gained <= 96
    observe(clock, LOCAL + 5, at=MONOTONIC + 5)
    assert clock.gained == gained


def test_uptime_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {7: 900.0, 1: 500.0}
    for name, expected in (('CLOCK_BOOTTIME', 900.0), ('CLOCK_MONOTONIC', 500.0)):
        number = 7 if name == 'CLOCK_BOOTTIME' else 1
        fake = SimpleNamespace(**{name: number, 'clock_gettime': clocks.__getitem__, 'monotonic': lambda: 100.0})
        monkeypatch.setattr(module, 'time', fake)
        assert module.uptime() == expected
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: 100.0))
    assert module.uptime() == 100.0
