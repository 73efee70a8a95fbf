"""The error classes, and their mapping from HTTP responses (`kombu_couchdb.errors`)."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest
import requests
from requests import exceptions as http
from urllib3.exceptions import MaxRetryError, NewConnectionError, ProtocolError

from celery_couchdb.options import ResultOptions
from celery_couchdb.results.result_store import ResultStore as Results
from kombu_couchdb import errors
from kombu_couchdb.couchdb import failures
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.queues.databases import ensure

WHERE = 'http://db.example:5984/celery'
SECRET = 'tell-nobody'


def refused(status: int, body: Any = None, user: str | None = 'me', size: int = 10) -> errors.CouchDBError:
    response = requests.Response()
    response.status_code, response.reason = status, 'The Reason'
    response._content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    response.url = f'http://me:{SECRET}@db.example:5984/celery'
    return failures.from_status(response, WHERE, user, size)


# -- class hierarchy


def test_exactly_the_retried_errors_are_oserrors() -> None:
    assert set(errors.RETRIED) == {errors.ServerUnavailable, errors.DatabaseMissing}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    for kind in kinds:
        assert issubclass(kind, errors.CouchDBError)
        # kombu and Celery retry on OSError by themselves.
        assert issubclass(kind, OSError) == issubclass(kind, errors.RETRIED)


# -- responses


@pytest.mark.parametrize(
    ('status', 'body', 'kind'),
    [
        (400, {'error': 'bad_request', 'reason': 'invalid UTF-8 JSON'}, errors.RequestRefused),
        (401, {'error': 'unauthorized', 'reason': 'Name or password is incorrect.'}, errors.AccessDenied),
        (403, {'error': 'forbidden', 'reason': 'You are not allowed to access this db.'}, errors.AccessDenied),
        (
            403,
            {'error': 'forbidden', 'reason': 'Account is temporarily locked due to multiple authentication failures'},
            errors.ServerUnavailable,
        ),
        (404, {'error': 'not_found', 'reason': 'missing'}, errors.NotFound),
        (404, {'error': 'not_found', 'reason': 'Database does not exist.'}, errors.DatabaseMissing),
        (404, {'error': 'not_found', 'reason': 'no_db_file'}, errors.DatabaseMissing),
        (404, b'<html>not here</html>', errors.NotFound),
        (409, {'error': 'conflict', 'reason': 'Document update conflict.'}, errors.Conflict),
        (412, {'error': 'file_exists'}, errors.Conflict),
        (413, {'error': 'document_too_large', 'reason': 'id'}, errors.DocumentTooLarge),
        (429, None, errors.ServerUnavailable),
        (500, {'error': 'internal_server_error'}, errors.ServerUnavailable),
        (502, b'<html>Bad Gateway</html>', errors.ServerUnavailable),
        (503, b'', errors.ServerUnavailable),
        (504, b'[' * 100_000, errors.ServerUnavailable),
    ],
)
def test_class_of_each_status(status: int, body: Any, kind: type[Exception]) -> None:
    error = refused(status, body)
    assert type(error) is kind
    assert WHERE in str(error)
    assert SECRET not in str(error)
    assert '<html>' not in str(error)


def test_reason_of_the_server_is_shown_shortened() -> None:
    assert 'file_exists' in str(refused(412, {'error': 'file_exists'}))
    assert len(str(refused(500, {'reason': 'x' * 10_000}))) < 500


# -- missing responses


def nested() -> Exception:
    cause = NewConnectionError(None, 'Failed to establish a new connection: [Errno 111] Connection refused')  # type: ignore[arg-type]
    return http.ConnectionError(MaxRetryError(None, f'/{SECRET}', cause))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ('exc', 'kind', 'text'),
    [
        (
            http.ConnectionError(ProtocolError('Connection aborted.', ConnectionResetError(104, 'reset by peer'))),
            errors.ServerUnavailable,
            'reset by peer',
        ),
        (nested(), errors.ServerUnavailable, 'no server listens at this port; start it, or correct host and port'),
        (
            http.ConnectionError("Failed to resolve 'db.test' ([Errno -2] Name or service not known)"),
            errors.ServerUnavailable,
            'the host name cannot be resolved; correct it, or check the name server',
        ),
        (http.ConnectTimeout(), errors.ServerUnavailable, 'no connection within the time limit'),
        (http.ReadTimeout(), errors.ServerUnavailable, 'request_timeout'),
        (http.SSLError('CERTIFICATE_VERIFY_FAILED'), errors.ServerUnavailable, 'ca_certs'),
        (http.ChunkedEncodingError('cut'), errors.ServerUnavailable, 'cut'),
        (http.ProxyError('proxy'), errors.ServerUnavailable, 'proxy'),
        (http.InvalidURL(f'http://{SECRET}'), errors.ConfigurationError, 'host or port is not valid'),
        (OSError('Could not find the TLS certificate file, invalid path: me.pem'), errors.ConfigurationError, 'me.pem'),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else '',
)
def test_class_of_each_failure(exc: OSError, kind: type[Exception], text: str) -> None:
    error = failures.from_transport(exc, WHERE)
    assert type(error) is kind
    assert str(error).startswith(f'{WHERE}: ')
    assert text in str(error)
    assert SECRET not in str(error)


def test_cause_is_one_short_line() -> None:
    exc = http.ConnectionError(ValueError('first\nsecond' + 'x' * 5000))
    assert str(failures.from_transport(exc, WHERE)) == f'{WHERE}: first'
    assert len(str(failures.from_transport(http.ConnectionError('y' * 5000), WHERE))) < 300


# -- endpoints that a service does not offer


NO_DATABASE = {'error': 'not_found', 'reason': 'Database does not exist.'}


@pytest.mark.parametrize(
    ('status', 'body', 'path', 'roles', 'is_offered'),
    [
        (403, None, '/_purge', ['_admin'], False),
        (403, None, '/_purge', ['_reader'], True),
        (403, None, '/_session', [], False),
        (401, {'reason': 'You are not a server admin.'}, '/_purge', ['_admin'], True),
        (404, None, '/_compact/celery-v8', [], False),
        (404, NO_DATABASE, '/_compact', [], True),
        (404, NO_DATABASE, '/_membership', [], False),
        (404, None, '/_local/x', [], True),
        (405, None, '/_revs_limit', [], False),
        (501, None, '/_users/_all_docs', [], False),
        (501, None, '/_bulk_docs', [], True),
        (500, None, '/_purge', ['_admin'], True),
        (409, None, '/_security', ['_admin'], True),
    ],
)
def test_endpoints_that_are_not_offered(status: int, body: Any, path: str, roles: list[str], is_offered: bool) -> None:
    server, is_of_server = 'http://db.example:5984', path.startswith(('/_membership', '/_users', '/_session'))
    error = refused(status, body)
    found = failures.not_offered(error, path, server, lambda: {'roles': roles}, is_of_server=is_of_server)
    assert (found is None) is is_offered
    assert found is None or f'{server} does not offer {path.split("/")[1]}: ' in str(found)


def test_user_of_a_service_without_sessions_may_be_an_administrator() -> None:
    session = Mock(side_effect=errors.NotOffered('_session'))
    assert failures.not_offered(refused(403), '/_purge', 'http://db.example:5984', session, is_of_server=False)


# -- missing rights


def test_missing_user_is_reported() -> None:
    assert str(errors.access_denied('http://host/db', None, 'set up the database', 'ask somebody')) == (
        'http://host/db: no user in the URL, and without one nobody may set up the database; '
        'write couchdb://user:password@host:port/db'
    )
    assert str(refused(401, {'reason': 'You are not authorized to access this db.'}, None)).endswith(
        'refused nobody (no user in the URL): You are not authorized to access this db; write couchdb://user:password@host:port/db'
    )


@pytest.mark.parametrize('name', ['broker', 'results'])
def test_setup_of_a_database_without_a_user(name: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise errors.AccessDenied('You are not a server admin.')

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise errors.DatabaseMissing('gone')

    client = Client(Address())
    client.id_range = client.get_or_none = missing  # type: ignore[method-assign]
    client.create = client.put = refuse  # type: ignore[method-assign]
    client.welcome = dict  # type: ignore[method-assign]
    with pytest.raises(
        errors.AccessDenied, match=r'no user in the URL, and without one nobody may .* database'
    ) as caught:
        ensure(client, True) if name == 'broker' else Results(client, ResultOptions()).read('x')
    assert 'None' not in str(caught.value)
