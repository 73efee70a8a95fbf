"""Several threads' writes in one request (`couchdb.group_commit`), over a client that answers when it is told to."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.errors import AccessDenied, Conflict, CouchDBError, DocumentTooLarge, ServerUnavailable, Unstorable
from tests.conftest import PATIENCE, wait_for


class Server:
    """Takes documents, one request at a time, and refuses those whose id is in `refused`."""

    address = Address()
    request_bytes = 1_000_000

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.open = threading.Event()
        self.refused: dict[str, BaseException] = {}

    def put(self, doc: Document, *, text: bytes | None = None) -> str:
        self._take([doc])
        return '1-a'

    def bulk(self, docs: Sequence[Document], *, texts: Sequence[bytes] | None = None) -> list[Document]:
        assert texts is None or [json.loads(text) for text in texts] == docs
        self._take(docs)
        return [WriteResult(doc['_id'], WriteStatus.STORED, '1-b') for doc in docs]

    def _take(self, docs: Sequence[Document]) -> None:
        self.requests.append([doc['_id'] for doc in docs])
        assert self.open.wait(PATIENCE)
        for doc in docs:
            if doc['_id'] in self.refused:
                raise self.refused[doc['_id']]


class Bench:
    """A group commit and threads that write by it: the first is under way, and the others wait behind it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.server = Server()
        self.commit = GroupCommit(cast(Client, self.server))
        self._pool = pool

    def write(self, *ids: str) -> Future[list[Document]]:
        waiting = len(self.commit._pending) + len(self.server.requests)
        future = self._pool.submit(self.commit.write, [{'_id': doc_id} for doc_id in ids])
        wait_for(lambda: len(self.commit._pending) + len(self.server.requests) > waiting, 'the write')
        return future

    def go(self, futures: Sequence[Future[list[Document]]]) -> list[Any]:
        self.server.open.set()
        return [future.exception(PATIENCE) or future.result() for future in futures]


@pytest.fixture
def bench() -> Any:
    with ThreadPoolExecutor(16) as pool:
        bench = Bench(pool)
        yield bench
        bench.server.open.set()


def revs(answers: Sequence[WriteResult]) -> list[str]:
    return [answer.rev for answer in answers]


def test_alone_it_is_a_put(bench: Bench) -> None:
    assert bench.go([bench.write('a')]) == [[WriteResult('a', WriteStatus.STORED, '1-a')]]
    assert bench.server.requests == [['a']]


def test_who_comes_meanwhile_shares_the_next_request(bench: Bench) -> None:
    done = bench.go([bench.write('a'), bench.write('b'), bench.write('c', 'd'), bench.write('e')])
    assert [[answer.id for answer in answers] for answers in done] == [['a'], ['b'], ['c', 'd'], ['e']]
    assert [sorted(ids) for ids in bench.server.requests] == [['a'], ['b', 'c', 'd', 'e']]


def test_two_writes_of_one_document_never_share_a_request(bench: Bench) -> None:
    bench.go([bench.write('a'), bench.write('b'), bench.write('b'), bench.write('c')])
    assert sorted(map(sorted, bench.server.requests)) == [['a'], ['b'], ['b', 'c']]


def test_a_request_has_no_more_than_it_may(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('kombu_couchdb.couchdb.group_commit._MAX_DOCS', 3)
    bench.go([bench.write('a'), *(bench.write(f'{n}', f'{n}x') for n in range(3))])
    assert [len(request) for request in bench.server.requests] == [1, 2, 2, 2]


@pytest.mark.parametrize('error', [DocumentTooLarge('too large'), AccessDenied('forbidden')])
def test_what_is_refused_to_one_is_not_refused_to_the_others(bench: Bench, error: CouchDBError) -> None:
    bench.server.refused['c'] = error
    a, b, c, d = bench.go([bench.write('a'), bench.write('b'), bench.write('c'), bench.write('d')])
    assert [revs(answers) for answers in (a, b, d)] == [['1-a'], ['1-a'], ['1-a']]
    assert (type(c), str(c)) == (type(error), str(error))
    assert [sorted(ids) for ids in bench.server.requests[:2]] == [['a'], ['b', 'c', 'd']]
    assert sorted(bench.server.requests[2:]) == [['b'], ['c'], ['d']]


def test_if_the_server_is_away_all_are_told(bench: Bench) -> None:
    bench.server.refused['c'] = ServerUnavailable('cut off')
    _, b, c = bench.go([bench.write('a'), bench.write('b'), bench.write('c')])
    assert [type(error) for error in (b, c)] == [ServerUnavailable, ServerUnavailable]
    assert b is not c
    assert [sorted(ids) for ids in bench.server.requests] == [['a'], ['b', 'c']]


def test_a_conflict_is_an_answer(bench: Bench) -> None:
    bench.server.refused['a'] = Conflict('changed')
    [[answer]] = bench.go([bench.write('a')])
    assert (answer.id, answer.error) == ('a', 'conflict')


def test_who_is_told_to_stop_costs_the_others_nothing(bench: Bench) -> None:
    """A time limit may strike the thread that sends for all: the next one sends again what was not answered."""
    bench.server.refused['b'] = KeyboardInterrupt()
    a, *others = bench.go([bench.write('a'), bench.write('b'), bench.write('c')])
    assert revs(a) == ['1-a']
    assert any(isinstance(other, KeyboardInterrupt) for other in others)
    assert [revs(other) for other in others if isinstance(other, list)] in ([['1-a']], [['1-b']], [])
    del bench.server.refused['b']
    assert revs(bench.commit.write([{'_id': 'd'}])) == ['1-a']
    assert not bench.commit._pending


@pytest.mark.parametrize('step', ['_next_batch', '_send'])
def test_whenever_a_time_limit_strikes_the_next_can_write(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class TimeLimit(Exception):
        pass

    def strike(*args: Any) -> None:
        raise TimeLimit

    bench.server.open.set()
    with monkeypatch.context() as patched:
        patched.setattr(bench.commit, step, strike)
        with pytest.raises(TimeLimit):
            bench.commit.write([{'_id': 'a'}])
    assert revs(bench.commit.write([{'_id': 'b'}])) == ['1-a']
    assert bench.server.requests == [['b']]  # nobody waits for the first any more


def test_a_time_limit_that_strikes_who_sends_for_all_is_raised(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a refusal: each was sent for itself, and the limit was forgotten."""

    class TimeLimit(Exception):
        pass

    take = bench.server._take

    def strike_second(docs: Sequence[Document]) -> None:
        take(docs)
        if len(bench.server.requests) == 2:
            raise TimeLimit

    monkeypatch.setattr(bench.server, '_take', strike_second)
    a, *others = bench.go([bench.write('a'), bench.write('b'), bench.write('c')])
    assert revs(a) == ['1-a']
    assert [sorted(ids) for ids in bench.server.requests[:2]] == [['a'], ['b', 'c']]
    struck = [isinstance(other, TimeLimit) for other in others]
    assert sum(struck) == 1
    assert bench.server.requests[2:] == [
        ['b'] if struck[1] else ['c']
    ]  # the other one is sent again, by its own thread


def test_who_gave_up_waiting_is_not_written_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.write('a')

    def strike(timeout: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bench.commit._changed, 'wait', strike)
        with pytest.raises(KeyboardInterrupt):
            bench.commit.write([{'_id': 'b'}])
    bench.go([first])
    bench.commit.write([{'_id': 'c'}])
    assert bench.server.requests == [['a'], ['c']]


def test_what_cannot_be_encoded_is_its_own_threads_affair(bench: Bench) -> None:
    first, good = bench.write('a'), bench.write('b')
    with pytest.raises(Unstorable, match='not JSON serializable'):
        bench.commit.write([{'_id': 'c', 'x': object()}])
    assert [revs(answers) for answers in bench.go([first, good])] == [['1-a'], ['1-a']]


def test_large_ones_share_no_request(bench: Bench) -> None:
    bench.server.request_bytes = 40
    bench.go([bench.write('a'), bench.write('b' * 30), bench.write('c' * 30), bench.write('d' * 300)])
    assert [len(request) for request in bench.server.requests] == [1, 1, 1, 1]


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_a_child_does_not_wait_for_what_its_parent_was_writing(bench: Bench) -> None:
    future = bench.write('a')
    child = os.fork()
    if not child:
        try:
            bench.server.open = threading.Event()  # a thread of the parent may have held the lock of the other
            bench.server.open.set()
            os._exit(0 if revs(bench.commit.write([{'_id': 'b'}])) == ['1-a'] else 1)
        finally:
            os._exit(1)
    ended = wait_for(lambda: [status for pid, status in [os.waitpid(child, os.WNOHANG)] if pid], 'the child')
    assert os.waitstatus_to_exitcode(ended[0]) == 0
    bench.go([future])


def test_connections_to_one_database_share_one() -> None:
    first, second, other = (Client(Address(database=name)) for name in ('a', 'a', 'b'))
    commits = [GroupCommit.of(first), GroupCommit.of(second), GroupCommit.of(other)]
    assert commits[0] is commits[1]
    assert commits[0] is not commits[2]
