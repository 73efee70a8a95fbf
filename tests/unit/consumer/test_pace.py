"""When cycles begin, how long acks wait, and the wakeup of the I/O thread (`kombu_couchdb.consumer.pace`)."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from kombu_couchdb.consumer import pace as module
from kombu_couchdb.consumer.credit import Credit
from kombu_couchdb.consumer.pace import Pace, Wakeup


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_messages_flow_after_a_cycle_with_several_claims(clock: SimpleNamespace) -> None:
    pace = Pace()
    assert not pace.flowing
    pace.claimed(1)
    assert not pace.flowing
    pace.claimed(2)
    assert pace.flowing
    clock.now += 0.2
    assert not pace.flowing


def test_feed_is_slower_only_while_messages_flow(clock: SimpleNamespace) -> None:
    pace = Pace()
    assert pace.feed_interval == 0.0
    pace.claimed(2)
    assert pace.feed_interval == pytest.approx(0.028)


def test_ack_of_a_single_message_waits_for_20_ms(clock: SimpleNamespace) -> None:
    pace = Pace()
    pace.begin()
    pace.claimed(1)
    assert pace.ack_delay(Credit(4), more_to_claim=False) == 0.02


def test_ack_waits_for_the_next_messages_while_they_flow(clock: SimpleNamespace) -> None:
    pace = Pace()
    pace.claimed(2)
    assert 0.028 < pace.ack_delay(Credit(4), more_to_claim=False) < 0.1


def test_ack_with_more_to_claim_waits_for_the_pace(clock: SimpleNamespace) -> None:
    pace, credit = Pace(), Credit(4, held=3)
    assert pace.ack_delay(credit, more_to_claim=True) == 0.005
    pace.begin()
    clock.now += 0.01
    assert pace.ack_delay(credit, more_to_claim=True) == pytest.approx(0.05)
    clock.now += 0.1
    assert pace.ack_delay(credit, more_to_claim=True) == 0.005


def test_ack_that_waited_for_its_result_shares_the_next_cycle_of_a_flow(clock: SimpleNamespace) -> None:
    pace = Pace()
    pace.begin()
    assert pace.seconds_to_next == 0.0
    pace.claimed(2)
    clock.now += 0.01
    assert pace.seconds_to_next == pytest.approx(0.05)
    clock.now += 0.08
    assert pace.seconds_to_next == 0.0


@pytest.mark.parametrize('credit', [Credit(4, held=2), Credit(1), Credit()], ids=['half', 'one', 'unlimited'])
def test_ack_does_not_wait_if_the_messages_run_out(clock: SimpleNamespace, credit: Credit) -> None:
    pace = Pace()
    pace.begin()
    assert pace.ack_delay(credit, more_to_claim=True) == 0.0


# -- the wakeup

LONG = 100.0


def waited(wakeup: Wakeup, timeout: float = LONG) -> float:
    began = time.monotonic()
    wakeup.wait(timeout)
    return time.monotonic() - began


def has_passed(seconds: float, since: float) -> bool:
    """Compare sums, as `Wakeup` does: the difference of two times may be rounded down."""
    return time.monotonic() >= since + seconds


def test_wakeup_set_before_the_wait_ends_it_at_once() -> None:
    wakeup = Wakeup()
    wakeup.set()
    assert waited(wakeup) < LONG / 2


def test_other_thread_ends_the_wait() -> None:
    wakeup = Wakeup()
    threading.Timer(0.05, wakeup.set).start()
    assert waited(wakeup) < LONG / 2


def test_wait_lasts_for_its_timeout() -> None:
    began = time.monotonic()
    Wakeup().wait(0.05)
    assert has_passed(0.05, began)


def test_each_wakeup_ends_one_wait() -> None:
    wakeup = Wakeup()
    wakeup.set()
    wakeup.set()
    wakeup.wait(LONG)
    began = time.monotonic()
    wakeup.wait(0.05)
    assert has_passed(0.05, began)


def test_wakeup_within_some_time() -> None:
    wakeup = Wakeup()
    began = time.monotonic()
    wakeup.set(0.05)
    assert waited(wakeup) < LONG / 2
    assert has_passed(0.05, began)


@pytest.mark.parametrize('order', [(LONG * 2, 0.0), (0.0, LONG * 2)])
def test_earliest_wakeup_counts(order: tuple[float, float]) -> None:
    wakeup = Wakeup()
    for within in order:
        wakeup.set(within)
    assert waited(wakeup) < LONG / 2


def test_earlier_wakeup_shortens_a_wait() -> None:
    wakeup = Wakeup()
    wakeup.set(LONG * 2)
    threading.Timer(0.05, wakeup.set).start()
    assert waited(wakeup) < LONG / 2
