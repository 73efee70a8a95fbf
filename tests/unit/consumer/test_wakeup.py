"""The wakeup of the I/O thread (`kombu_couchdb.consumer.wakeup`)."""

from __future__ import annotations

import threading
import time

import pytest

from kombu_couchdb.consumer.wakeup import Wakeup

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
