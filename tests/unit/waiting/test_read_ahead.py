"""Reading results ahead (`waiting.read_ahead`), with a store in memory and a simulated clock."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_couchdb.results.store import Recent, Store
from celery_couchdb.waiting import read_ahead as module
from celery_couchdb.waiting.read_ahead import ReadAhead

Document = dict[str, Any]


class FakeStore:
    """A store that has every document, and counts requests."""

    def __init__(self) -> None:
        self.now = 100.0
        self.requests: list[int] = []

    def read(self, doc_id: str) -> Document:
        self.requests.append(1)
        return {'_id': doc_id}

    def read_many(self, ids: Iterable[str]) -> list[Document]:
        found = [{'_id': doc_id} for doc_id in ids]
        self.requests.append(len(found))
        return found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: store.now))
    return store


def reading(store: FakeStore, sent: Iterable[str], following: Iterable[str] = ()) -> ReadAhead:
    known = list(following)

    def after(doc_id: str, count: int) -> list[str]:
        return known[known.index(doc_id) + 1 :][:count] if doc_id in known else []

    ahead = ReadAhead(cast(Store, store), after)
    for doc_id in sent:
        ahead.sent(doc_id)
    return ahead


def ask(store: FakeStore, ahead: ReadAhead, ids: Iterable[str], pause: float) -> None:
    for doc_id in ids:
        assert ahead.read(doc_id) == {'_id': doc_id}
        store.now += pause


IDS = [f'result{n}' for n in range(600)]


def test_reading_in_publish_order_takes_few_requests(store: FakeStore) -> None:
    ask(store, reading(store, IDS), IDS, 0.0001)
    assert store.requests == [1, 1, 1, 8, 16, 32, 64, 128, 250, 99]


def test_slow_reader_reads_little_in_vain(store: FakeStore) -> None:
    ask(store, reading(store, IDS), IDS, 0.03)  # three calls while results that were read ahead are valid
    assert sum(store.requests) <= 2.1 * len(IDS)
    assert max(store.requests) == 8


def test_successes_stay_valid_for_a_slow_reader_and_requests_grow(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_many(ids: Iterable[str]) -> list[Document]:
        return [{**doc, 'status': 'SUCCESS'} for doc in FakeStore.read_many(store, ids)]

    monkeypatch.setattr(store, 'read_many', read_many)
    monkeypatch.setattr(store, 'client', SimpleNamespace(clock=SimpleNamespace(now=lambda: 0.0)), raising=False)
    ahead = reading(store, IDS)
    for doc_id in IDS:
        doc = ahead.read(doc_id)
        assert doc is not None
        assert doc['_id'] == doc_id
        store.now += 0.03
    assert store.requests == [1, 1, 1, 8, 16, 32, 64, 128, 250, 99]


def test_documents_can_be_read_together(store: FakeStore) -> None:
    ahead = reading(store, [])
    ahead.load(IDS[:100])
    ask(store, ahead, IDS[:100], 0.0001)
    assert store.requests == [100]


def test_window_grows_while_the_thread_goes_on_waiting(store: FakeStore) -> None:
    ahead = reading(store, IDS)
    assert ahead.next_ids(IDS[0]) == IDS[1:9]
    assert ahead.next_ids(IDS[9]) == IDS[10:26]
    assert ahead.next_ids(IDS[590]) == IDS[591:]
    store.now += 100.0
    assert ahead.next_ids(IDS[0]) == IDS[1:9]


def test_occasional_reads_read_nothing_ahead(store: FakeStore) -> None:
    ask(store, reading(store, IDS), IDS[:20], 0.06)
    assert store.requests == [1] * 20


def test_reading_in_another_order_takes_one_request_each(store: FakeStore) -> None:
    ahead = reading(store, IDS)
    ask(store, ahead, reversed(IDS[:100]), 0.0001)
    assert len(store.requests) == 100


def test_unknown_results_are_read_alone(store: FakeStore) -> None:
    ask(store, reading(store, IDS), [f'other{n}' for n in range(10)], 0.0001)
    assert store.requests == [1] * 10


def test_results_of_a_group_take_precedence_over_publish_order(store: FakeStore) -> None:
    group = [f'member{n}' for n in range(50)]
    ask(store, reading(store, IDS, following=group), group, 0.0001)
    assert store.requests == [1, 1, 1, 8, 16, 23]


def test_recent_keeps_only_the_last_entries() -> None:
    recent: Recent[int] = Recent(100)
    for number in range(1000):
        recent[str(number)] = number
        assert len(recent) <= 100
    assert list(recent)[-1] == '999'
    assert len(recent) >= 90


def test_another_thread_may_send_tasks_meanwhile(store: FakeStore) -> None:
    """Before Python 3.12, a garbage collection may let other threads run within a single call."""
    ahead = reading(store, IDS)
    more = iter(range(1_000_000))

    def send(phase: str, info: Any) -> None:
        ahead.sent(f'another{next(more)}')

    gc.callbacks.append(send)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert ahead.next_ids(IDS[0]) == IDS[1:9]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(send)
