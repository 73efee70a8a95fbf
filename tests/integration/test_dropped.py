"""Connections that are dropped, and those that consume no more: what they held comes back, and nothing of them stays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from celery import Celery
from celery.app.control import Control
from kombu import Connection, Exchange, Queue

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import CONSUMER
from tests.conftest import PATIENCE, PATIENT_BROKER, wait_for
from tests.support import Inbox, Request, items, publish, publish_many

needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that have nothing to do retire at once."""
    monkeypatch.setattr('kombu_couchdb.consumer.io_thread._IDLE_SECONDS', 0.1)


@contextmanager
def leaves_nothing(client: Client, *, files: int = 0) -> Iterator[None]:
    """Wait until threads, heartbeats and open files are as before, but for so many files."""
    gc.collect()
    process = psutil.Process()
    threads, opened = set(threading.enumerate()), process.num_fds()
    yield
    wait_for(
        lambda: gc.collect() is not None and not {thread for thread in threading.enumerate() if thread not in threads},
        'the end of the threads',
    )
    wait_for(lambda: not client.id_range(CONSUMER), 'the end of the heartbeats')
    wait_for(lambda: gc.collect() is not None and process.num_fds() <= opened + files, 'the end of the connections')


def connection_to(url: str) -> Connection:
    return Connection(url, transport_options={**PATIENT_BROKER})


def claimed(client: Client) -> int:
    return sum(bool(item['claimed']) for item in items(client))


def test_dropped_connection_leaves_nothing(url: str, client: Client) -> None:
    with connection_to(url) as publisher:
        publish_many(publisher, range(10))
    with leaves_nothing(client):
        inbox = Inbox(connection_to(url), ack=False, prefetch=10)
        inbox.wait(3)
        wait_for(lambda: claimed(client) == 10, 'all to be claimed')
        del inbox
    # The lease was ended: nobody had to wait for that.
    assert claimed(client) == 0
    with connection_to(url) as connection:
        assert sorted(Inbox(connection).wait(10)) == list(range(10))


def test_connection_that_only_publishes_is_dropped(url: str, client: Client) -> None:
    with leaves_nothing(client):
        publish(connection_to(url), 'hello')


def test_connection_that_is_dropped_while_the_server_is_away(
    url: str, client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    inbox = Inbox(Connection(url, transport_options={'request_timeout': 1.0, 'connect_timeout': 1.0}))
    wait_for(lambda: client.id_range(CONSUMER), 'the heartbeat')
    transport = inbox.connection.transport
    for node in transport.couchdb._nodes._nodes:
        monkeypatch.setattr(node, 'address', node.address.__class__(host='127.0.0.1', port=1))
    del inbox, transport, node
    wait_for(lambda: gc.collect() is not None and set(threading.enumerate()) <= before, 'the end of the threads')


@needs_fork
def test_child_that_drops_its_copy_ends_nothing_of_its_parent_s(
    connect: Callable[..., Connection], client: Client
) -> None:
    inbox = Inbox(connect())
    publish(connect(), 'before')
    inbox.wait(1)
    pid = os.fork()
    if pid == 0:
        try:
            inbox.connection.transport._abandon()  # as its collection does
            consumer = inbox.connection.transport._consumer
            os._exit(0 if consumer is not None and not consumer._abandoned else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    publish(connect(), 'after')
    assert inbox.wait(2) == ['before', 'after']


# -- nothing to do


def test_ping_through_an_app_s_pool_leaves_nothing(app: Celery, client: Client, soon: None) -> None:
    control: Control = app.control
    with leaves_nothing(client, files=2 + 16):  # the pool keeps the connection, with its idle requests
        assert control.inspect(timeout=0.2).ping() is None
        assert len(client.id_range(CONSUMER)) <= 1
    assert control.inspect(timeout=0.2).ping() is None


def test_consumer_that_has_retired_is_followed_by_another(connection: Connection, client: Client, soon: None) -> None:
    for number in range(3):
        with connection.SimpleQueue('q') as simple:
            simple.put(number)
            message = simple.get(timeout=PATIENCE)
            assert message.payload == number
            message.ack()
        wait_for(lambda: not client.id_range(CONSUMER), 'the end of the lease')
        assert not items(client)
    publish(connection, 'pulled')
    message = connection.default_channel.basic_get('q')
    assert message.payload == 'pulled'
    threading.Event().wait(0.5)  # it holds a message, and so it does not retire, however long that takes
    assert claimed(client) == 1
    message.ack()
    wait_for(lambda: not client.id_range(CONSUMER), 'the end of the lease')
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)


def test_subscribed_consumer_does_not_retire(
    connection: Connection, client: Client, soon: None, sent: list[Request]
) -> None:
    inbox = Inbox(connection)
    wait_for(lambda: client.id_range(CONSUMER), 'the heartbeat')
    inbox.stays(0, 0.5)
    assert len(client.id_range(CONSUMER)) == 1
    publish(connection, 'hello')
    assert inbox.wait(1) == ['hello']


def test_broadcasts_for_a_queue_that_nobody_consumes_just_now_are_kept(
    connect: Callable[..., Connection], client: Client, soon: None
) -> None:
    news = Exchange('news', type='fanout')
    inbox = Inbox(connect(), Queue('listener', news))
    wait_for(lambda: client.id_range(CONSUMER), 'the heartbeat')
    inbox.consumer.cancel()
    threading.Event().wait(0.5)
    connect().Producer().publish('kept', exchange=news, serializer='json', declare=[news])
    transport: Any = inbox.connection.transport
    wait_for(lambda: transport.unacked._waiting_broadcasts, 'the broadcast')
    inbox.consumer.consume()
    assert inbox.wait(1) == ['kept']


def test_consumers_that_come_and_go_lose_nothing(
    connection: Connection, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes while a consumer retires gets the next one."""
    monkeypatch.setattr('kombu_couchdb.consumer.io_thread._IDLE_SECONDS', 0.0)
    channel = connection.channel()
    for number in range(30):
        publish(connection, number)
        message = None
        while message is None:
            message = channel.basic_get('q')
        assert message.payload == number
        message.ack()
    wait_for(lambda: not items(client), 'the acknowledgements')
