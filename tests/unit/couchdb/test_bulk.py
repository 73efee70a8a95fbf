"""Bulk writes (`kombu_couchdb.couchdb.bulk`): requests of bounded size, and a result for each document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kombu_couchdb import errors
from kombu_couchdb.couchdb import bulk
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client, Document


class Server(Client):
    """Refuses the documents in `refused`, and times out for requests with more than `max_bytes` bytes."""

    def __init__(self) -> None:
        super().__init__(Address())
        self.requests: list[list[str]] = []
        self.refused: dict[str, errors.CouchDBError] = {}
        self.stored: dict[str, Document] = {}
        self.max_bytes = 1e9

    def request(self, method: str, path: str | None, params: Any = None, body: Any = None, **kwargs: Any) -> Any:
        if path != '/_bulk_docs':
            doc = self.stored[str(path)[1:]]
            return [{'ok': {**doc, '_rev': '1-a'}}]
        docs = json.loads(body)['docs']
        self.requests.append([doc['_id'] for doc in docs])
        if len(body) > self.max_bytes:
            raise errors.ServerUnavailable('no answer within the time limit')
        for doc in docs:
            if isinstance(exc := self.refused.get(doc['_id']), errors.CouchDBError):
                self.stored |= {doc['_id']: doc for doc in docs if doc['_id'] == 'elsewhere'}
                raise exc
        return [
            {'id': doc['_id'], 'error': 'conflict'} if doc['_id'] in self.stored else {'id': doc['_id'], 'rev': '1-a'}
            for doc in docs
        ]


def docs(count: int, size: int) -> list[Document]:
    return [{'_id': f'{number}', 'x': 'x' * size} for number in range(count)]


def test_requests_have_a_maximum_size() -> None:
    server = Server()
    results = server.bulk([*docs(5, 300_000), {'_id': 'large', 'x': 'x' * 3_000_000}, {'_id': 'small'}])
    assert server.requests == [['0', '1', '2'], ['3', '4'], ['large'], ['small']]
    assert [result.id for result in results] == ['0', '1', '2', '3', '4', 'large', 'small']


def test_an_error_contains_the_results_of_earlier_requests() -> None:
    server = Server()
    server.max_bytes = 700_000
    with pytest.raises(errors.ServerUnavailable) as caught:
        server.bulk([{'_id': 'first', 'x': 'x' * 600_000}, *docs(3, 450_000)])
    assert [result.id for result in caught.value.answered] == ['first']


def test_requests_shrink_after_timeouts_and_grow_again() -> None:
    server = Server()
    server.max_bytes, tries = 200_000, 0
    while True:
        try:
            server.bulk(docs(20, 40_000))
            break
        except errors.ServerUnavailable:
            tries += 1
            assert tries < 5
    assert server.request_size.bytes <= server.max_bytes
    server.max_bytes = 1e9
    server.bulk(docs(1000, 40_000))
    assert server.request_size.bytes == bulk.MAX_REQUEST_BYTES


@pytest.mark.parametrize(
    ('exc', 'error'),
    [
        (errors.DocumentTooLarge('x'), 'document_too_large'),
        (errors.RequestRefused('x'), 'refused'),
        (errors.Conflict('x'), 'missing_stub'),
    ],
)
def test_a_refused_document_does_not_stop_the_others(exc: errors.CouchDBError, error: str) -> None:
    server = Server()
    server.refused['5'] = exc
    results = server.bulk(docs(20, 10))
    assert [result.id for result in results] == [f'{number}' for number in range(20)]
    assert {result.id: result.error for result in results if result.error} == {'5': error}
    assert len(server.requests) <= 11


def test_documents_stored_by_a_refused_request_are_no_conflicts() -> None:
    """One shard or node lacks the attachment of a stub. The others have stored their documents."""
    server = Server()
    server.refused['stub'] = errors.Conflict('Invalid attachment stub')
    results = server.bulk([{'_id': 'stub'}, {'_id': 'elsewhere', 'x': 1}, {'_id': 'b'}])
    assert [result.error for result in results] == ['missing_stub', '', '']
    assert results[1].rev == '1-a'


def test_a_conflict_with_another_process_stays_a_conflict() -> None:
    server = Server()
    server.refused['stub'] = errors.Conflict('Invalid attachment stub')
    server.stored['b'] = {'_id': 'b', 'x': 'of another process'}
    results = server.bulk([{'_id': 'stub'}, {'_id': 'b', 'x': 'ours'}])
    assert [result.error for result in results] == ['missing_stub', 'conflict']


def test_a_document_that_cannot_be_encoded_does_not_stop_the_others() -> None:
    server = Server()
    results = server.bulk([{'_id': 'a'}, {'_id': 'b', 'x': float('inf')}, {'_id': 'c'}])
    assert server.requests == [['a', 'c']]
    assert [result.error for result in results] == ['', 'unstorable', '']
    assert isinstance(results[1].exception('x'), errors.Unstorable)
