"""When a result may be expected, and how long results are collected (`waiting.watched`)."""

from __future__ import annotations

import pytest

from celery_couchdb.waiting.watched import Expectation, Pacing

# -- Expectation


def test_expected_time_is_a_little_less_than_that_of_the_last_waits() -> None:
    expectation = Expectation()
    assert expectation.seconds == 0.0
    for _ in range(50):
        expectation.learn(5.0)
    assert 4.5 < expectation.seconds <= 5.0
    expectation.learn(0.1)
    assert expectation.seconds < 4.0


# -- Pacing


def pauses(gap: float, count: int, others: int, looks: int = 20) -> list[float]:
    pacing, now, found = Pacing(), 100.0, []
    for _ in range(looks):
        now += gap * count
        found.append(pacing.pause(count, others, now))
    return found


def test_single_and_slow_results_are_not_delayed() -> None:
    assert not any(pauses(0.001, 1, others=0))
    assert not any(pauses(0.001, 1, others=1))
    assert not any(pauses(0.1, 1, others=100))


def test_quick_results_are_collected() -> None:
    assert pauses(0.005, 1, others=100)[0] == 0.0
    assert pauses(0.005, 1, others=100)[-1] == pytest.approx(0.04)
    assert pauses(0.001, 5, others=100)[-1] == pytest.approx(0.01, rel=0.1)
