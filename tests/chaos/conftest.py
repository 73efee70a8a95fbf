"""Servers and networks that a test may break; each test has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.chaos.proxy import Proxy
from tests.patience import PatientConnection
from tests.support import release_all


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as slow: they wait for time limits, leases and outages."""
    folder = Path(__file__).parent.relative_to(Path(__file__).parents[2]).as_posix()
    for item in items:
        if item.nodeid.startswith(f'{folder}/'):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the server under test."""
    with Proxy(server.host, server.port) as proxy:
        yield proxy


@pytest.fixture
def connect(server: Server, client: Client, database: str, proxy: Proxy) -> Iterator[Callable[..., Connection]]:
    """A function that connects to the test's database, directly or, with `through_proxy`, through the proxy."""
    opened: list[Connection] = []

    def connect(*, through_proxy: bool = False, **options: Any) -> Connection:
        url = server.couchdb_url(database)
        if through_proxy:
            url = url.replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{proxy.port}/')
        opened.append(PatientConnection(url, transport_options=options))
        return opened[-1]

    yield connect
    proxy.go_on()
    release_all(opened)
