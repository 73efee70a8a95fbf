"""What wakes the I/O thread (`kombu_couchdb.consumer.wakeup`)."""

from __future__ import annotations

import threading
import time

import pytest

from kombu_couchdb.consumer.wakeup import Bell

LONG = 100.0


def waited(bell: Bell, timeout: float = LONG) -> float:
    began = time.monotonic()
    bell.wait(timeout)
    return time.monotonic() - began


def has_passed(seconds: float, since: float) -> bool:
    """Adds as the bell does: of two sums the later is not the smaller one, a difference may be rounded down."""
    return time.monotonic() >= since + seconds


def test_rung_before_it_is_heard_at_once() -> None:
    bell = Bell()
    bell.ring()
    assert waited(bell) < LONG / 2


def test_rung_by_another_thread() -> None:
    bell = Bell()
    threading.Timer(0.05, bell.ring).start()
    assert waited(bell) < LONG / 2


def test_unheard_it_waits_as_long_as_told() -> None:
    began = time.monotonic()
    Bell().wait(0.05)
    assert has_passed(0.05, began)


def test_each_ring_is_heard_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.wait(LONG)
    began = time.monotonic()
    bell.wait(0.05)
    assert has_passed(0.05, began)


def test_soon_is_later_than_now() -> None:
    bell = Bell()
    rung = time.monotonic()
    bell.ring(0.05)
    assert waited(bell) < LONG / 2
    assert has_passed(0.05, rung)


@pytest.mark.parametrize('order', [(LONG * 2, 0.0), (0.0, LONG * 2)])
def test_the_earliest_counts(order: tuple[float, float]) -> None:
    bell = Bell()
    for within in order:
        bell.ring(within)
    assert waited(bell) < LONG / 2


def test_an_earlier_ring_shortens_a_wait_that_has_begun() -> None:
    bell = Bell()
    bell.ring(LONG * 2)
    threading.Timer(0.05, bell.ring).start()
    assert waited(bell) < LONG / 2
