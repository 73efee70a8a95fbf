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

from celery_couchdb import design
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


@pytest.mark.parametrize('expires', [60, 60.0, timedelta(minutes=1)], ids=['int', 'float', 'timedelta'])
def test_lifetime_of_results(url: str, client: Client, task_id: str, expires: Any) -> None:
    backend_of(url, expires).mark_as_done(task_id, 1)
    doc = client.get(f'celery-task-meta-{task_id}')
    assert doc['expires'] - doc['date'] == 60


@pytest.mark.parametrize('expires', [None, 0])
def test_results_without_expiry(url: str, client: Client, task_id: str, expires: Any) -> None:
    backend = backend_of(url, expires)
    backend.app.conf.result_expires = expires
    backend.expires = backend.prepare_expires(expires)
    backend.mark_as_done(task_id, 1)
    backend.cleanup()
    assert 'expires' not in client.get(f'celery-task-meta-{task_id}')


def test_failures_may_have_a_longer_lifetime(url: str, client: Client) -> None:
    backend = backend_of(url, 60)
    backend.failure_expires = 600
    good, bad, revoked = (str(uuid.uuid4()) for _ in range(3))
    backend.mark_as_done(good, 1)
    backend.mark_as_failure(bad, ValueError('x'))
    backend.mark_as_revoked(revoked)
    assert [
        doc['expires'] - doc['date'] for doc in fetch(client, [f'celery-task-meta-{t}' for t in (good, bad, revoked)])
    ] == [60, 600, 60]


def test_result_failure_expires(url: str) -> None:
    if tuple(map(int, celery.__version__.split('.')[:2])) < (5, 7):
        pytest.skip('this Celery does not know the setting')
    assert backend_of(url, result_failure_expires=timedelta(days=7)).failure_expires == 7 * 24 * 3600


def test_results_of_a_chord_expire_with_the_chord(url: str, client: Client) -> None:
    backend = backend_of(url, 60)
    backend.app.conf.result_chord_expires = 600
    plain = Context({'id': 'a', 'group': 'g', 'task': 't'})
    member = Context({'id': 'b', 'group': 'g', 'group_index': 0, 'chord': {'task': 'body'}, 'task': 't'})
    for request in (plain, member):
        backend.store_result(request.id, 1, states.SUCCESS, request=request)
    assert [doc['expires'] - doc['date'] for doc in fetch(client, ['celery-task-meta-a', 'celery-task-meta-b'])] == [
        60,
        600,
    ]


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


def test_cleanup_deletes_only_expired_documents(url: str, client: Client, task_id: str) -> None:
    backend = backend_of(url)
    backend.mark_as_done(task_id, 'stays')
    client.put({'_id': 'mine', 'type': 'Invoice', 'expires': 1.0})
    with Connection(url) as connection:
        publish(connection, 'waits')
    fill(client, 1200, time.time() - 1)
    backend.cleanup()
    wait_for(lambda: results(client) == [f'celery-task-meta-{task_id}'], 'the expired documents to be deleted')
    assert client.get('mine')['type'] == 'Invoice'
    assert len(items(client)) == 1


def test_deleted_results_leave_no_bodies(url: str, client: Client) -> None:
    fill(client, 3, time.time() - 1)
    ids = results(client)
    backend_of(url).cleanup()
    for doc_id in ids:
        [leaf] = client.leaves(doc_id)
        assert set(leaf) == {'_id', '_rev', '_deleted'}


def test_number_of_requests_of_a_sweep(url: str, client: Client, sent: list[Request]) -> None:
    backend = backend_of(url)
    backend.cleanup()
    sent.clear()
    backend.cleanup()
    assert len(sent) == 1
    fill(client, 1000, time.time() - 1)
    sent.clear()
    backend.cleanup()
    assert len(sent) <= 6


def test_cleanup_task(url: str, client: Client) -> None:
    backend = backend_of(url)
    fill(client, 2, time.time() - 1)
    backend.app.tasks['celery.backend_cleanup'].apply()
    assert results(client) == []


def test_concurrent_sweeps(url: str, client: Client) -> None:
    fill(client, 600, time.time() - 1)
    first, second = backend_of(url), backend_of(url, options={**PATIENT, 'sweep_interval': 1.0})
    first.store.database.set_up()
    docs = [{'_id': row['id'], '_rev': row['value'][1]} for row in first.store.view('due', anything)]
    second.cleanup()
    assert first.store.delete_all(docs) == 0
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


def test_malformed_documents_do_not_stop_a_sweep(url: str, client: Client) -> None:
    odd: list[dict[str, Any]] = [
        {'type': 'Result', 'expires': 'never'},
        {'type': 'Result'},
        {'type': 'Chord', 'size': 2, 'expires': None},
        {'type': 'Chord', 'size': 'x', 'date': 'y'},
        {'type': ['Result'], 'expires': 1},
        {'type': 'Part', 'expires': {}},
        {'expires': 1},
        {'type': 'Chord', 'size': 1, 'date': 1.0},
    ]
    client.bulk([{'_id': f'chord-unlock-odd-{i}', **doc} for i, doc in enumerate(odd)])
    client.put({'_id': 'chord-unlock-odd', 'type': 'Chord', 'size': 'many', 'date': 1.0, 'body': 7})
    fill(client, 1, time.time() - 1)
    backend_of(url).cleanup()
    assert results(client) == []


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
    thread = backend.sweeper._thread
    assert thread is not None
    backend.sweeper.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_foreign_documents_of_the_same_types_are_kept(url: str, client: Client) -> None:
    docs: list[dict[str, Any]] = [
        {'_id': f'mine-{kind}', 'type': kind, 'expires': 1.0} for kind in ('Result', 'Group', 'Value', 'Chord', 'Part')
    ]
    client.bulk(docs)
    backend_of(url).cleanup()
    assert all(client.fetch([doc['_id'] for doc in docs]))


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
    now += 101
    backend.cleanup()
    assert chord_documents(client) == []


def test_parts_without_a_chord_expire(url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(url, 100)
    backend.mark_as_done('task', 1, part_of('g', 'task', 0))
    now = time.time() + 101
    monkeypatch.setattr(backend.client.clock, 'now', lambda: now)
    backend.cleanup()
    assert chord_documents(client) == []
    assert results(client) == []


# -- views for people


def test_views_list_recent_failures_and_count_by_task(url: str, client: Client) -> None:
    backend = backend_of(url)
    backend.mark_as_done(str(uuid.uuid4()), 1, request=request('shop.add'))
    backend.mark_as_failure('new', ValueError('x'), request=request('shop.pay'))
    client.put({'_id': 'old', 'type': 'Result', 'status': 'FAILURE', 'task': 'shop.pay', 'date': time.time() - 7200})
    backend.store.database.set_up()
    rows = client.view(
        design.NAME, 'by_state', startkey=['FAILURE', time.time() - 3600], endkey=['FAILURE', {}], reduce=False
    )
    assert [(row['id'], row['value']) for row in rows] == [('celery-task-meta-new', 'shop.pay')]
    counts = client.view(design.NAME, 'by_task', group_level=2)
    assert {tuple(row['key']): row['value'] for row in counts} == {
        ('shop.add', 'SUCCESS'): 1,
        ('shop.pay', 'FAILURE'): 2,
    }


def request(task: str) -> Any:
    return Context({'task': task, 'id': 'x'})
