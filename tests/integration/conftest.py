"""Connections for the tests, closed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
import requests
from kombu import Connection

from kombu_couchdb.client import Client
from tests.conftest import PATIENCE, Server
from tests.support import Request, record_requests, release_all


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., Connection]]:
    """Returns a function that opens another connection to the test's database; its arguments are transport options."""
    opened: list[Connection] = []

    def connect(**options: Any) -> Connection:
        opened.append(Connection(url, transport_options=options))
        return opened[-1]

    yield connect
    release_all(opened)


@pytest.fixture
def connection(connect: Callable[..., Connection], client: Client) -> Connection:
    """One connection to the test's database, which exists."""
    return connect()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, database: str) -> list[Request]:
    """The requests to the test's database, in order; clear it to count anew."""
    return record_requests(monkeypatch, database)


@pytest.fixture
def users(server: Server) -> Iterator[Callable[[str, str], None]]:
    """Returns a function that creates a user by name and password; Apache CouchDB only."""
    made: list[str] = []

    def create(name: str, password: str) -> None:
        made.append(f'/_users/{quote(f"org.couchdb.user:{name}", safe="")}')
        answer = requests.put(f'{server.url}{made[-1]}', timeout=PATIENCE, json={
            'name': name, 'password': password, 'roles': [], 'type': 'user'})
        assert answer.status_code == 201, answer.text

    yield create
    for path in made:
        rev = requests.get(server.url + path, timeout=PATIENCE).json()['_rev']
        requests.delete(server.url + path, params={'rev': rev}, timeout=PATIENCE)
