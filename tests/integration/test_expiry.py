"""Expiry of results: workers delete expired results, with few requests, and no bodies are left."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import celery
import pytest
from celery import Celery, states
from celery.app.task import Context
from celery.exceptions import TimeoutError
from kombu import Connection

from celery_couchdb.backend import CouchDBBackend
from celery_couchdb.results.result_store import Database
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import anything
from kombu_couchdb.errors import AccessDenied, ServerUnavailable
from tests.conftest import PATIENCE, PATIENT, wait_for
from tests.support import Request, items, publish


def backend_of(url: str, expires: Any = 3600, options: Any = PATIENT, **conf: Any) -> CouchDBBackend:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    app.conf.update(result_expires=expires, result_backend_transport_options=options, **conf)
    return app.backend


@pytest.fixture
def task_id() -> str:
    return str(uuid.uuid4())


def results(client: Client) -> list[str]:
    return [row['id'] for row in client.id_range('celery-')]


def fetch(client: Client, ids: list[str]) -> list[dict[str, Any]]:
    """Return documents, all of which exist."""
    found = client.fetch(ids)
    assert None not in found
    return [doc for doc in found if doc]


def fill(client: Client, count: int, expires: float) -> None:
    docs = [
        {
            '_id': f'celery-task-meta-{uuid.uuid4()}',
            'type': 'Result',
            'status': 'SUCCESS',
            'date': expires - 9,
            'expires': expires,
            'value': {'status': 'SUCCESS', 'result': 'secret'},
        }
        for _ in range(count)
    ]
    client.bulk(docs)


def lifetimes(client: Client, *task_ids: str) -> list[float]:
    """Return the times for which results are kept, in seconds."""
    docs = fetch(client, [f'celery-task-meta-{task_id}' for task_id in task_ids])
    return [doc['expires'] - doc['date'] for doc in docs]


def test_lifetime_of_results(url: str, client: Client) -> None:
    backend = backend_of(url, timedelta(minutes=1))
    backend.mark_as_done('good', 1)
    backend.failure_expires = 600
    backend.mark_as_failure('bad', ValueError('x'))
    backend.mark_as_revoked('revoked')
    assert lifetimes(client, 'good', 'bad', 'revoked') == [60, 600, 60]
    backend.app.conf.result_chord_expires = 300
    backend.store_result('part', 1, states.SUCCESS, request=part_of('g', 'part', 0))
    assert lifetimes(client, 'part') == [300]


@pytest.mark.parametrize('expires', [None, 0])
def test_results_without_expiry(url: str, client: Client, expires: Any) -> None:
    backend = backend_of(url, expires)
    backend.mark_as_done('task', 1)
    backend.cleanup()
    assert 'expires' not in client.get('celery-task-meta-task')


def test_result_failure_expires(url: str) -> None:
    if tuple(map(int, celery.__version__.split('.')[:2])) < (5, 7):
        pytest.skip('this Celery does not know the setting')
    assert backend_of(url, result_failure_expires=timedelta(days=7)).failure_expires == 7 * 24 * 3600


def test_expired_result_is_pending_before_it_is_deleted(url: str, client: Client, task_id: str) -> None:
    backend = backend_of(url)
    fill(client, 1, time.time() - 5)
    [doc_id] = results(client)
    result = backend.app.AsyncResult(doc_id.removeprefix('celery-task-meta-'))
    assert (result.state, result.result) == (states.PENDING, None)
    with pytest.raises(TimeoutError):
        result.get(timeout=0)
    assert backend.mget([doc_id]) == [None]
    backend.mark_as_done(result.id, 'again')
    assert result.get(timeout=PATIENCE) == 'again'


#: Documents that a sweep must not stumble over, and those of others.
ODD: list[dict[str, Any]] = [
    {'type': 'Result', 'expires': 'never'},
    {'type': 'Chord', 'size': 'x', 'date': 'y'},
    {'type': ['Result'], 'expires': 1},
    {'type': 'Part', 'expires': {}},
    {'type': 'Chord', 'size': 'many', 'date': 1.0, 'body': 7},
]
MINE = [
    {'_id': f'mine-{kind}', 'type': kind, 'expires': 1.0} for kind in ('Invoice', 'Result', 'Group', 'Chord', 'Part')
]


def test_cleanup_deletes_only_expired_documents_and_leaves_no_bodies(url: str, client: Client, task_id: str) -> None:
    backend = backend_of(url)
    backend.mark_as_done(task_id, 'stays')
    client.bulk([*MINE, *({'_id': f'chord-unlock-odd-{i}', **doc} for i, doc in enumerate(ODD))])
    with Connection(url) as connection:
        publish(connection, 'waits')
    fill(client, 3, time.time() - 1)
    expired = {*results(client)} - {f'celery-task-meta-{task_id}'}
    backend.app.tasks['celery.backend_cleanup'].apply()
    assert results(client) == [f'celery-task-meta-{task_id}']
    for doc_id in expired:
        [leaf] = client.leaves(doc_id)
        assert set(leaf) == {'_id', '_rev', '_deleted'}
    assert len(fetch(client, [str(doc['_id']) for doc in MINE])) == len(MINE)
    assert len(items(client)) == 1


def test_number_of_requests_of_a_sweep(url: str, client: Client, sent: list[Request]) -> None:
    backend = backend_of(url)
    backend.cleanup()
    sent.clear()
    backend.cleanup()
    assert len(sent) == 1
    fill(client, 300, time.time() - 1)
    sent.clear()
    backend.cleanup()
    assert len(sent) <= 6
    assert results(client) == []


def test_result_that_is_replaced_during_a_sweep_is_kept(url: str, client: Client) -> None:
    backend = backend_of(url)
    fill(client, 1, time.time() - 1)
    [doc_id] = results(client)
    backend.store.database.set_up()
    docs = [{'_id': row['id'], '_rev': row['value'][1]} for row in backend.store.view('due', anything)]
    backend.mark_as_done(doc_id.removeprefix('celery-task-meta-'), 'new')
    assert backend.store.delete_all(docs) == 0
    assert results(client) == [doc_id]


def test_sweeper_continues_after_errors(url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(url, options={**PATIENT, 'sweep_interval': 0.05})
    errors = iter([ServerUnavailable('no'), AccessDenied('no'), KeyError('no')])

    def set_up() -> None:
        for error in errors:
            raise error
        Database.set_up(backend.store.database)

    monkeypatch.setattr(backend.store.database, 'set_up', set_up)
    fill(client, 3, time.time() - 1)
    backend.sweeper.start()
    wait_for(lambda: results(client) == [], 'the results to be deleted')
    backend.sweeper.stop()


# -- chords


def part_of(group: str, task_id: str, index: int) -> Context:
    return Context({'id': task_id, 'group': group, 'group_index': index, 'chord': {'task': 'body'}, 'task': 'part'})


def chord_documents(client: Client) -> list[str]:
    return [row['doc']['type'] for row in client.id_range('chord-unlock-', docs=True)]


def test_each_part_extends_the_lifetime_of_its_chord(url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(url, 100)
    now = time.time()
    monkeypatch.setattr(backend.client.clock, 'now', lambda: now)
    backend.chords.prepare('g', None, nested=False)
    backend.chords.set_size('g', 3)
    for index in range(2):
        now += 90  # each part ends long before the lifetime set by the part before it ends
        backend.mark_as_done(f'task {index}', 'x' * 5000, part_of('g', f'task {index}', index))
    now += 50
    backend.cleanup()
    assert chord_documents(client) == ['Chord', 'Part', 'Part']
    backend.mark_as_done('task', 1, part_of('without a chord', 'task', 0))
    now += 101
    backend.cleanup()
    assert chord_documents(client) == []
    assert results(client) == []


def request(task: str) -> Any:
    return Context({'task': task, 'id': 'x'})
