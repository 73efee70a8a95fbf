"""Group commit (`kombu_couchdb.couchdb.group_commit`) with a simulated server that the tests control."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.bulk import RequestSize
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.couchdb.pacing import Pace
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.errors import AccessDenied, CouchDBError, DocumentTooLarge, ServerUnavailable
from tests.conftest import PATIENCE, wait_for


class Server:
    """Blocks all requests until `open` is set, and raises the errors in `refused`, by document id."""

    address = Address()

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.request_size, self.pace = RequestSize(), Pace('a server')
        self.open = threading.Event()
        self.refused: dict[str, BaseException] = {}

    def bulk(self, docs: Sequence[Document], *, texts: Sequence[bytes] | None = None) -> list[WriteResult]:
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
    """A group commit and threads that write with it: the first request blocks, and later writes wait."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.server = Server()
        self.commit = GroupCommit(cast(Client, self.server))
        self._pool = pool

    def write(self, *ids: str) -> Future[list[WriteResult]]:
        waiting = len(self.commit._pending) + len(self.server.requests)
        future = self._pool.submit(self.commit.write, [{'_id': doc_id} for doc_id in ids])
        wait_for(lambda: len(self.commit._pending) + len(self.server.requests) > waiting, 'the write')
        return future

    def go(self, futures: Sequence[Future[list[WriteResult]]]) -> list[Any]:
        self.server.open.set()
        return [future.exception(PATIENCE) or future.result() for future in futures]


@pytest.fixture
def bench() -> Any:
    with ThreadPoolExecutor(16) as pool:
        bench = Bench(pool)
        yield bench
        bench.server.open.set()


def revs(results: Sequence[WriteResult]) -> list[str]:
    return [result.rev for result in results]


def test_waiting_writes_share_the_next_request(bench: Bench) -> None:
    done = bench.go([bench.write('a'), bench.write('b'), bench.write('c', 'd'), bench.write('e')])
    assert [[result.id for result in results] for results in done] == [['a'], ['b'], ['c', 'd'], ['e']]
    assert [sorted(ids) for ids in bench.server.requests] == [['a'], ['b', 'c', 'd', 'e']]


def test_two_writes_of_one_document_never_share_a_request(bench: Bench) -> None:
    bench.go([bench.write('a'), bench.write('b'), bench.write('b'), bench.write('c')])
    assert sorted(map(sorted, bench.server.requests)) == [['a'], ['b'], ['b', 'c']]


@pytest.mark.parametrize('error', [DocumentTooLarge('too large'), AccessDenied('forbidden')])
def test_a_refusal_concerns_one_thread_only(bench: Bench, error: CouchDBError) -> None:
    bench.server.refused['c'] = error
    a, b, c, d = bench.go([bench.write('a'), bench.write('b'), bench.write('c'), bench.write('d')])
    assert [revs(results) for results in (a, b, d)] == [['1-b'], ['1-b'], ['1-b']]
    assert (type(c), str(c)) == (type(error), str(error))
    assert [sorted(ids) for ids in bench.server.requests[:2]] == [['a'], ['b', 'c', 'd']]
    assert sorted(bench.server.requests[2:]) == [['b'], ['c'], ['d']]


def test_an_outage_is_raised_in_all_threads(bench: Bench) -> None:
    bench.server.refused['c'] = ServerUnavailable('cut off')
    _, b, c = bench.go([bench.write('a'), bench.write('b'), bench.write('c')])
    assert [type(error) for error in (b, c)] == [ServerUnavailable, ServerUnavailable]
    assert b is not c
    assert [sorted(ids) for ids in bench.server.requests] == [['a'], ['b', 'c']]


def test_a_time_limit_is_raised_in_the_thread_that_it_interrupts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit was once treated as a refusal: all entries were sent alone, and the time limit was lost."""

    class TimeLimit(Exception):
        pass

    take = bench.server._take

    def strike_second(docs: Sequence[Document]) -> None:
        take(docs)
        if len(bench.server.requests) == 2:
            raise TimeLimit

    monkeypatch.setattr(bench.server, '_take', strike_second)
    a, *others = bench.go([bench.write('a'), bench.write('b'), bench.write('c')])
    assert revs(a) == ['1-b']
    assert [sorted(ids) for ids in bench.server.requests[:2]] == [['a'], ['b', 'c']]
    struck = [isinstance(other, TimeLimit) for other in others]
    assert sum(struck) == 1
    # The thread of the other entry sends it again.
    assert bench.server.requests[2:] == [['b'] if struck[1] else ['c']]


def test_large_writes_share_no_request(bench: Bench) -> None:
    bench.server.request_size.bytes = 40
    bench.go([bench.write('a'), bench.write('b' * 30), bench.write('c' * 30), bench.write('d' * 300)])
    assert [len(request) for request in bench.server.requests] == [1, 1, 1, 1]


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork here')
def test_a_forked_child_does_not_wait_for_a_write_of_its_parent(bench: Bench) -> None:
    future = bench.write('a')
    child = os.fork()
    if not child:
        try:
            bench.server.open = threading.Event()  # a thread of the parent may hold the lock of the old one
            bench.server.open.set()
            os._exit(0 if revs(bench.commit.write([{'_id': 'b'}])) == ['1-b'] else 1)
        finally:
            os._exit(1)
    ended = wait_for(lambda: [status for pid, status in [os.waitpid(child, os.WNOHANG)] if pid], 'the child')
    assert os.waitstatus_to_exitcode(ended[0]) == 0
    bench.go([future])
