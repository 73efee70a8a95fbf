"""When to ask for a result (`waiting.expectation`)."""

from __future__ import annotations

import pytest

from celery_couchdb.waiting.expectation import Expectation


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


@pytest.mark.parametrize('ready', [0.05, 1.0, 100.0])
def test_result_that_comes_early_is_found_soon(ready: float) -> None:
    expectation = Expectation()
    for _ in range(20):
        expectation.learn(600.0, 600.0)
    assert requests(expectation, ready)[-1] <= max(0.2, 2 * ready)


def test_late_result_is_found_soon_and_the_next_are_expected_later() -> None:
    expectation = Expectation()
    for _ in range(20):
        expectation.learn(0.2, 0.2)
    assert requests(expectation, 3.0)[-1] < 3.5
    for _ in range(50):
        requests(expectation, 3.0)
    assert len(requests(expectation, 3.0)) < 8
