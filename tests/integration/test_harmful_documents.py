"""Documents that end CouchDB's view server are found and replaced, so that the views respond again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.contrib.parcels.mover import Mover
from kombu_couchdb import design
from kombu_couchdb.contrib.parcels.stored_parcels import Parcels
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ViewFailed
from kombu_couchdb.queues import quarantine
from kombu_couchdb.queues.quarantine import Harmful
from tests.parcels import store_nested
from tests.support import Inbox, items, publish

from .conftest import Run

#: Apache CouchDB 3.5 processes 10,000 levels.
LEVELS = 30_000

TOO_DEEP = 'it is nested too deeply for the views of CouchDB; its content was removed'


@pytest.fixture
def put(apache_couchdb: bool) -> Callable[..., None]:
    """A function that stores a document that ends the view server."""
    if not apache_couchdb:
        pytest.skip('the embedded server refuses such documents')
    return lambda client, doc_id, members='"x":1': store_nested(client, doc_id, LEVELS, members)


@pytest.mark.parametrize('doc_id', ['0000', 'broker:consumer:0000'])
def test_consumer_replaces_a_document(
    connection: Connection, client: Client, put: Callable[..., None], doc_id: str, run: Run, caplog: Any
) -> None:
    publish(connection, 'before')
    put(client, doc_id, '"type":"WorkItem","queue":"q"')
    publish(connection, 'after')
    with pytest.raises(ViewFailed, match='the workers look for it and set it aside'):
        client.view(design.NAME, 'waiting', reduce=False)
    assert sorted(Inbox(connection).wait(2)) == ['after', 'before']
    [line] = [message for message in caplog.messages if message.endswith(TOO_DEEP)]
    assert doc_id in line
    letters = run('failures', 'list').output
    if doc_id == '0000':
        assert 'malformed: it is nested too deeply' in letters
        assert 'message is missing' in run('failures', 'retry', '0000', '--yes').output
        assert run('failures', 'drop', '0000', '--yes').exit_code == 0
    assert client.get_or_none(doc_id) is None


def test_mover_refuses_a_parcel(
    mover: Callable[[], Mover], parcels: Client, client: Client, put: Callable[..., None]
) -> None:
    parcels.bulk([{'_id': name, 'task': 'add', 'args': [1, 2], 'id': name} for name in 'ac'])
    put(parcels, 'b', '"task":"add"')
    mover().step()
    assert [doc['_id'] for doc in Parcels(parcels).listing('waiting', 'refused')] == ['b']
    assert parcels.get('b')['status'] == 'refused'
    assert len(items(client)) == 2


def test_worker_deletes_a_result(app: Celery, put: Callable[..., None]) -> None:
    backend = app.backend
    backend.store_result('one', 3, 'SUCCESS')
    backend.cleanup()
    put(backend.client, 'celery-task-meta-two')
    with pytest.raises(ViewFailed):
        backend.cleanup()
    backend.cleanup()
    assert backend.client.get_or_none('celery-task-meta-two') is None
    assert backend.get_state('one') == 'SUCCESS'


def test_largest_document_is_replaced_if_none_is_too_deep(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, '_MAX_CONTAINERS', 15)
    monkeypatch.setattr(quarantine, '_LATEST_DOCS', 5)
    monkeypatch.setattr(quarantine, '_PAUSE_SECONDS', 0.0)
    client.bulk([{'_id': f'old{n}', 'x': [[]] * n} for n in (5, 20, 30, 9)])
    client.bulk([{'_id': f'new{n}'} for n in range(5)])
    one = Harmful(client, lambda text, reason, now: {'reason': reason})
    one.replace()
    assert not any('reason' in doc for doc in docs(client))  # no view has failed
    for expected in (1, 2, 2):
        client.failed_views += 1
        one.replace()
        one.replace()  # after the pause
        replaced = {doc['_id'] for doc in docs(client) if 'reason' in doc}
        assert len(replaced) == expected
    assert replaced == {'old30', 'old20'}


def docs(client: Client) -> list[dict[str, Any]]:
    return [row['doc'] for row in client.id_range('', docs=True)]
