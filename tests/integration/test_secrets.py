"""The password stays out of everything that people read."""

from __future__ import annotations

import logging
import traceback
import uuid
from collections.abc import Callable

import pytest
from kombu import Connection

from kombu_couchdb.client import Client
from kombu_couchdb.errors import CouchDBError
from tests.conftest import Server
from tests.support import Inbox, publish


def test_connection_info(server: Server, url: str, client: Client) -> None:
    with Connection(url) as connection:
        connection.connect()
        info = connection.info()
        assert info.pop('password') == server.password
        assert server.password not in str(info)
        for text in (repr(connection), connection.as_uri(), repr(connection.transport), repr(connection.transport.address),
                     repr(connection.transport.couchdb), repr(connection.default_channel)):
            assert server.password not in text


def test_log_and_errors(server: Server, database: str, client: Client, connect: Callable[..., Connection],
                        caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    secret = f'secret-{uuid.uuid4().hex}'
    with pytest.raises(CouchDBError) as caught, \
            Connection(server.couchdb_url(database, 'nobody-at-all', secret)) as connection:
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


@pytest.mark.parametrize('url', [
    'couchdb://joe:{}@127.0.0.1:1/Not-A-Name', 'couchdb://joe:{}@127.0.0.1:port/db', 'couchdb://joe:{}@[::1/db',
])
def test_url_that_is_wrong(url: str) -> None:
    secret = f'secret-{uuid.uuid4().hex}'
    with pytest.raises(Exception) as caught, Connection(url.format(secret)) as connection:  # noqa: PT011
        connection.connect()
    assert secret not in str(caught.value)
