"""The result backend on a real server, used as Celery uses it."""

from __future__ import annotations

import itertools
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery, states
from celery.app.task import Context
from kombu.exceptions import EncodeError

from celery_couchdb.backend import CouchDBBackend, ResultTooLarge
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.errors import AccessDenied
from tests.conftest import PATIENCE, PATIENT
from tests.support import Request


def app_of(url: str, **conf: Any) -> Celery:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    options = {**PATIENT, **conf.pop('result_backend_transport_options', {})}
    app.conf.update(conf, result_backend_transport_options=options)
    return app


def elsewhere(url: str) -> CouchDBBackend:
    """Return a backend as in another process, which shares no connections or caches with other backends."""
    return app_of(url, result_backend_transport_options={'sweep_interval': 1.0 + next(_serial)}).backend


_serial = itertools.count()


@pytest.fixture
def backend(url: str, client: Client) -> CouchDBBackend:
    """The backend of a new app; its database exists."""
    return app_of(url).backend


@pytest.fixture
def task_id() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def requests_of(sent: list[Request]) -> Callable[..., list[str]]:
    """A function that returns the HTTP methods of the requests that a call sends to the test's database."""

    def requests_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
        sent.clear()
        function(*args, **kwargs)
        return [request.method for request in sent]

    return requests_of


# -- one result


def test_result_document_is_readable(backend: CouchDBBackend, client: Client, task_id: str) -> None:
    backend.mark_as_done(task_id, {'sum': 3, '_id': 'x'})
    doc = client.get(f'celery-task-meta-{task_id}')
    date_done = doc['value'].pop('date_done')
    assert abs((datetime.now(timezone.utc) - datetime.fromisoformat(date_done)).total_seconds()) < 3600
    assert abs(time.time() - doc['date']) < 3600
    assert (doc['type'], doc['status'], doc['expires'] - doc['date']) == ('Result', 'SUCCESS', 24 * 3600)
    value = {'status': 'SUCCESS', 'result': {'sum': 3, '_id': 'x'}, 'traceback': None, 'children': None}
    assert doc['value'] == {**value, 'task_id': task_id}


def test_forget(backend: CouchDBBackend, client: Client, task_id: str) -> None:
    backend.mark_as_done(task_id, 1)
    result = backend.app.AsyncResult(task_id)
    assert result.get(timeout=PATIENCE) == 1
    result.forget()
    assert client.fetch([f'celery-task-meta-{task_id}']) == [None]
    assert backend.app.AsyncResult(task_id).state == states.PENDING
    result.forget()
    backend.mark_as_done(task_id, 2)
    assert backend.app.AsyncResult(task_id).get(timeout=PATIENCE) == 2


def test_ignored_result_is_not_stored(backend: CouchDBBackend, client: Client, task_id: str) -> None:
    backend.mark_as_done(task_id, 1, request=Context({'id': task_id, 'ignore_result': True}))
    assert client.fetch([f'celery-task-meta-{task_id}']) == [None]


def test_extended_result(url: str, client: Client, task_id: str) -> None:
    backend = app_of(url, result_extended=True).backend
    sent = {'id': task_id, 'task': 'proj.add', 'args': [1, 2], 'kwargs': {'_x': None}, 'group': 'g', 'parent_id': 'p'}
    request = Context({**sent, 'hostname': 'w@h', 'retries': 2, 'delivery_info': {'routing_key': 'fast'}})
    request.children.append(backend.app.AsyncResult('child'))
    backend.mark_as_done(task_id, 3, request=request)
    value = client.get(f'celery-task-meta-{task_id}')['value']
    assert (value['name'], value['args'], value['kwargs']) == ('proj.add', [1, 2], {'_x': None})
    result = app_of(url).AsyncResult(task_id)
    assert (result.name, result.args, result.kwargs) == ('proj.add', [1, 2], {'_x': None})
    assert (result.worker, result.retries, result.queue) == ('w@h', 2, 'fast')
    assert [child.id for child in result.children] == ['child']


def test_task_ids_of_any_characters(backend: CouchDBBackend) -> None:
    for task_id in ('a/b?c#d', 'ü 😀', '..', '100%25', '_x', '"'):
        backend.mark_as_done(task_id, task_id)
        assert dict(backend.get_many([task_id], timeout=PATIENCE))[task_id]['result'] == task_id
        assert backend.get_task_meta(task_id, cache=False)['result'] == task_id
        backend.forget(task_id)
        assert backend.get_state(task_id) == states.PENDING


def test_global_keyprefix(url: str, client: Client, task_id: str) -> None:
    backend = app_of(url, result_backend_transport_options={'global_keyprefix': 'blue'}).backend
    backend.mark_as_done(task_id, 1)
    assert client.get(f'blue_celery-task-meta-{task_id}')['type'] == 'Result'
    assert app_of(url).backend.get_state(task_id) == states.PENDING
    group_id = task_id
    backend.app.GroupResult(group_id, [backend.app.AsyncResult(task_id)]).save()
    assert client.get(f'blue_celery-taskset-meta-{group_id}')['type'] == 'Group'


# -- values (tests/acceptance/comparison has the other serializers)


def test_msgpack(url: str) -> None:
    pytest.importorskip('msgpack')
    backend = app_of(url, result_serializer='msgpack', accept_content=['msgpack']).backend
    values = {str(number): value for number, value in enumerate([None, 'ü\x00', math.inf, b'\xff', {'_id': [1]}])}
    for name, value in values.items():
        backend.mark_as_done(name, value)
    assert {name: meta['result'] for name, meta in backend.get_many(list(values), timeout=PATIENCE)} == values


def test_compressed_results(url: str, client: Client, task_id: str) -> None:
    app = app_of(url, result_compression='gzip')
    app.backend.mark_as_done(task_id, 'x' * 10_000)
    assert app.backend.get_task_meta(task_id, cache=False)['result'] == 'x' * 10_000
    if hasattr(app.backend, 'compression'):  # since Celery 5.7
        assert len(client.get(f'celery-task-meta-{task_id}')['base64']) < 1_000


# -- many results


def test_group_result(backend: CouchDBBackend, client: Client, url: str) -> None:
    app = backend.app
    saved = app.GroupResult(str(uuid.uuid4()), [app.AsyncResult('a'), app.GroupResult('g', [app.AsyncResult('b')])])
    saved.save()
    doc = client.get(f'celery-taskset-meta-{saved.id}')
    assert doc['type'] == 'Group'
    assert doc['value']['result'][0][0] == saved.id

    other = app_of(url)
    assert other.GroupResult.restore(saved.id) == saved
    saved.save()  # saving it again is not an error
    other.GroupResult.restore(saved.id).delete()
    assert client.fetch([doc['_id']]) == [None]
    assert other.GroupResult.restore(saved.id) is None


# -- concurrent writers


@pytest.mark.parametrize(
    'end',
    [
        lambda backend, task_id: backend.mark_as_done(task_id, 'first'),
        lambda backend, task_id: backend.mark_as_failure(task_id, ValueError('first')),
        lambda backend, task_id: backend.mark_as_revoked(task_id, 'first'),
    ],
    ids=['success', 'failure', 'revoked'],
)
def test_final_state_is_not_overwritten(
    backend: CouchDBBackend, client: Client, url: str, task_id: str, end: Callable[[CouchDBBackend, str], Any]
) -> None:
    late = elsewhere(url)
    end(backend, task_id)
    first = client.get(f'celery-task-meta-{task_id}')
    late.mark_as_started(task_id)
    late.mark_as_retry(task_id, ValueError('late'))
    late.mark_as_failure(task_id, ValueError('late'))
    late.mark_as_done(task_id, 'second')
    assert client.get(f'celery-task-meta-{task_id}') == first


def test_expired_final_state_is_overwritten(backend: CouchDBBackend, client: Client, url: str, task_id: str) -> None:
    """Whoever sends a task with the id of an earlier one does not see the earlier result."""
    backend.mark_as_done(task_id, 'first')
    stored = client.get(f'celery-task-meta-{task_id}')
    client.put({**stored, 'expires': client.clock.now() - 1})
    elsewhere(url).mark_as_started(task_id)
    assert backend.get_state(task_id) == states.STARTED


def run(task_id: str, delivery: int | None, *, retries: int = 0, redelivered: bool = False) -> Context:
    """Return the request of a delivered task. `delivery` is None for tasks of other brokers."""
    number = {} if delivery is None else {'delivery': delivery}
    return Context(id=task_id, retries=retries, properties={'delivery_info': {'redelivered': redelivered, **number}})


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        ({'delivery': 9}, {'delivery': 10}),
        ({'delivery': 8}, {'delivery': 2, 'retries': 1}),
        ({'delivery': None}, {'delivery': None, 'redelivered': True}),
    ],
    ids=['delivered again', 'retried', 'another broker'],
)
def test_newer_delivery_wins_over_the_failure_of_an_older_one(
    backend: CouchDBBackend, url: str, task_id: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    older, newer = run(task_id, **first), run(task_id, **second)
    late = elsewhere(url)
    backend.mark_as_failure(task_id, ValueError('first'), request=older)
    assert backend.get_state(task_id) == states.FAILURE
    backend.store_result(task_id, None, states.STARTED, request=newer)
    assert backend.get_state(task_id) == states.STARTED
    late.mark_as_failure(task_id, ValueError('late'), request=older)
    assert backend.get_state(task_id) == states.STARTED
    backend.mark_as_done(task_id, 'second', request=newer)
    late.mark_as_failure(task_id, ValueError('later still'), request=run(task_id, 90, retries=9))
    assert (backend.get_state(task_id), backend.get_result(task_id)) == (states.SUCCESS, 'second')


def test_failure_is_not_overwritten_by_the_same_or_an_older_delivery(
    backend: CouchDBBackend, client: Client, url: str, task_id: str
) -> None:
    late = elsewhere(url)
    backend.mark_as_failure(task_id, ValueError('first'), request=run(task_id, 4))
    first = client.get(f'celery-task-meta-{task_id}')
    assert first['delivery'] == [0, 0, 4]
    for request in (run(task_id, 4), run(task_id, 2), run('another', 6), None):
        late.mark_as_done(task_id, 'late', request=request)
        late.store_result(task_id, None, states.STARTED, request=request)
    assert client.get(f'celery-task-meta-{task_id}') == first


def test_success_replaces_a_failure_caused_by_an_earlier_task(backend: CouchDBBackend, url: str, task_id: str) -> None:
    """If a task of a chain fails, Celery fails the tasks after it. The task may succeed when it is redelivered."""
    backend.mark_as_failure(task_id, ValueError('of the step before'), request=Context(id=task_id))
    elsewhere(url).mark_as_done(task_id, 'done', request=run(task_id, 2))
    assert backend.get_state(task_id) == states.SUCCESS


def after_next_read(backend: CouchDBBackend, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another process act when the backend has read a document."""
    get = backend.client.get

    def get_then_lose(doc_id: str) -> Any:
        doc = get(doc_id)
        monkeypatch.undo()
        act()
        return doc

    monkeypatch.setattr(backend.client, 'get', get_then_lose)


@pytest.mark.parametrize(
    ('meanwhile', 'then', 'left'),
    [
        (lambda b, i: b.mark_as_done(i, 'won'), lambda b, i: b.mark_as_failure(i, ValueError('lost')), 'won'),
        (lambda b, i: b.forget(i), lambda b, i: b.mark_as_done(i, 'stored'), 'stored'),
        (lambda b, i: b.mark_as_done(i, 'changed'), lambda b, i: b.forget(i), None),
    ],
    ids=['a success is kept', 'what was forgotten is stored', 'what was changed is forgotten'],
)
def test_write_of_another_process_between_read_and_write(
    backend: CouchDBBackend,
    url: str,
    task_id: str,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[..., object],
    then: Callable[..., object],
    left: str | None,
) -> None:
    other = elsewhere(url)
    elsewhere(url).mark_as_started(task_id)
    after_next_read(backend, monkeypatch, lambda: meanwhile(other, task_id))
    then(backend, task_id)
    assert (backend.get_state(task_id), backend.get_result(task_id)) == (
        (states.SUCCESS, left) if left else (states.PENDING, None)
    )


# -- costs


def test_number_of_requests_per_operation(
    backend: CouchDBBackend, url: str, task_id: str, requests_of: Callable[..., list[str]]
) -> None:
    other = str(uuid.uuid4())
    assert requests_of(backend.mark_as_done, task_id, 1) == ['POST']
    assert requests_of(backend.mark_as_started, other) == ['POST']
    assert requests_of(backend.mark_as_done, other, 1) == ['POST']
    assert requests_of(backend.mark_as_retry, other, ValueError()) == ['POST', 'GET']
    late = str(uuid.uuid4())
    elsewhere(url).mark_as_started(late)
    assert requests_of(backend.mark_as_done, late, 1) == ['POST', 'GET', 'POST']
    assert requests_of(backend.get_task_meta, task_id) == ['GET']
    list(backend.get_many([task_id, other], timeout=1))  # asks whether the server is a cluster
    assert requests_of(lambda: list(backend.get_many([task_id, other], timeout=1))) == ['POST']
    assert requests_of(backend.forget, task_id) == ['GET', 'POST']
    assert requests_of(backend.forget, task_id) == ['GET']


# -- the database


def test_each_operation_creates_a_deleted_database_again(backend: CouchDBBackend, client: Client, task_id: str) -> None:
    app = backend.app
    backend.mark_as_done(task_id, 1)
    client.delete()
    backend.mark_as_done(task_id, 2)
    assert backend.get_result(task_id) == 2
    uses: list[Callable[[], Any]] = [
        lambda: backend.get_task_meta(task_id, cache=False),
        lambda: backend.mget([f'celery-task-meta-{task_id}']),
        lambda: backend.forget(task_id),
        lambda: app.GroupResult.restore(task_id),
        lambda: app.GroupResult(task_id, [app.AsyncResult('a')]).save(),
    ]
    for use in uses:
        client.delete()
        use()
        assert client.sequence() is not None
    assert backend.get_state(task_id) == states.PENDING


def test_member_cannot_create_the_database(server: Any, database: str, member: dict[str, str], task_id: str) -> None:
    backend = app_of(server.couchdb_url(database, **member)).backend
    with pytest.raises(AccessDenied, match=r'user .* may not create the database, which does not exist'):
        backend.mark_as_done(task_id, 1)


def test_result_that_is_too_large_is_refused(backend: CouchDBBackend, apache_couchdb: bool) -> None:
    """The error is one that Celery stores as the failure of the task."""
    if not apache_couchdb:
        pytest.skip('the embedded server has no limit')
    with pytest.raises(
        EncodeError, match=r'too_large .* 9,\d+,\d+ bytes are more than .* max_document_size .*8,000,000'
    ):
        backend.mark_as_done('a', 'x' * 9_000_000, request=Context(id='a', task='too_large'))


# -- results that are handed over to the worker's queue


@pytest.fixture
def queue(backend: CouchDBBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The result queue of a worker, for which CouchDB refuses documents of more than 8,000 bytes."""
    write = backend.store.client.bulk

    def bulk(docs: Sequence[Document], *, texts: Sequence[bytes] | None = None) -> list[WriteResult]:
        if texts is None:
            return write(docs)
        return [
            write([doc], texts=[text])[0]
            if len(text) < 8000
            else WriteResult.refused(doc['_id'], 'document_too_large', 'too large')
            for doc, text in zip(docs, texts, strict=True)
        ]

    monkeypatch.setattr(backend.store.client, 'bulk', bulk)
    backend.handover.open(serve_children=False)
    yield backend.handover.queue
    backend.handover.queue.close()


def test_refused_result_becomes_a_failure(backend: CouchDBBackend, queue: Any) -> None:
    """As with a result that its task stores itself: Celery makes a failure of it."""
    backend.mark_as_done('large', 'x' * 12_000, request=Context(id='large', task='shop.export'))
    backend.mark_as_done('small', 'x', request=Context(id='small', task='shop.export'))
    queue.wait()
    queue.wait()  # for the failure
    assert backend.get_result('small') == 'x'
    meta = backend.get_task_meta('large')
    assert meta['status'] == 'FAILURE'
    assert isinstance(meta['result'], ResultTooLarge)
    assert 'the result of shop.export cannot be stored' in str(meta['result'])


def test_newest_progress_is_stored_and_never_replaces_the_end(
    backend: CouchDBBackend, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write, written = threading.Event(), backend.store.client.bulk, list[str]()

    def bulk(docs: Sequence[Document], **options: Any) -> list[WriteResult]:
        go_on.wait(PATIENCE)
        written.extend(doc['status'] for doc in docs)
        return write(docs, **options)

    monkeypatch.setattr(backend.store.client, 'bulk', bulk)
    for number in range(100):  # the task does not wait until they are stored
        backend.store_result('a', number, 'PROGRESS', request=run('a', 2))
    go_on.set()
    assert backend.get_result('a') == 99
    assert len(written) <= 2
    backend.mark_as_failure('a', ValueError('no'), request=run('a', 2))
    backend.store_result('a', 100, 'PROGRESS', request=run('a', 2))
    assert backend.get_task_meta('a', cache=False)['status'] == 'FAILURE'
    queue.wait()
    assert backend.get_task_meta('a', cache=False)['status'] == 'FAILURE'


def test_state_of_an_older_delivery_does_not_replace_a_newer_one(backend: CouchDBBackend, queue: Any) -> None:
    """The worker's process stores the results of all children, and remembers the revisions of all."""
    backend.store_result('a', {}, 'STARTED', request=run('a', 4))
    queue.wait()
    backend.mark_as_failure('a', ValueError('of the older delivery'), request=run('a', 2))
    queue.wait()
    assert backend.get_state('a') == 'STARTED'


def test_refused_part_ends_its_chord(backend: CouchDBBackend, queue: Any) -> None:
    body = backend.app.signature('total').freeze().id
    callback = backend.app.signature('total', task_id=body)
    backend.apply_chord(('group', []), callback)
    backend.set_chord_size('group', 1)
    request = Context(id='part', group='group', group_index=0, chord=dict(callback), ignore_result=True)
    backend.mark_as_done('part', 'x' * 12_000, request=request)
    queue.wait()
    queue.wait()
    assert backend.get_state(body) == 'FAILURE'
