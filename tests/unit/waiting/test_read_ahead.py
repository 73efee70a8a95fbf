"""Results that are received before the program asks for them (`waiting.read_ahead`), with a store in memory."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_couchdb.results.result_store import Recent, ResultStore
from celery_couchdb.waiting import read_ahead as module
from celery_couchdb.waiting.read_ahead import Cache, ReadAhead

Document = dict[str, Any]


class FakeStore:
    """A store that has every document, with a simulated clock. It records how many documents each request reads."""

    def __init__(self, status: str = 'STARTED') -> None:
        self.now, self.status = 100.0, status
        self.requests: list[int] = []

    def read(self, doc_id: str) -> Document | None:
        return self.read_many([doc_id])[0]

    def read_many(self, ids: Iterable[str]) -> list[Document | None]:
        found: list[Document | None] = [self.doc(doc_id) for doc_id in ids]
        self.requests.append(len(found))
        return found

    def doc(self, doc_id: str, value: Any = 1) -> Document:
        return {'_id': doc_id, '_rev': '1-x', 'status': self.status, 'value': value}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: store.now))
    return store


@pytest.fixture
def cache() -> Cache:
    return Cache(lambda: 0.0)


def reading(store: FakeStore, sent: Iterable[str], following: Iterable[str] = ()) -> ReadAhead:
    known = list(following)

    def after(doc_id: str, count: int) -> list[str]:
        return known[known.index(doc_id) + 1 :][:count] if doc_id in known else []

    ahead = ReadAhead(cast(ResultStore, store), after, Cache(lambda: 0.0))
    for doc_id in sent:
        ahead.sent(doc_id)
    return ahead


def ask(store: FakeStore, ahead: ReadAhead, ids: Iterable[str], pause: float) -> None:
    for doc_id in ids:
        assert ahead.read(doc_id) == store.doc(doc_id)
        store.now += pause


IDS = [f'result{n}' for n in range(600)]


def test_reading_in_publish_order_takes_few_requests(store: FakeStore) -> None:
    ask(store, reading(store, IDS), IDS, 0.0001)
    assert store.requests == [1, 1, 1, 8, 16, 32, 64, 128, 250, 99]


def test_documents_that_are_replaced_while_they_are_read_are_not_kept(store: FakeStore) -> None:
    ahead = reading(store, [])
    read_many = store.read_many

    def replaced(ids: Iterable[str]) -> list[Document | None]:
        found = read_many(ids)
        ahead._cache.drop(IDS[1])
        return found

    store.read_many = replaced  # type: ignore[method-assign]
    ahead.load(IDS[:10])
    store.read_many = read_many  # type: ignore[method-assign]
    ask(store, ahead, IDS[:3], 0.06)
    assert store.requests == [10, 1, 1, 1]


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


# -- Cache


def test_success_may_be_used_for_a_minute_and_another_state_for_a_moment(store: FakeStore, cache: Cache) -> None:
    cache.add(
        [
            {**store.doc(name), 'status': status}
            for name, status in zip('abc', ['SUCCESS', 'FAILURE', 'SUCCESS'], strict=True)
        ]
    )
    assert ['a' in cache, 'b' in cache] == [True, False]
    store.now += 0.2
    assert [bool(cache.take(name)) for name in 'ab'] == [True, False]
    store.now += 60.0
    assert cache.take('c') is None


def test_size_of_the_kept_documents_is_bounded(store: FakeStore, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, '_MAX_CHARACTERS', 1000)
    cache.add([store.doc(name, 'x' * 300) for name in 'abcd'])
    assert [cache.take(name) for name in 'ab'] == [None, None]
    cache.add([store.doc('large', 'x' * 2000)])
    assert not any(map(cache.take, ('c', 'd', 'large')))
