"""The pace of cycles, acks and tasks, and the wakeup of the I/O thread (`kombu_couchdb.consumer.pace`)."""

from __future__ import annotations

import threading
import time

import pytest

from kombu_couchdb.consumer.pace import Throughput, Wakeup

# -- the wakeup

LONG = 100.0


def waited(wakeup: Wakeup, timeout: float = LONG) -> float:
    began = time.monotonic()
    wakeup.wait(timeout)
    return time.monotonic() - began


def has_passed(seconds: float, since: float) -> bool:
    """Compare sums, as `Wakeup` does: the difference of two times may be rounded down."""
    return time.monotonic() >= since + seconds


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


def test_interrupted_wait_keeps_the_times() -> None:
    wakeup = Wakeup()
    wakeup.set(0.05)
    began = time.monotonic()
    wakeup.interrupt()
    assert not wakeup.wait(LONG)
    assert wakeup.wait(LONG)
    assert has_passed(0.05, began)
    assert time.monotonic() - began < LONG / 2


# -- the throughput


def rate(count: int, interval: float) -> Throughput:
    """Return a rate after `count` decisions, the last one at the time 0."""
    rate = Throughput()
    for n in range(count):
        rate.note((n + 1 - count) * interval)
    return rate


def test_nothing_is_claimed_ahead_before_two_rounds_of_the_prefetch_count() -> None:
    assert rate(63, 0.001).ahead(32, 0.001) == 0
    assert rate(64, 0.001).ahead(32, 0.001) > 0
    assert rate(15, 0.001).ahead(1, 0.001) == 0


@pytest.mark.parametrize(
    ('interval', 'limit', 'ahead'),
    [
        (0.001, 8, 100),
        (0.001, 80, 70),
        (0.001, 200, 0),
        (0.01, 1, 10),
        (0.01, 8, 7),
        (0.01, 16, 0),
        (1.0, 1, 0),
        (0.1, 1, 0),
    ],
)
def test_prefetch_count_and_surplus_last_for_150_ms_and_the_surplus_for_100(
    interval: float, limit: int, ahead: int
) -> None:
    assert rate(512, interval).ahead(limit, interval) == ahead


def test_tasks_that_end_together_are_not_fast() -> None:
    rate = Throughput()
    for second in range(10):
        for n in range(8):
            rate.note(second + n / 1000)
    assert rate.ahead(8, 9.01) == 0


def decisions_until_ahead(rate: Throughput) -> int:
    for n in range(10_000):
        if rate.ahead(1, n / 1000):
            return n
        rate.note(n / 1000)
    raise AssertionError('never')


def test_repeated_stalls_make_each_measurement_begin_later() -> None:
    found = rate(100, 0.001)
    waits = []
    for _ in range(4):
        found.stalled()
        waits.append(decisions_until_ahead(found))
    assert waits == [32, 48, 80, 144]
