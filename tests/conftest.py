"""The servers the tests run on: `COUCHDB_URL` if it is set, else the embedded one."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import pytest

from kombu_couchdb.address import Address
from kombu_couchdb.client import Client
from kombu_couchdb.embedded import EmbeddedServer
from kombu_couchdb.errors import DatabaseMissing, NotFound

T = TypeVar('T')

#: How long a test waits for something that must come true, in seconds: generous, since no test may depend on speed.
PATIENCE = 60.0


def wait_for(condition: Callable[[], T], what: str = '', timeout: float = PATIENCE) -> T:
    """Return the first true value of `condition()`; fail the test if there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f'waited {timeout:g} s in vain for {what or condition}')
        time.sleep(0.02)
    return value


class Server:
    """The CouchDB server under test: its parts, and URLs for databases on it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.host, self.port = parts.hostname or 'localhost', parts.port or 5984
        self.user, self.password = unquote(parts.username or ''), unquote(parts.password or '')

    def couchdb_url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """Return the `couchdb://` URL of a database, as a user writes it in a Celery configuration."""
        login = f'{quote(user or self.user, safe="")}:{quote(password or self.password, safe="")}@'
        return f'couchdb://{login}{self.host}:{self.port}/{quote(database, safe="")}'

    def client(self, database: str, **address: Any) -> Client:
        """Return a client for a database on this server."""
        given = {'user': self.user, 'password': self.password, **address}
        return Client(Address(host=self.host, port=self.port, database=database, **given))


@pytest.fixture(scope='session')
def server() -> Iterator[Server]:
    """The server all integration tests share; each has databases of its own."""
    if url := os.environ.get('COUCHDB_URL'):
        yield Server(url)
    else:
        with EmbeddedServer() as embedded:
            yield Server(embedded.url)


@pytest.fixture(scope='session')
def apache_couchdb(server: Server) -> bool:
    """Whether the server is Apache CouchDB, which has more than the embedded one."""
    return 'couchdb' in server.client('any').welcome()


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """The name of a database of this test's own; it is deleted afterwards, whoever created it."""
    name = f'test-{uuid.uuid4().hex[:12]}'
    yield name
    try:
        server.client(name).delete()
    except (NotFound, DatabaseMissing):
        pass


@pytest.fixture
def client(server: Server, database: str) -> Iterator[Client]:
    """A client for the test's database, which exists."""
    client = server.client(database)
    client.create()
    yield client
    client.close()


@pytest.fixture
def url(server: Server, database: str) -> str:
    """The `couchdb://` URL of the test's database."""
    return server.couchdb_url(database)
