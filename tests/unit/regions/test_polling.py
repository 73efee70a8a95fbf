"""The times of looks (`celery_couchdb.regions.polling`)."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_couchdb.regions.polling import Activity, Looks
from kombu_couchdb.couchdb.conflicts import SYNC


class FakeActivity:
    def __init__(self) -> None:
        self.is_enough, self.watches = False, 0

    def watch(self) -> None:
        self.watches += not self.is_enough
        self.is_enough = True


class Case:
    """Looks with a clock of their own."""

    def __init__(self) -> None:
        self.activity = FakeActivity()
        self.looks = Looks(cast(Any, self.activity))
        self.now = 1000.0

    def look(self, *, found: bool = False) -> float:
        """Wait for the next look and make it; return in how many seconds the next one is due."""
        self.now = max(self.now, self.looks.next_at)
        self.looks.begin(5.0)
        self.looks.end(found=found)
        return self.looks.next_at - self.now


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    case = Case()
    monkeypatch.setattr(time, 'monotonic', lambda: case.now)
    return case


def test_looks_that_find_something_have_an_interval(case: Case) -> None:
    assert [case.look(found=True) for _ in range(20)] == [5.0] * 20
    assert case.activity.watches == 0


def test_looks_that_find_nothing_become_rare(case: Case) -> None:
    assert [case.look() for _ in range(8)] == [5.0] * 4 + [60.0] * 4
    assert case.activity.watches == 1


def test_activity_ends_the_rest(case: Case) -> None:
    while case.look() < 60.0:
        pass
    case.activity.is_enough = False
    case.looks.soon(1.0)
    assert case.looks.next_at - case.now == 1.0
    assert [case.look() for _ in range(6)] == [5.0] * 4 + [60.0] * 2
    assert case.activity.watches == 2


def test_activity_during_a_look_prevents_the_rest(case: Case) -> None:
    for _ in range(4):
        case.look()
    case.now = case.looks.next_at
    case.looks.begin(5.0)
    case.activity.is_enough = False
    case.looks.end(found=False)
    assert case.looks.next_at - case.now == 5.0


def test_look_that_finds_something_begins_the_count_again(case: Case) -> None:
    found = [case.look(found=number == 3) for number in range(8)]
    assert found == [5.0] * 8
    assert case.look() == 60.0


def test_failed_look_is_repeated_after_the_interval(case: Case) -> None:
    while case.look() < 60.0:
        pass
    case.now = case.looks.next_at
    case.looks.begin(5.0)  # and a request fails
    assert case.looks.next_at - case.now == 5.0


def cluster(replicas: int) -> tuple[Activity, list[int]]:
    """Return activity in a database with so many copies, and a list to which it appends when it is noted."""
    wakes: list[int] = []
    broker = SimpleNamespace(replicas=replicas, sequence=lambda: '1-x')
    activity = Activity(cast(Any, broker), lambda: wakes.append(1))
    activity._follower._feed = cast(Any, SimpleNamespace(ask=lambda since, body: None, pause=lambda: None))
    return activity, wakes


@pytest.mark.parametrize(('replicas', 'seconds'), [(1, 0.0), (3, SYNC)])
def test_look_is_enough_when_all_nodes_have_what_was_written_before(
    monkeypatch: pytest.MonkeyPatch, replicas: int, seconds: float
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, 'monotonic', lambda: now)
    activity, wakes = cluster(replicas)
    assert not activity.is_enough
    activity.watch()
    assert activity.is_enough == (replicas == 1)
    now += seconds / 2
    activity.watch()  # changes nothing
    now += seconds / 2
    assert activity.is_enough
    activity._follower._on_rows([], '2-x')
    assert (activity.is_enough, wakes, activity.take(), activity.take()) == (False, [1], True, False)


def test_paused_activity_is_not_enough() -> None:
    activity, _ = cluster(1)
    activity.watch()
    activity.pause()
    assert not activity.is_enough
