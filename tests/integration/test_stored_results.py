"""Stored results by state, and failed tasks that are sent again, without a worker."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_couchdb.stored_results import StoredResult, StoredResults
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError, CouchDBError, RequestRefused, ServerUnavailable
from kombu_couchdb.transport import CollectingProducer
from tests.support import Request, items, record_requests


def fail(app: Celery, task_id: str, **members: Any) -> None:
    """Store a failure as a worker does that runs with `result_extended`."""
    app.conf.result_extended = True
    request = Context(
        **{
            'id': task_id,
            'task': 'report',
            'args': [1],
            'kwargs': {'name': 'x'},
            'delivery_info': {'routing_key': 'celery', 'delivery': 3},
            **members,
        }
    )
    app.backend.store_result(task_id, ValueError('broken', 5), 'FAILURE', traceback='lines', request=request)


@pytest.fixture
def results(app: Celery) -> StoredResults:
    app.backend.store.database.set_up()
    return StoredResults(app)


def got(results: StoredResults, task_id: str) -> StoredResult:
    found = results.get(task_id)
    assert found is not None
    return found


def refusal(results: StoredResults, failure: StoredResult, **options: Any) -> str | None:
    """Send a failed task again, and return why that is refused."""
    sent, refused = results.retry([failure], **options)
    assert [result.id for result in sent] == ([] if refused else [failure.id])
    return refused.get(failure.id)


def test_failure_is_described(app: Celery, results: StoredResults) -> None:
    fail(app, 'a', hostname='w1', retries=2)
    [found] = results.listing()
    assert found == got(results, 'a')
    described = found.described()
    assert isinstance(described.pop('date'), float)
    assert described == {
        'id': 'a',
        'task': 'report',
        'state': 'FAILURE',
        'error': 'ValueError: broken, 5',
        'result': None,
        'traceback': 'lines',
        'args': [1],
        'kwargs': {'name': 'x'},
        'queue': 'celery',
        'worker': 'w1',
        'retries': 2,
    }
    assert results.get('b') is None


def test_results_are_read_in_pages_newest_first(app: Celery, results: StoredResults) -> None:
    fail(app, 'a')
    like = got(results, 'a').document
    docs = [{**like, '_id': f'celery-task-meta-{n:03}', 'date': 1000.0 + n} for n in range(250)]
    for doc in docs:
        del doc['_rev']
    results.client.bulk([*docs, {**docs[0], '_id': 'celery-task-meta-other', 'task': 'other', 'date': 1500.0}])
    assert [found.id for found in results.listing()] == ['a', 'other', *(f'{n:03}' for n in range(249, -1, -1))]
    assert [found.id for found in results.listing(task='report', since=1248.0)] == ['a', '249', '248']
    assert [found.id for found in results.listing(task='report', error='ValueError', since=1248.0)] == [
        'a',
        '249',
        '248',
    ]
    groups = [(group.task, group.error, group.count, group.first) for group in results.groups()]
    assert groups == [('other', 'ValueError', 1, 1500.0), ('report', 'ValueError', 251, 1000.0)]
    assert list(results.listing('REVOKED')) == []


def test_expired_results_are_not_listed(app: Celery, results: StoredResults) -> None:
    fail(app, 'a')
    doc = got(results, 'a').document
    results.client.put({**doc, 'expires': 1.0})
    assert list(results.listing()) == []
    assert results.get('a') is None


def test_result_that_cannot_be_decoded_is_listed(app: Celery, results: StoredResults) -> None:
    fail(app, 'a')
    doc = got(results, 'a').document
    results.client.put({**doc, 'value': 'no JSON', 'content_type': 'application/json'})
    [found] = results.listing()
    assert found.error is not None
    assert found.error.startswith('the result cannot be decoded: ')
    assert 'its arguments are not stored' in str(refusal(results, found))
    assert refusal(results, found, args=[], kwargs={}) is None
    assert app.AsyncResult('a').state == 'RETRY'


def test_failure_whose_arguments_were_too_large_needs_new_ones(app: Celery, results: StoredResults) -> None:
    fail(app, 'a')
    doc = got(results, 'a').document
    results.client.put({**doc, 'value': {**doc['value'], 'args': "['xxx … xxx']"}})
    found = got(results, 'a')
    assert 'its arguments were too large to be stored with its result' in str(refusal(results, found, kwargs={}))
    assert refusal(results, found, args=[], kwargs={}) is None


def test_pickled_failure_is_sent_again(app: Celery, client: Client) -> None:
    app.conf.update(result_serializer='pickle', accept_content=['json', 'pickle'])
    app.backend.store.database.set_up()
    results = StoredResults(app)
    fail(app, 'a')
    [found] = results.listing()
    assert found.error == "ValueError: ('broken', 5)"
    assert refusal(results, found) is None
    assert app.AsyncResult('a').state == 'RETRY'
    assert [item['message']['headers']['id'] for item in items(client)] == ['a']


def test_queue_is_the_one_of_the_failed_task_if_it_exists(app: Celery, results: StoredResults, client: Client) -> None:
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare('mail')
    for task_id, routing_key in (('a', 'mail'), ('b', 'a routing key'), ('c', None)):
        fail(app, task_id, delivery_info={'routing_key': routing_key})
        assert refusal(results, got(results, task_id)) is None
    fail(app, 'd')
    assert refusal(results, got(results, 'd'), queue='other') is None
    queues = {item['message']['headers']['id']: item['queue'] for item in items(client)}
    assert queues == {'a': 'mail', 'b': 'celery', 'c': 'celery', 'd': 'other'}


def test_task_that_cannot_be_sent_stays_failed(app: Celery, results: StoredResults, client: Client) -> None:
    @app.task(name='report', shared=False)
    def report(number: int) -> int:
        return number

    fail(app, 'a')
    fail(app, 'b', kwargs={})
    failures = [got(results, name) for name in 'ab']
    sent, refused = results.retry(failures)
    assert refused == {'a': "it cannot be sent: report() got an unexpected keyword argument 'name'"}
    assert [result.id for result in sent] == ['b']
    assert got(results, 'a').state == 'FAILURE'
    assert [item['message']['headers']['id'] for item in items(client)] == ['b']


@pytest.mark.parametrize('error', [RequestRefused('too large'), ServerUnavailable('gone')])
def test_messages_are_sent_one_by_one_if_couchdb_refuses_one_of_them(
    app: Celery, results: StoredResults, client: Client, monkeypatch: pytest.MonkeyPatch, error: CouchDBError
) -> None:
    for name in 'ab':
        fail(app, name)

    def flush(producer: CollectingProducer) -> None:
        raise error

    monkeypatch.setattr(CollectingProducer, 'flush', flush)
    failures = [got(results, name) for name in 'ab']
    sent, refused = results.retry(failures)
    if isinstance(error, ServerUnavailable):
        assert (sent, refused) == ([], dict.fromkeys('ab', 'it cannot be sent: gone'))
        assert [got(results, name).state for name in 'ab'] == ['FAILURE'] * 2
    else:
        assert (sent, refused, len(items(client))) == (failures, {}, 2)


def test_only_failures_are_sent_again(app: Celery, results: StoredResults) -> None:
    app.backend.store_result('a', 1, 'SUCCESS')
    assert refusal(results, got(results, 'a')) == 'its state is SUCCESS: only failed tasks can be sent again'
    assert results.drop([got(results, 'a')]) == []


@pytest.mark.parametrize('step', [0, 1])
def test_retry_of_a_killed_process_is_completed_by_another(
    app: Celery, results: StoredResults, client: Client, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The process is killed before the message is sent (0), or before the state is changed (1)."""
    for name in 'ab':
        fail(app, name)
    failures = [got(results, name) for name in 'ab']
    with monkeypatch.context() as killed:
        killed.setattr(results, ('_send', '_waiting')[step], lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            results.retry(failures)
    assert results.retry(failures) == ([], dict.fromkeys('ab', 'another process changed its result just now'))
    assert [got(results, name).state for name in 'ab'] == ['FAILURE'] * 2
    # Nobody learns too late that his arguments are not those of the message which is on its way.
    edited = refusal(results, got(results, 'a'), args=[5])
    assert edited == (None, 'it was sent again already')[step]
    again = [got(results, name) for name in 'ab'][1 - step :]
    assert results.retry(again) == (again, {})
    assert [got(results, name).state for name in 'ab'] == ['RETRY'] * 2
    sent = {item['message']['headers']['id']: item['message']['headers']['argsrepr'] for item in items(client)}
    assert sent == {'a': ('(5,)', '(1,)')[step], 'b': '(1,)'}
    assert got(results, 'a').args == ([5], [1])[step]


def test_many_failures_need_few_requests(
    app: Celery, results: StoredResults, client: Client, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        fail(app, f'{number:02}')
    to_results = record_requests(monkeypatch, results.client.address.database)
    failures = list(results.listing())
    assert len(to_results) == 2
    sent.clear()
    again, refused = results.retry(failures)
    assert (len(again), refused, len(items(client))) == (20, {}, 20)
    assert len([request for request in sent if request.docs]) < 5
    assert len([request for request in to_results if request.docs]) == 2


def test_other_backends_are_refused() -> None:
    with pytest.raises(ConfigurationError, match='the result backend of this app is not CouchDB'):
        StoredResults(Celery('other', set_as_current=False, backend='cache+memory://'))
