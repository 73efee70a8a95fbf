"""Large responses: many documents are read in parts, and a single document that is too large is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.result import ResultSet

from kombu_couchdb.couchdb import bounds
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AnswerTooLarge
from tests.conftest import PATIENCE
from tests.support import Inbox, publish_many

from .conftest import Connect

#: The documents and their size in bytes exceed the limit of one response.
COUNT, SIZE, LARGEST = 10, 15_000, 60_000


@pytest.fixture
def ids(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of documents that are too large for one response."""
    ids = [f'large-{number}' for number in range(COUNT)]
    client.bulk([{'_id': doc_id, 'text': 'x' * SIZE} for doc_id in ids])
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', LARGEST)
    return ids


@pytest.mark.parametrize(
    'read',
    [
        lambda client, ids: client.fetch(ids),
        lambda client, ids: client.find(ids),
        lambda client, ids: [row['doc'] for row in client.id_range('large-', docs=True)],
    ],
    ids=['fetch', 'find', 'id_range'],
)
def test_documents_are_read_in_parts(client: Client, ids: list[str], read: Callable[[Client, list[str]], Any]) -> None:
    assert [doc['_id'] for doc in read(client, ids)] == ids


def test_document_that_is_too_large(client: Client, ids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', SIZE // 2)
    for read in (client.get, lambda doc_id: client.fetch([doc_id]), lambda doc_id: client.find([doc_id])):
        with pytest.raises(AnswerTooLarge):
            read(ids[0])


def test_messages_and_results(client: Client, connect: Connect, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', LARGEST)
    bodies = [f'{number}' * SIZE for number in range(COUNT)]
    publish_many(connect(), bodies)
    assert sorted(Inbox(connect()).wait(COUNT)) == bodies
    results = [app.AsyncResult(f'task-{number}') for number in range(COUNT)]
    for result, body in zip(results, bodies, strict=True):
        app.backend.store_result(result.id, body, 'SUCCESS')
    assert ResultSet(results, app=app).join(timeout=PATIENCE) == bodies
    assert [app.AsyncResult(result.id).get(timeout=PATIENCE) for result in results] == bodies


def test_body_may_be_larger_than_the_limit_for_responses(
    client: Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', LARGEST)
    publish_many(connect(), ['x' * 5 * LARGEST])
    assert Inbox(connect()).wait(1) == ['x' * 5 * LARGEST]
