"""Garbage-collected and idle connections: messages are released, and threads, leases and files are freed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from celery import Celery
from celery.app.control import Control
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import CONSUMER
from tests.conftest import PATIENCE, PATIENT_BROKER, wait_for
from tests.support import Inbox, items, publish, publish_many, run_python

from .conftest import Connect

needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let idle consumers retire at once."""
    monkeypatch.setattr('kombu_couchdb.consumer.io_thread._IDLE_SECONDS', 0.1)


@contextmanager
def frees_resources(client: Client, *, files: int = 0) -> Iterator[None]:
    """Afterwards, wait until no thread, no heartbeat and at most `files` open files are left."""
    gc.collect()
    process = psutil.Process()
    threads, opened = set(threading.enumerate()), process.num_fds()
    yield
    wait_for(
        lambda: gc.collect() is not None and not {thread for thread in threading.enumerate() if thread not in threads},
        'the threads to end',
    )
    wait_for(lambda: not client.id_range(CONSUMER), 'the heartbeats to be deleted')
    wait_for(lambda: gc.collect() is not None and process.num_fds() <= opened + files, 'the connections to be closed')


def connection_to(url: str) -> Connection:
    return Connection(url, transport_options={**PATIENT_BROKER})


def claimed(client: Client) -> int:
    return sum(bool(item['claimed']) for item in items(client))


def test_garbage_collected_connection_frees_its_resources(url: str, client: Client) -> None:
    with connection_to(url) as publisher:
        publish_many(publisher, range(10))
    with frees_resources(client):
        inbox = Inbox(connection_to(url), ack=False, prefetch=10)
        inbox.wait(3)
        wait_for(lambda: claimed(client) == 10, 'all messages to be claimed')
        del inbox
    # The connection released its messages: no other consumer had to wait for the end of the lease.
    assert claimed(client) == 0
    with connection_to(url) as connection:
        assert sorted(Inbox(connection).wait(10)) == list(range(10))


def test_connection_is_garbage_collected_during_an_outage(
    url: str, client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    inbox = Inbox(Connection(url, transport_options={'request_timeout': 1.0, 'connect_timeout': 1.0}))
    wait_for(lambda: client.id_range(CONSUMER), 'the heartbeat')
    transport = inbox.connection.transport
    for connections in transport.couchdb._connections:
        monkeypatch.setattr(connections, 'url', 'http://127.0.0.1:1')
    del inbox, transport, connections
    wait_for(lambda: gc.collect() is not None and set(threading.enumerate()) <= before, 'the threads to end')


@needs_fork
def test_forked_child_does_not_end_the_consumer_of_its_parent(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect())
    publish(connect(), 'before')
    inbox.wait(1)
    pid = os.fork()
    if pid == 0:
        try:
            inbox.connection.transport._abandon()  # as garbage collection does
            consumer = inbox.connection.transport._consumer
            os._exit(0 if consumer is not None and not consumer._abandoned else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    publish(connect(), 'after')
    assert inbox.wait(2) == ['before', 'after']


#: A program with a consumer, a worker's result queue and their sockets, which forks as `celery worker --beat` does: the
#: child closes all descriptors and opens other files, which get the same numbers. It prints which of them are closed
#: when what it inherited is garbage.
FORKS = """
import gc, os, sys
from celery import Celery
from celery.platforms import close_open_fds

url = os.environ['URL']
app = Celery('forks', broker=url, backend=url + '-results')
app.backend.handover.open(serve_children=True)
connection = app.connection_for_read()
unused = app.connection_for_read().transport
queue = connection.SimpleQueue('q')
queue.put('before')
assert queue.get(timeout=30).payload == 'before'
gc.disable()
reading, writing = os.pipe()
if not os.fork():
    os.dup2(writing, 300)
    close_open_fds([300])
    files = [open(os.devnull) for _ in range(250)]
    del connection, queue, unused
    gc.collect()
    closed = []
    for file in files:
        try:
            os.fstat(file.fileno())
        except OSError:
            closed.append(file.fileno())
    os.write(300, repr(closed).encode())
    os._exit(0)
os.close(writing)
print(os.read(reading, 10_000).decode())
queue.put('after')
assert queue.get(timeout=30).payload == 'after'
connection.close()
app.backend.handover.close()
"""


@needs_fork
@pytest.mark.parametrize('pool', ['', 'import gevent.monkey; gevent.monkey.patch_all()'], ids=['threads', 'gevent'])
def test_forked_child_closes_only_files_of_its_own(url: str, client: Client, pool: str) -> None:
    code = FORKS if not pool else pool + FORKS.replace('close_open_fds([300])', 'pass')  # gevent needs its descriptors
    assert run_python(code, URL=url).stdout.splitlines()[-1] == '[]'


@pytest.mark.parametrize(
    'use',
    [
        pytest.param('queue.put(1)', id='publisher'),
        pytest.param('queue.put(1); queue.get(timeout=30).ack()', id='consumer'),
        pytest.param('queue.put(1); queue.get(timeout=30).ack(); queue.close(); wait(); del queue', id='idle'),
        pytest.param('queue.put(1); queue.get(timeout=30).ack(); queue.close(); wait(); drop()', id='dropped'),
    ],
)
def test_program_that_closes_nothing_leaves_no_socket_to_the_garbage_collector(
    url: str, client: Client, use: str
) -> None:
    code = f"""
import gc, os, time, kombu_couchdb
from kombu import Connection
from kombu_couchdb.consumer import io_thread

def wait():
    while not connection.transport.unacked.retired:
        time.sleep(0.01)

def drop():
    global connection, queue
    del connection, queue
    gc.collect()

io_thread._IDLE_SECONDS = 0.1
connection = Connection(os.environ['URL'])
queue = connection.SimpleQueue('q')
{use}
"""
    assert 'ResourceWarning' not in run_python(code, URL=url, PYTHONDEVMODE='1').stderr


# -- idle consumers


def test_ping_frees_all_resources(app: Celery, client: Client, soon: None) -> None:
    control: Control = app.control
    with frees_resources(client, files=2 + 16):  # the pool keeps the connection, with idle HTTP connections
        assert control.inspect(timeout=0.2).ping() is None
        assert len(client.id_range(CONSUMER)) <= 1
    assert control.inspect(timeout=0.2).ping() is None


def test_idle_consumer_retires_and_is_replaced_when_needed(connection: Connection, client: Client, soon: None) -> None:
    for number in range(3):
        with connection.SimpleQueue('q') as simple:
            simple.put(number)
            message = simple.get(timeout=PATIENCE)
            assert message.payload == number
            message.ack()
        wait_for(lambda: not client.id_range(CONSUMER), 'the lease to end')
        assert not items(client)
    publish(connection, 'pulled')
    message = connection.default_channel.basic_get('q')
    assert message.payload == 'pulled'
    threading.Event().wait(0.5)  # the consumer holds a message, so that it never retires
    assert claimed(client) == 1
    message.ack()
    wait_for(lambda: not client.id_range(CONSUMER), 'the lease to end')
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.01)


def test_retiring_consumers_lose_no_message(
    connection: Connection, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that arrives while a consumer retires uses a new consumer."""
    monkeypatch.setattr('kombu_couchdb.consumer.io_thread._IDLE_SECONDS', 0.0)
    channel = connection.channel()
    for number in range(10):
        publish(connection, number)
        message = None
        while message is None:
            message = channel.basic_get('q')
        assert message.payload == number
        message.ack()
    wait_for(lambda: not items(client), 'the acks')
