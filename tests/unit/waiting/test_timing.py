"""When to ask for results, and when to follow the changes (`waiting.timing`)."""

from __future__ import annotations

from typing import Any

import pytest

from celery_couchdb.waiting.timing import Expectation, Pacing, Traffic

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


# -- Traffic


def after(*counts: tuple[float, Any, int]) -> bool:
    """Return whether the database is busy after counts: the time, the update sequence, and own results before it."""
    traffic = Traffic()
    for now, sequence, results in counts:
        traffic.add_results(results)
        traffic.count(sequence, now)
    return traffic.is_busy


def test_many_updates_of_others_are_busy() -> None:
    assert after((0.0, '0-x', 0), (2.0, '100-y', 5))
    assert after((0.0, 0, 0), (2.0, 100, 5))  # the embedded server


def test_own_results_and_few_updates_are_not_busy() -> None:
    assert not after((0.0, '0-x', 0), (2.0, '100-y', 90))
    assert not after((0.0, '0-x', 0), (2.0, '100-y', 25))  # following costs less than asking for each of them
    assert not after((0.0, '0-x', 0), (60.0, '100-y', 0))


def test_one_count_and_a_short_time_tell_nothing() -> None:
    assert not after((0.0, '1000-x', 0))
    assert not after((0.0, '0-x', 0), (0.5, '100-y', 0))


def test_it_becomes_quiet_at_lower_figures() -> None:
    busy = (0.0, 0, 0), (1.0, 100, 0)
    assert after(*busy, (11.0, 140, 0))
    assert not after(*busy, (11.0, 120, 0))


@pytest.mark.parametrize('sequence', ['g1AAAA-1', 'x', None, '²-x', 5], ids=repr)
def test_sequence_that_tells_nothing_is_not_busy(sequence: Any) -> None:
    """A sequence without a number, or with a lower one: of another copy, or of a database that was created anew."""
    assert not after((0.0, 10, 0), (1.0, 1000, 0), (2.0, sequence, 0))
    assert after((0.0, 10, 0), (1.0, 1000, 0), (2.0, sequence, 0), (3.0, 2000, 0), (4.0, 3000, 0))


def test_the_sequence_is_read_soon_if_nothing_is_known() -> None:
    traffic = Traffic()
    assert traffic.is_due(0.0)
    traffic.count(1, 0.0)
    assert traffic.is_due(4.0)
    traffic.count(1, 4.0)
    assert not traffic.is_due(8.0)
    assert traffic.is_due(14.0)


# -- Pacing


def pauses(gap: float, count: int, others: int, looks: int = 20) -> list[float]:
    pacing, now, found = Pacing(), 100.0, []
    for _ in range(looks):
        now += gap * count
        found.append(pacing.pause(count, others, now))
    return found


def test_single_result_is_never_delayed() -> None:
    assert not any(pauses(0.001, 1, others=0))
    assert not any(pauses(0.001, 1, others=1))


def test_slow_results_are_not_delayed() -> None:
    assert not any(pauses(0.1, 1, others=100))


def test_quick_results_are_collected() -> None:
    assert pauses(0.005, 1, others=100)[0] == 0.0
    assert pauses(0.005, 1, others=100)[-1] == pytest.approx(0.04)
    assert pauses(0.001, 5, others=100)[-1] == pytest.approx(0.01, rel=0.1)


def test_last_results_are_expected_sooner() -> None:
    assert pauses(0.001, 5, others=3)[-1] == pytest.approx(0.003, rel=0.1)


def test_one_slow_result_ends_the_pauses() -> None:
    pacing, now = Pacing(), 0.0
    for _ in range(20):
        now += 0.005
        pause = pacing.pause(1, 100, now)
    assert pause > 0
    assert pacing.pause(1, 100, now + 1.0) == 0.0
