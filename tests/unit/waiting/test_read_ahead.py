"""Reading results ahead (`waiting.read_ahead`), with a store in memory and a fake clock."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_couchdb.results.store import Recent, Store
from celery_couchdb.waiting import read_ahead as module
from celery_couchdb.waiting.read_ahead import ReadAhead

Document = dict[str, Any]


class FakeStore:
    """Has every document, and records the number of documents in each request."""

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


def test_results_read_in_the_order_of_sending_need_few_requests(store: FakeStore) -> None:
    ask(store, reading(store, IDS), IDS, 0.0001)
    assert store.requests == [1, 1, 1, 8, 16, 32, 64, 128, 250, 99]


def test_slow_reader_reads_few_unused_documents(store: FakeStore) -> None:
    ask(store, reading(store, IDS), IDS, 0.03)  # three of them before the documents are too old
    assert sum(store.requests) <= 2.1 * len(IDS)
    assert max(store.requests) == 8


def test_results_read_with_pauses_are_read_one_by_one(store: FakeStore) -> None:
    ask(store, reading(store, IDS), IDS[:20], 0.06)
    assert store.requests == [1] * 20


def test_results_read_in_another_order_are_read_one_by_one(store: FakeStore) -> None:
    ahead = reading(store, IDS)
    ask(store, ahead, reversed(IDS[:100]), 0.0001)
    assert len(store.requests) == 100


def test_unknown_results_are_read_one_by_one(store: FakeStore) -> None:
    ask(store, reading(store, IDS), [f'other{n}' for n in range(10)], 0.0001)
    assert store.requests == [1] * 10


def test_results_of_a_group_are_read_ahead_before_sent_ones(store: FakeStore) -> None:
    group = [f'member{n}' for n in range(50)]
    ask(store, reading(store, IDS, following=group), group, 0.0001)
    assert store.requests == [1, 1, 1, 8, 16, 23]


def test_recent_keeps_the_newest_entries() -> None:
    recent: Recent[int] = Recent(100)
    for number in range(1000):
        recent[str(number)] = number
        assert len(recent) <= 100
    assert list(recent)[-1] == '999'
    assert len(recent) >= 90
