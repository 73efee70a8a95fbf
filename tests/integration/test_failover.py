"""Failover: the connection object of kombu names the node that is in use."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENT_BROKER
from tests.support import Inbox, publish, release_all

from .conftest import Connect


@pytest.fixture
def closed_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def connect_by(url: str, client: Client) -> Iterator[Connect]:
    """A function that opens a connection through nodes on these ports, to the test's database."""
    opened: list[Connection] = []

    def connect_by(*ports: int) -> Connection:
        urls = [url.replace(f':{client.address.port}/', f':{port}/') for port in ports]
        opened.append(Connection(';'.join(urls), transport_options=PATIENT_BROKER))
        return opened[-1]

    yield connect_by
    release_all(opened)


def is_of(connection: Connection, port: int) -> bool:
    return (
        connection.port == connection.info()['port'] == port
        and f':{port}/' in connection.as_uri()
        and connection.as_uri().startswith('couchdb://')
    )


def test_connection_names_the_second_node_if_the_first_is_down(
    connect_by: Connect, client: Client, closed_port: int
) -> None:
    for _ in range(2):  # in the second pass the process knows that the first node does not respond
        connection = connect_by(closed_port, client.address.port)
        assert connection.connect()
        assert is_of(connection, client.address.port)
        publish(connection, 'hello')
        assert Inbox(connection).wait(1) == ['hello']
        assert is_of(connection.clone(), client.address.port)
        assert (connection.userid, connection.password) == (client.address.user, client.address.password)
        assert connection.virtual_host == client.address.database
        connection.close()
        assert connection.connect()
        assert is_of(connection, client.address.port)


def test_connection_names_its_new_node_after_failover(connect_by: Connect, client: Client) -> None:
    with Proxy(
        '127.0.0.1' if client.address.host == 'localhost' else client.address.host, client.address.port
    ) as proxy:
        connection = connect_by(proxy.port, client.address.port)
        inbox = Inbox(connection)
        publish(connection, 'before')
        inbox.wait(1)
        assert is_of(connection, proxy.port)
        connection.transport.couchdb.switch_node()
        publish(connection, 'after')
        assert inbox.wait(2) == ['before', 'after']
        assert is_of(connection, client.address.port)
