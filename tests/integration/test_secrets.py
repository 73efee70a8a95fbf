"""The password is in no text that people read: logs, errors, repr() and connection info."""

from __future__ import annotations

import gc
import logging
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.auth import Auth
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import CouchDBError
from tests.conftest import PATIENCE
from tests.support import Inbox, publish
from tests.tokens import Gateway, TokenServer, token


@pytest.mark.parametrize('nodes', [1, 2])
def test_connection_info_does_not_show_the_password(server: Server, url: str, client: Client, nodes: int) -> None:
    other = f'secret-{uuid.uuid4().hex}'
    with Connection(
        ';'.join([url, f'couchdb://joe:{other}@127.0.0.1:1/{client.address.database}'][:nodes])
    ) as connection:
        connection.connect()
        info = connection.info()
        assert info.pop('password') == server.password
        assert f':{server.password}@' not in str(info)
        assert other not in str(info)
        assert len(info['alternates']) == (nodes if nodes > 1 else 0)
        for text in (
            repr(connection),
            connection.as_uri(),
            repr(connection.transport),
            repr(connection.transport.address),
            repr(connection.transport.couchdb),
            repr(connection.default_channel),
        ):
            assert server.password not in text


def test_log_and_errors_do_not_show_the_password(
    server: Server,
    database: str,
    client: Client,
    connect: Callable[..., Connection],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = f'secret-{uuid.uuid4().hex}'
    with (
        pytest.raises(CouchDBError) as caught,
        Connection(server.couchdb_url(database, 'nobody-at-all', secret)) as connection,
    ):
        connection.connect()
    text = ''.join(traceback.format_exception(caught.value))
    assert secret not in text
    assert secret not in caplog.text
    refused = f'couchdb://joe:{secret}@127.0.0.1:1/db'
    with pytest.raises(CouchDBError) as caught, Connection(refused) as connection:
        connection.connect()
    assert secret not in ''.join(traceback.format_exception(caught.value))
    inbox = Inbox(connect())
    publish(connect(), 'hello')
    inbox.wait(1)
    assert secret not in caplog.text
    assert f'{server.user}:{server.password}' not in caplog.text


def secrets_of(login: Auth) -> list[str]:
    """Return the secrets: the password, and its encoded form or session in headers."""
    headers: dict[str, str] = {}
    login.headers(lambda data: pytest.fail('there is a session')).add_to(headers)
    return [
        str(login._address.password),
        *(value.split(None, 1)[-1].removeprefix('AuthSession=') for value in headers.values()),
    ]


#: The URL of a database, and options.
Login = tuple[str, dict[str, Any]]


@pytest.fixture
def login(server: Server, url: str, database: str, request: pytest.FixtureRequest) -> Iterator[Login]:
    """The URL of the test's database with a secret of this kind, and the options for it."""
    auth, key = request.param, f'key-{uuid.uuid4().hex}'
    if auth in ('basic', 'cookie'):
        yield url, {'auth': auth}
        return
    with Gateway(server) as gateway, TokenServer(key) as tokens:
        secret, options = {'jwt': (token(), {}), 'iam': (key, {'token_url': tokens.url})}[auth]
        yield gateway.couchdb_url(database, secret), {'auth': auth, **options}


@pytest.mark.parametrize('login', ['basic', 'cookie', 'jwt', 'iam'], indirect=True)
def test_no_object_of_these_packages_shows_the_password(
    client: Client,
    login: Login,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    url, options = login
    app = Celery('secrets', set_as_current=False, broker=url, backend=url)
    app.conf.update(broker_transport_options=options, result_backend_transport_options=options)
    with app.connection_for_read() as connection:
        inbox = Inbox(connection, 'celery')
        sent = app.send_task('add', (1, 2))
        inbox.wait(1)
        app.backend.store_result(sent.id, 3, 'SUCCESS')
        assert sent.get(timeout=PATIENCE) == 3
        secrets = secrets_of(connection.transport.couchdb.server.node.auth)
        assert len(secrets) == 2
        ours = [
            thing
            for thing in gc.get_objects()
            if str(type(thing).__module__).startswith(('kombu_couchdb', 'celery_couchdb'))
        ]
        assert {'Address', 'Auth', 'Client', 'Options', 'Transport', 'IOThread', 'CouchDBBackend', 'Subscriber'} <= {
            type(thing).__name__ for thing in ours
        }
        told = capfd.readouterr()
        seen = [
            caplog.text,
            told.out,
            told.err,
            repr(connection.info() | {'password': None}),
            *map(repr, ours),
            *map(str, ours),
        ]
    app.close()
    # A short password may be an ordinary word, so that only its form in a URL counts.
    secrets[0] = f':{secrets[0]}@' if len(secrets[0]) < 12 else secrets[0]
    assert [text for text in seen for secret in secrets if secret in text] == []
