"""Mistakes of users: each error is one clear sentence without the password."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import (
    AccessDenied,
    ConfigurationError,
    CouchDBError,
    DatabaseMissing,
    DocumentTooLarge,
    ServerUnavailable,
)
from tests.conftest import wait_for
from tests.support import Inbox, items, publish

PASSWORD = 'unguessable-77'


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kombu make its second attempt to connect at once."""
    monkeypatch.setattr('kombu.utils.functional.sleep', lambda seconds: None)


def failure(url: str, expected: type[CouchDBError], **options: object) -> str:
    """Connect, and return the text of the error; check what all error texts have in common."""
    with (
        pytest.raises(expected) as caught,
        Connection(url, transport_options=options) as connection,
    ):
        connection.connect()
    text = str(caught.value)
    assert '\n' not in text
    assert 20 < len(text) < 400
    assert PASSWORD not in text
    return text


def test_unknown_host() -> None:
    text = failure(f'couchdb://joe:{PASSWORD}@no-such-host.invalid/db', ServerUnavailable)
    assert 'no-such-host.invalid' in text


def test_closed_port() -> None:
    text = failure(f'couchdb://joe:{PASSWORD}@127.0.0.1:1/db', ServerUnavailable)
    assert '127.0.0.1:1' in text
    assert 'refused' in text.lower()


def test_connection_errors_have_the_classes_that_kombu_expects(client: Client) -> None:
    with Connection('couchdb://127.0.0.1:1/db') as connection, pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_start=0)
    with Connection('couchdb://127.0.0.1:1/db') as connection, pytest.raises(OperationalError):
        publish(connection, 'hello', retry=True, retry_policy={'max_retries': 1, 'interval_start': 0})


def test_wrong_password(server: Server, client: Client, database: str) -> None:
    text = failure(server.couchdb_url(database, f'nobody-{uuid.uuid4().hex[:8]}', PASSWORD), AccessDenied)
    assert 'nobody-' in text
    assert 'password' in text


def test_no_password(server: Server, client: Client, database: str) -> None:
    assert 'no user' in failure(f'couchdb://{server.host}:{server.port}/{database}', AccessDenied)


def test_user_without_the_right_to_create_the_database(
    server: Server, users: Callable[..., None], database: str, apache_couchdb: bool
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    name = f'joe-{uuid.uuid4().hex[:8]}'
    users(name, PASSWORD)
    text = failure(server.couchdb_url(database, name, PASSWORD), AccessDenied)
    assert 'administrator' in text
    assert database in text


def test_missing_database_with_create_database_off(url: str) -> None:
    assert 'create_database' in failure(url, DatabaseMissing, create_database=False)


def test_invalid_option(url: str) -> None:
    assert 'visibilty_timeout' in failure(url, ConfigurationError, visibilty_timeout=5)


@pytest.mark.parametrize('database', ['Upper', 'a.b'])
def test_database_name_that_couchdb_refuses(server: Server, database: str) -> None:
    assert 'database name' in failure(server.couchdb_url(database), ConfigurationError)


#: The body of a unique job is in its document, so that `max_document_size` limits it.
UNIQUE: dict[str, Any] = {'headers': {'id': 'a', 'task': 't', 'job_key': 'k'}}


def test_largest_unique_job_can_be_claimed_released_and_dead_lettered(
    connection: Connection, client: Client, apache_couchdb: bool
) -> None:
    """A job of the largest size that can be published must not exceed the limit when it is claimed or dead-lettered."""
    size = 8_000_000
    if apache_couchdb:
        while True:
            try:
                publish(connection, 'x' * size, **UNIQUE)
                break
            except DocumentTooLarge:
                size -= 50
        assert size > 7_990_000
    else:
        publish(connection, 'x' * size, **UNIQUE)
    inbox = Inbox(connection, ack=False)
    assert len(inbox.wait(1)[0]) == size
    inbox.messages[0].requeue()
    inbox.wait(2)
    inbox.messages[1].reject()
    wait_for(lambda: items(client)[0].get('status') == 'fail', 'the dead letter')
    Inbox(connection).stays(0, 1)
