"""URLs with several nodes of a cluster: if a node does not respond, the next one is asked.

The nodes are two proxies in front of the server under test, so that these tests need no cluster.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.chaos.proxy import Answer, Proxy
from tests.conftest import PATIENCE, PATIENT, wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, items, publish, publish_many, release_all

#: The time limit after which the client leaves a silent node, in seconds. It leaves a node that refuses connections at
#: once.
QUICK = {'request_timeout': 5.0}


@pytest.fixture
def nodes(server: Server) -> Iterator[list[Proxy]]:
    with Proxy(server.host, server.port) as first, Proxy(server.host, server.port) as second:
        yield [first, second]


@pytest.fixture
def list_of(server: Server, nodes: list[Proxy]) -> Callable[[str], str]:
    """A function that returns the URLs of a database, one for each node, as one text."""

    def list_of(database: str) -> str:
        url = server.couchdb_url(database)
        return ';'.join(url.replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{node.port}/') for node in nodes)

    return list_of


@pytest.fixture
def connect_to_all(list_of: Callable[[str], str], database: str, client: Client) -> Iterator[Callable[..., Connection]]:
    opened: list[Connection] = []

    def connect(**options: Any) -> Connection:
        opened.append(PatientConnection(list_of(database), transport_options=options))
        return opened[-1]

    yield connect
    release_all(opened)


def test_consumer_keeps_its_messages_when_its_node_fails(
    connect_to_all: Callable[[], Connection], nodes: list[Proxy], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    publish_many(connect_to_all(), range(20))
    inbox = Inbox(connect_to_all(), ack=False, prefetch=10)
    inbox.wait(10)
    nodes[0].refuse()
    held = list(inbox.messages)
    for message in held:
        message.ack()
    assert sorted(inbox.wait(20)) == list(range(20))
    for message in inbox.messages[10:]:
        message.ack()
    inbox.drain_until(lambda: not items(client), 'all messages to be acknowledged')
    assert not [record for record in caplog.records if 'lease' in record.message or 'lost its claim' in record.message]


def test_silent_node_is_replaced_by_the_next(connect_to_all: Callable[..., Connection], nodes: list[Proxy]) -> None:
    inbox = Inbox(connect_to_all(**QUICK))
    publisher = connect_to_all(**QUICK)
    publish(publisher, 'before')
    inbox.wait(1)
    nodes[0].hang()
    publish(publisher, 'meanwhile', retry=True)
    assert inbox.wait(2) == ['before', 'meanwhile']


@pytest.mark.parametrize('trouble', ['silent', 'stored', 'refuses'])
def test_message_that_a_node_does_not_confirm_is_published_once(
    connect_to_all: Callable[..., Connection], nodes: list[Proxy], client: Client, trouble: str
) -> None:
    """The publisher gets no error, so that it has no reason to publish the message again."""
    publisher = connect_to_all(**QUICK)
    publish(publisher, 'before')
    if trouble == 'silent':
        nodes[0].hang()
    elif trouble == 'stored':
        nodes[0].lie(Answer(503, asked=True))
    else:
        nodes[0].refuse()
    publish(publisher, 'meanwhile', retry=False)
    assert [json.loads(doc['message']['body']) for doc in items(client)] == ['before', 'meanwhile']


def test_producer_replaces_a_closed_channel(connect_to_all: Callable[[], Connection]) -> None:
    connection = connect_to_all()
    producer = connection.Producer()
    publish(connection, 'before')
    producer.channel.close()
    producer.publish('after', routing_key='q', serializer='json', retry=True)
    assert Inbox(connect_to_all()).wait(2) == ['before', 'after']


def test_consumer_retries_while_all_nodes_are_down(
    connect_to_all: Callable[[], Connection], nodes: list[Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect_to_all())
    for node in nodes:
        node.refuse()
    inbox.drain_until(
        lambda: [r for r in caplog.records if 'trying again' in r.message], 'the log line about the failure'
    )
    nodes[1].restore()
    publish(connect_to_all(), 'hello')
    assert inbox.wait(1) == ['hello']
    assert all(
        record.levelno <= logging.WARNING for record in caplog.records if record.name.startswith('kombu_couchdb')
    )


def test_results_are_stored_and_awaited_on_another_node(
    list_of: Callable[[str], str], nodes: list[Proxy], database: str, client: Client
) -> None:
    app = Celery(set_as_current=False, broker='memory://', backend=list_of(database))
    app.conf.result_backend_transport_options = PATIENT
    app.backend.mark_as_done('a', 1)
    waiting = app.AsyncResult('b')
    heard: list[object] = []
    waiting.then(lambda result: heard.append(result.result))
    nodes[0].refuse()
    app.backend.mark_as_done('b', 2)
    assert app.AsyncResult('a').get(timeout=PATIENCE) == 1
    assert waiting.get(timeout=PATIENCE) == 2
    wait_for(lambda: heard == [2], 'the callback')
    app.close()
