"""Whether the results' database is busy with the results of others (`waiting.traffic`)."""

from __future__ import annotations

from typing import Any

import pytest

from celery_couchdb.waiting.traffic import Traffic


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
