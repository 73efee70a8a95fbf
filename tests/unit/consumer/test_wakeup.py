"""What wakes the I/O thread (`kombu_couchdb.consumer.wakeup`)."""

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
    """Adds as the bell does: of two sums the later is not the smaller one, a difference may be rounded down."""
    return time.monotonic() >= since + seconds


def test_rung_before_it_is_heard_at_once() -> None:
    wakeup = Wakeup()
    wakeup.set()
    assert waited(wakeup) < LONG / 2


def test_rung_by_another_thread() -> None:
    wakeup = Wakeup()
    threading.Timer(0.05, wakeup.set).start()
    assert waited(wakeup) < LONG / 2


def test_unheard_it_waits_as_long_as_told() -> None:
    began = time.monotonic()
    Wakeup().wait(0.05)
    assert has_passed(0.05, began)


def test_each_ring_is_heard_once() -> None:
    wakeup = Wakeup()
    wakeup.set()
    wakeup.set()
    wakeup.wait(LONG)
    began = time.monotonic()
    wakeup.wait(0.05)
    assert has_passed(0.05, began)


def test_soon_is_later_than_now() -> None:
    wakeup = Wakeup()
    rung = time.monotonic()
    wakeup.set(0.05)
    assert waited(wakeup) < LONG / 2
    assert has_passed(0.05, rung)


@pytest.mark.parametrize('order', [(LONG * 2, 0.0), (0.0, LONG * 2)])
def test_the_earliest_counts(order: tuple[float, float]) -> None:
    wakeup = Wakeup()
    for within in order:
        wakeup.set(within)
    assert waited(wakeup) < LONG / 2


def test_an_earlier_ring_shortens_a_wait_that_has_begun() -> None:
    wakeup = Wakeup()
    wakeup.set(LONG * 2)
    threading.Timer(0.05, wakeup.set).start()
    assert waited(wakeup) < LONG / 2
