"""When to ask for results, and when to follow the changes (`waiting.timing`)."""

from __future__ import annotations

import pytest

from celery_couchdb.waiting.timing import Expectation, Pacing

# -- Expectation


def requests(expectation: Expectation, ready: float) -> list[float]:
    """Return when a result is asked for that is ready after so many seconds, and learn from it."""
    asked = [0.0]
    while asked[-1] < ready:
        asked.append(expectation.next(asked[-1]))
    expectation.learn(asked[-2], asked[-1])
    return asked[1:]


def test_unknown_tasks_are_asked_for_at_growing_intervals() -> None:
    found = requests(Expectation(), 0.2)
    assert found[0] == 0.015
    assert found[-1] < 0.25
    assert len(found) < 15
    found = requests(Expectation(), 600.0)
    assert found[-1] - 600.0 < 1.0
    assert len(found) < 640


@pytest.mark.parametrize(('seconds', 'most'), [(0.2, 3), (5.0, 8)])
def test_tasks_of_the_same_duration_need_few_requests(seconds: float, most: int) -> None:
    expectation = Expectation()
    found = [requests(expectation, seconds) for _ in range(50)][20:]
    assert sum(map(len, found)) / len(found) < most
    assert max(times[-1] for times in found) < seconds * 1.16


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
