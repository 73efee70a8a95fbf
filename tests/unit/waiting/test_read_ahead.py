"""Results that are received before the program asks for them (`waiting.read_ahead`)."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_couchdb.results.result_store import ResultStore
from celery_couchdb.waiting import read_ahead as module
from celery_couchdb.waiting.read_ahead import Cache, ReadAhead
from celery_couchdb.waiting.watched import ResultMailbox, Watched


def doc(doc_id: str, status: str = 'SUCCESS', value: Any = 1) -> dict[str, Any]:
    return {'_id': doc_id, '_rev': '1-x', 'status': status, 'value': value}


def test_success_may_be_used_for_a_minute_and_another_state_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cache = 100.0, Cache(lambda: 0.0)
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: now))
    cache.add([doc('a'), doc('b', 'FAILURE'), doc('c')])
    assert ['a' in cache, 'b' in cache] == [True, False]
    now += 0.2
    assert [bool(cache.take(name)) for name in 'ab'] == [True, False]
    now += 60.0
    assert cache.take('c') is None


def test_size_of_the_kept_documents_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(lambda: 0.0)
    monkeypatch.setattr(module, '_MAX_CHARACTERS', 1000)
    cache.add([doc(name, value='x' * 300) for name in 'abcd'])
    assert [cache.take(name) for name in 'ab'] == [None, None]
    cache.add([doc('large', value='x' * 2000)])
    assert not any(map(cache.take, ('c', 'd', 'large')))


def test_documents_that_are_replaced_while_they_are_read_are_not_kept() -> None:
    cache = Cache(lambda: 0.0)

    def read_many(ids: Iterable[str]) -> list[dict[str, Any]]:
        cache.drop('b')
        return [doc(name) for name in ids]

    store = cast(ResultStore, SimpleNamespace(read_many=read_many))
    ReadAhead(store, lambda *_: [], cache).load('abc')
    assert not any(map(cache.take, 'abc'))


def test_wait_forgets_what_was_read_before_the_end() -> None:
    """Otherwise `state` would be `PENDING` a moment after `get()` has returned the result."""
    cache, mailbox = Cache(lambda: 0.0), ResultMailbox()
    cache.add([{'_id': 'missing'}, doc('begun', 'STARTED'), doc('done')])
    Watched(cache).add(mailbox, ['missing', 'begun', 'done'], ())
    assert [cache.take(name) for name in ('missing', 'begun')] == [None, None]
    assert mailbox.receive(0) == [doc('done')]
