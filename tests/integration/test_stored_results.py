"""Stored results as operators read them, without a worker."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.app.task import Context

from celery_couchdb.stored_results import StoredResults
from kombu_couchdb.errors import ConfigurationError


@pytest.fixture
def results(app: Celery) -> StoredResults:
    """The results of the app, with a failure that a worker has stored which runs with `result_extended`."""
    app.conf.result_extended = True
    request = Context(
        id='a',
        task='report',
        args=[1],
        kwargs={'name': 'x'},
        delivery_info={'routing_key': 'celery', 'delivery': 3},
        hostname='w1',
        retries=2,
    )
    app.backend.store_result('a', ValueError('broken', 5), 'FAILURE', traceback='lines', request=request)
    return StoredResults(app)


def test_failure_is_described(results: StoredResults) -> None:
    found = results.get('a')
    assert found is not None
    assert results.complete('a') == [found]
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


def test_expired_result_is_not_there(results: StoredResults) -> None:
    found = results.get('a')
    assert found is not None
    results.client.put({**found.document, 'expires': 1.0})
    assert (results.get('a'), results.complete('a')) == (None, [])


def test_result_that_cannot_be_decoded_says_so(results: StoredResults) -> None:
    found = results.get('a')
    assert found is not None
    results.client.put({**found.document, 'value': 'no JSON', 'content_type': 'application/json'})
    found = results.get('a')
    assert found is not None
    assert str(found.error).startswith('the result cannot be decoded: ')
    assert found.args is None


def test_no_database_means_no_results(app: Celery) -> None:
    results = StoredResults(app)
    assert (results.get('a'), results.complete('a')) == (None, [])


def test_result_backend_must_be_couchdb() -> None:
    with pytest.raises(ConfigurationError, match='the result backend of this app is not CouchDB'):
        StoredResults(Celery('other', set_as_current=False, backend='cache+memory://'))
