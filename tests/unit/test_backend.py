"""The result backend without a server: URLs, masked passwords, errors, and the encoding of results."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
from celery import Celery
from kombu.serialization import dumps, loads

from celery_couchdb.results.documents import pack, unpack
from kombu_couchdb.errors import (
    AccessDenied,
    ConfigurationError,
    Conflict,
    DatabaseMissing,
    ServerUnavailable,
)


def app_of(url: str, **conf: Any) -> Celery:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    app.conf.update(conf)
    return app


# -- URLs


def test_couchdb_plus_https_does_not_become_plain_http() -> None:
    with pytest.raises(ConfigurationError, match='couchdbs://'):
        app_of('couchdb+https://user:secret@host/db').backend  # noqa: B018


def test_backend_can_be_pickled() -> None:
    app = app_of('couchdb://user:pw@host/db')
    app.set_current()
    try:
        copy = pickle.loads(pickle.dumps(app.backend))
    finally:
        app.close()
        Celery('other').set_current()
    assert copy.client.address == app.backend.client.address


# -- errors


@pytest.mark.parametrize(
    ('error', 'again'),
    [
        (ServerUnavailable(), True),
        (DatabaseMissing(), True),
        (AccessDenied(), False),
        (Conflict(), False),
    ],
)
def test_always_retry_stores_a_result_again_after_temporary_errors(
    error: Exception, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of('couchdb://host', result_backend_always_retry=True, result_backend_base_sleep_between_retries_ms=1)
    answers = iter([error, error])

    def write(*_: Any) -> None:
        if exc := next(answers, None):
            raise exc

    monkeypatch.setattr(app.backend.store, 'write', write)
    with nullcontext() if again else pytest.raises(type(error)):
        app.backend.store_result('id', 1, 'SUCCESS')
    assert (next(answers, None) is None) is again


def test_always_retry_reads_again_in_a_task_for_the_time_limit_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(
        'couchdb://host', result_backend_always_retry=True, result_backend_transport_options={'request_timeout': 0.5}
    )
    answers = iter([ServerUnavailable('no'), ServerUnavailable('no')])

    def read(doc_id: str) -> None:
        if exc := next(answers, None):
            raise exc

    monkeypatch.setattr(app.backend.store, 'read', read)

    @app.task
    def state() -> str:
        return str(app.AsyncResult('id').state)

    assert state() == 'PENDING'
    answers = itertools.repeat(ServerUnavailable('no'))
    with pytest.raises(ServerUnavailable):
        state()


# -- the document


#: Results that are stored as JSON.
PLAIN: list[Any] = [None, True, -5, 2**40, 0.5, 'ü😀', '\\ud800', [1, 'a'], {'_id': 1, '_rev': 2}, {'a': {'b': [0.25]}}]

#: Results that a server might change.
FRAGILE: list[Any] = [2**53, 2.0, -0.0, 5e-324, math.nan, math.inf, '\ud800', b'bytes', {'__proto__': 1}]

#: More that each serializer can encode, or refuses.
OTHERS: list[Any] = [10**400, 'ü😀\x00\n', {'_deleted': True}, {'\udfff': 1}, {'__type__': 1}, {'2': 1, '1': 2}]


@pytest.mark.parametrize('serializer', ['json', 'pickle', 'msgpack', 'yaml'])
def test_round_trip(serializer: str) -> None:
    encoded = 0
    for result in [*PLAIN, *FRAGILE, *OTHERS]:
        try:
            content_type, encoding, payload = dumps({'status': 'SUCCESS', 'result': result}, serializer=serializer)
        except Exception:
            continue  # Celery cannot encode it, or lacks the serializer
        through = json.loads(json.dumps(pack(payload, content_type), allow_nan=False))  # as the client does
        back = unpack(through)
        assert type(back) is type(payload)
        decoded = [loads(p, content_type, encoding, accept=None, force=True) for p in (back, payload)]
        assert repr(decoded[0]) == repr(decoded[1])  # NaN equals NaN, and 0.0 does not equal -0.0
        encoded += 1
    assert encoded > 10 or serializer in ('msgpack', 'yaml')


def test_only_results_that_no_server_changes_are_stored_as_json() -> None:
    for result in PLAIN:
        _, _, payload = dumps({'status': 'SUCCESS', 'result': result}, serializer='json')
        assert pack(payload, 'application/json') == {'value': {'status': 'SUCCESS', 'result': result}}
    for result in [*FRAGILE, {'__type__': 'no', '__value__': 1}]:
        _, _, payload = dumps({'result': [result]}, serializer='json')
        assert pack(payload, 'application/json') == {'value': payload, 'content_type': 'application/json'}
