"""Large responses: many documents are read in parts, and a single document that is too large is an error."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', LARGEST)


def test_documents_are_read_in_parts(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f'large-{number}' for number in range(COUNT)]
    client.bulk([{'_id': doc_id, 'text': 'x' * SIZE} for doc_id in ids])
    found = [row['doc'] for row in client.id_range('large-', docs=True)]
    assert client.fetch(ids) == client.find(ids) == found
    assert [doc['_id'] for doc in found] == ids
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', SIZE // 2)
    for read in (client.get, lambda doc_id: client.fetch([doc_id]), lambda doc_id: client.find([doc_id])):
        with pytest.raises(AnswerTooLarge):
            read(ids[0])


def test_messages_and_results(client: Client, connect: Connect, app: Celery) -> None:
    bodies = [f'{number}' * SIZE for number in range(COUNT)]
    bodies.append('x' * 5 * LARGEST)
    publish_many(connect(), bodies)
    assert sorted(Inbox(connect()).wait(len(bodies))) == bodies
    results = [app.AsyncResult(f'task-{number}') for number in range(COUNT)]
    for result, body in zip(results, bodies, strict=False):
        app.backend.store_result(result.id, body, 'SUCCESS')
    assert ResultSet(results, app=app).join(timeout=PATIENCE) == bodies[:COUNT]
    assert [app.AsyncResult(result.id).get(timeout=PATIENCE) for result in results] == bodies[:COUNT]
