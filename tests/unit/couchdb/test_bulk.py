"""Writing many documents (`kombu_couchdb.couchdb.bulk`): bounded requests, and an answer for each document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kombu_couchdb import errors
from kombu_couchdb.couchdb import bulk
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client, Document


class Server(Client):
    """Stores documents but for those in `refused`; a request that has more than `bears` bytes is not answered."""

    def __init__(self) -> None:
        super().__init__(Address())
        self.requests: list[list[str]] = []
        self.refused: dict[str, errors.CouchDBError] = {}
        self.stored: dict[str, Document] = {}
        self.bears = 1e9

    def request(self, method: str, path: str | None, params: Any = None, body: Any = None, **kwargs: Any) -> Any:
        if path != '/_bulk_docs':
            doc = self.stored[str(path)[1:]]
            return [{'ok': {**doc, '_rev': '1-a'}}]
        docs = json.loads(body)['docs']
        self.requests.append([doc['_id'] for doc in docs])
        if len(body) > self.bears:
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


def test_a_request_has_no_more_bytes_than_it_may() -> None:
    server = Server()
    answers = server.bulk([*docs(5, 300_000), {'_id': 'large', 'x': 'x' * 3_000_000}, {'_id': 'small'}])
    assert server.requests == [['0', '1', '2'], ['3', '4'], ['large'], ['small']]
    assert [answer.id for answer in answers] == ['0', '1', '2', '3', '4', 'large', 'small']


def test_what_came_before_an_error_is_known() -> None:
    server = Server()
    server.bears = 700_000
    with pytest.raises(errors.ServerUnavailable) as caught:
        server.bulk([{'_id': 'first', 'x': 'x' * 600_000}, *docs(3, 450_000)])
    assert [answer.id for answer in caught.value.answered] == ['first']


def test_requests_become_smaller_until_they_are_answered_and_grow_again() -> None:
    server = Server()
    server.bears, tries = 200_000, 0
    while True:
        try:
            server.bulk(docs(20, 40_000))
            break
        except errors.ServerUnavailable:
            tries += 1
            assert tries < 5
    assert server.request_bytes <= server.bears
    server.bears = 1e9
    server.bulk(docs(1000, 40_000))
    assert server.request_bytes == bulk.MAX_REQUEST_BYTES


def test_small_requests_without_an_answer_say_nothing_of_the_link() -> None:
    server = Server()
    server.bears = 0
    with pytest.raises(errors.ServerUnavailable):
        server.bulk([{'_id': 'a'}])
    assert server.request_bytes == bulk.MAX_REQUEST_BYTES


@pytest.mark.parametrize(
    ('exc', 'error'),
    [
        (errors.DocumentTooLarge('x'), 'document_too_large'),
        (errors.RequestRefused('x'), 'refused'),
        (errors.Conflict('x'), 'missing_stub'),
    ],
)
def test_what_the_server_refuses_in_one_document_stops_no_other(exc: errors.CouchDBError, error: str) -> None:
    server = Server()
    server.refused['5'] = exc
    answers = server.bulk(docs(20, 10))
    assert [answer.id for answer in answers] == [f'{number}' for number in range(20)]
    assert {answer.id: answer.error for answer in answers if answer.error} == {'5': error}
    assert len(server.requests) <= 11


def test_what_was_stored_though_its_request_was_refused_is_known_again() -> None:
    """A stub is missed by one shard or node; the others have stored what is theirs."""
    server = Server()
    server.refused['stub'] = errors.Conflict('Invalid attachment stub')
    answers = server.bulk([{'_id': 'stub'}, {'_id': 'elsewhere', 'x': 1}, {'_id': 'b'}])
    assert [answer.error for answer in answers] == ['missing_stub', '', '']
    assert answers[1].rev == '1-a'


def test_a_conflict_with_others_stays_one() -> None:
    server = Server()
    server.refused['stub'] = errors.Conflict('Invalid attachment stub')
    server.stored['b'] = {'_id': 'b', 'x': 'of somebody else'}
    answers = server.bulk([{'_id': 'stub'}, {'_id': 'b', 'x': 'ours'}])
    assert [answer.error for answer in answers] == ['missing_stub', 'conflict']


def test_a_document_that_cannot_be_written_as_json_keeps_no_other_back() -> None:
    server = Server()
    answers = server.bulk([{'_id': 'a'}, {'_id': 'b', 'x': float('inf')}, {'_id': 'c'}])
    assert server.requests == [['a', 'c']]
    assert [answer.error for answer in answers] == ['', 'unstorable', '']
    assert isinstance(answers[1].exception('x'), errors.Unstorable)
