"""Results that were received before the program asked for them (`waiting.received`), and the pacing of looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_couchdb.waiting import received as module
from celery_couchdb.waiting.pacing import Pacing
from celery_couchdb.waiting.received import Ahead, Received


def success(doc_id: str, value: Any = 1) -> dict[str, Any]:
    return {'_id': doc_id, '_rev': '1-x', 'status': 'SUCCESS', 'value': value}


def test_only_successes_are_kept_and_each_is_returned_once() -> None:
    received = Received()
    assert received.add(success('a'))
    assert not received.add({**success('b'), 'status': 'FAILURE'})
    assert received.take('a') == success('a')
    assert received.take('a') is None
    assert received.take('b') is None


def test_oldest_results_are_dropped_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, '_MAX_DOCS', 3)
    received = Received()
    for name in 'abcd':
        received.add(success(name))
    assert [name for name in 'abcd' if name in received] == ['b', 'c', 'd']


def test_size_of_the_kept_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, '_MAX_CHARACTERS', 1000)
    received = Received()
    for name in 'abcd':
        received.add(success(name, 'x' * 300))
    assert [name for name in 'abcd' if name in received] == ['c', 'd']
    received.add(success('large', 'x' * 2000))
    assert not any(name in received for name in ('c', 'd', 'large'))


def test_kept_result_is_not_used_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: clock.now))
    received = Received()
    received.add(success('a'))
    clock.now = 61.0
    assert received.take('a') is None


def test_ahead_keeps_states_while_they_are_watched() -> None:
    received = Received()
    ahead = Ahead(received)
    assert ahead.extend(['a', 'b', 'c']) == {'a', 'b', 'c'}
    started = {**success('a'), 'status': 'STARTED'}
    for doc in (started, success('b'), {**success('c', 'x' * 5000), 'status': 'PROGRESS'}, success('other')):
        ahead.keep(doc)
    assert ahead == {'a': started}
    assert 'b' in received
    assert 'other' not in received
    assert ahead.extend(['a', 'b', 'c']) == {'c'}
    ahead.forget_states(['a', 'other'])
    assert ahead == {'a': None, 'c': None}


def test_number_of_documents_watched_ahead_is_bounded() -> None:
    ahead = Ahead(Received())
    assert len(ahead.extend(map(str, range(5000)))) == 1000
    assert ahead.extend(['another']) == set()


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
