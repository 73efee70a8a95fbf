"""The broadcasts database: who creates it, what happens without it, and the notices in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from kombu.pidbox import Mailbox

from celery_couchdb.testing import Server
from kombu_couchdb.admin import queues
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import BROADCAST, NOTICE
from kombu_couchdb.errors import DatabaseMissing, NotFound
from kombu_couchdb.fleet import coordination, notifier
from kombu_couchdb.fleet.attention import Attention
from kombu_couchdb.fleet.notifier import Notifier
from kombu_couchdb.queues import databases
from kombu_couchdb.queues.databases import BroadcastsDatabase
from kombu_couchdb.queues.routing import binding_id
from kombu_couchdb.queues.topology import Topology
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, publish, release_all

NEWS = Exchange('news', type='fanout')
EVENTS = Exchange('events', type='topic')

Connect = Callable[..., Connection]


def listen(connection: Connection, queue: str = 'listener') -> Inbox:
    return Inbox(connection, Queue(queue, NEWS, auto_delete=True), Queue('work'))


def broadcast(connection: Connection, body: object) -> None:
    connection.Producer().publish(body, exchange=NEWS, routing_key='', serializer='json', declare=[NEWS])


def feed_of(inbox: Inbox) -> Any:
    return inbox.connection.transport.consumer._cycle.notifier.broadcasts


def wait_until_followed(inbox: Inbox) -> Inbox:
    inbox.drain_until(lambda: feed_of(inbox).is_followed, 'the feed of the broadcasts database')
    return inbox


def stored(client: Client) -> int:
    return len(client.id_range(BROADCAST))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes look soon again for a database that was missing or locked, and for broadcasts elsewhere."""
    monkeypatch.setattr(databases, 'LOOK_SECONDS', 0.5)
    monkeypatch.setattr(notifier, '_RETRY_SECONDS', 0.5)
    monkeypatch.setattr(notifier, '_DISTRUST_SECONDS', 0.5)
    monkeypatch.setattr(coordination, '_ALL_SECONDS', (1.0, 0.0))


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers never follow the feed of the broker's database, and have no safety net."""
    monkeypatch.setattr(Notifier, '_follow_feed', lambda *args: [])
    monkeypatch.setattr(coordination, '_ALL_SECONDS', (1000.0, 0.0))


@pytest.fixture
def connect_as(server: Server, database: str, member: dict[str, str], client: Client) -> Iterator[Connect]:
    """A function that connects as a member of the broker's database."""
    opened: list[Connection] = []
    client.request('PUT', '/_security', body={'members': {'names': [member['user']], 'roles': ['_admin']}})
    Connection(server.couchdb_url(database)).ensure_connection()  # an administrator sets the database up

    def connect(**options: Any) -> Connection:
        url = server.couchdb_url(database, member['user'], member['password'])
        opened.append(Connection(url, transport_options=options))
        return opened[-1]

    yield connect
    release_all(opened)


# -- with and without the database


def test_publisher_of_tasks_creates_no_database_of_broadcasts(connect: Connect, broadcasts: Client) -> None:
    publish(connect(), 'hello')
    with pytest.raises(DatabaseMissing):
        broadcasts.info()


def test_database_is_open_to_the_same_users_as_the_database_of_the_broker(
    connect: Connect, client: Client, broadcasts: Client, connect_as: Connect
) -> None:
    broadcast(connect(), 'before')
    assert broadcasts.request('GET', '/_security') == client.request('GET', '/_security')
    inbox = wait_until_followed(listen(connect_as()))
    broadcast(connect_as(), 'hello')
    assert inbox.wait(1) == ['hello']
    assert stored(client) == 0


def test_broadcasts_use_the_database_of_the_broker_until_there_is_another(
    connect: Connect, client: Client, broadcasts: Client, caplog: pytest.LogCaptureFixture, impatient: None
) -> None:
    connect().ensure_connection()
    inbox, publisher = listen(connect(create_database=False)), connect(create_database=False)
    broadcast(publisher, 'one')
    assert inbox.wait(1) == ['one']
    assert not feed_of(inbox).is_followed
    [warning] = warnings(caplog)
    assert 'the database of broadcasts cannot be used' in warning
    assert stored(client) == 1
    broadcasts.create()
    wait_until_followed(inbox)

    def sent() -> int:
        broadcast(publisher, 'two')
        return stored(broadcasts)

    wait_for(sent, 'the publisher to use the database')
    inbox.drain_until(lambda: 'two' in inbox.bodies, 'the broadcast')
    assert len(warnings(caplog)) == 1


def test_member_who_may_not_create_the_database_uses_that_of_the_broker(
    connect_as: Connect, client: Client, broadcasts: Client, caplog: pytest.LogCaptureFixture
) -> None:
    inbox, publisher = listen(connect_as()), connect_as()
    for number in range(3):
        broadcast(publisher, number)
    assert inbox.wait(3) == [0, 1, 2]
    assert len(warnings(caplog)) == 1
    assert stored(client) == 3
    with pytest.raises(DatabaseMissing):
        broadcasts.info()


def test_database_that_members_may_not_read_is_not_used(
    connect_as: Connect, client: Client, broadcasts: Client, caplog: pytest.LogCaptureFixture, impatient: None
) -> None:
    broadcasts.create()
    inbox, publisher = listen(connect_as()), connect_as()
    broadcast(publisher, 'one')
    assert inbox.wait(1) == ['one']
    assert len(warnings(caplog)) == 1
    broadcasts.request('PUT', '/_security', body=client.request('GET', '/_security'))
    wait_until_followed(inbox)
    broadcast(publisher, 'two')
    assert inbox.wait(2) == ['one', 'two']


def test_read_only_database_delays_broadcasts_once(
    connect_as: Connect, connect: Connect, client: Client, broadcasts: Client, impatient: None
) -> None:
    broadcast(connect(), 'before')
    lock = 'function (doc, old, context) { if (context.roles.indexOf("_admin") < 0) throw {forbidden: "read-only"}; }'
    broadcasts.put({'_id': '_design/lock', 'validate_doc_update': lock})
    inbox, publisher = wait_until_followed(listen(connect_as())), connect_as()
    broadcast(publisher, 'one')
    assert inbox.wait(1) == ['one']
    assert stored(client) == 1
    # Now it knows that there are publishers who cannot use the database.
    inbox.drain_until(lambda: not feed_of(inbox).is_followed, 'the consumer to poll the database of the broker')
    broadcast(publisher, 'two')
    assert inbox.wait(2) == ['one', 'two']


def test_database_that_is_deleted_is_created_again(
    connect: Connect, broadcasts: Client, caplog: pytest.LogCaptureFixture, impatient: None
) -> None:
    inbox, publisher = wait_until_followed(listen(connect())), connect()
    broadcast(publisher, 'one')
    inbox.wait(1)
    broadcasts.delete()
    again_at = time.monotonic() + 5.0

    def is_noticed() -> bool:
        nonlocal again_at
        if 'broadcasts that were not read yet are lost' in caplog.text:
            return True
        if time.monotonic() > again_at:  # the embedded server may create it anew for a request of before the deletion
            again_at += 5.0
            with suppress(DatabaseMissing, NotFound):
                broadcasts.delete()
        return False

    inbox.drain_until(is_noticed, 'the log line')
    wait_until_followed(inbox)
    broadcast(publisher, 'two')
    assert inbox.wait(2) == ['one', 'two']
    assert stored(broadcasts) == 1


# -- notices


CHANGES: dict[str, Callable[[Connection, Client], object]] = {
    'pause': lambda connection, client: queues.pause(client, 'work'),
    'resume': lambda connection, client: queues.resume(client, 'paused'),
    'delete': lambda connection, client: queues.delete(client, 'unused'),
    'new limit': lambda connection, client: Queue('unused', max_length=5)(connection.channel()).declare(),
    'new queue with a limit': lambda connection, client: Queue('new', max_length=5)(connection.channel()).declare(),
    'binding': lambda connection, client: Queue('work', Exchange('direct'), 'k')(connection.channel()).declare(),
    'binding for events': lambda connection, client: Queue('monitor', EVENTS, '#', auto_delete=True)(
        connection.channel()
    ).declare(),
    'fanout exchange': lambda connection, client: NEWS(connection.channel()).declare(),
    'deleted exchange': lambda connection, client: Exchange('old', type='fanout')(connection.channel()).delete(),
    'deleted queue': lambda connection, client: Queue('unused')(connection.channel()).delete(),
}


@pytest.mark.parametrize('change', CHANGES)
def test_change_that_all_consumers_must_know_is_noticed(
    connect: Connect, client: Client, broadcasts: Client, change: str
) -> None:
    connection = connect()
    for queue in (Queue('work'), Queue('unused', Exchange('old', type='fanout'))):
        queue(connection.channel()).declare()
    queues.pause(client, 'paused')
    BroadcastsDatabase(client, create=True).stored()
    before = broadcasts.get(NOTICE)
    CHANGES[change](connection, client)
    after = broadcasts.get(NOTICE)
    assert after != before
    # Nobody but those who are asked for a reply needs a reply queue.
    reply = Queue('reply', Exchange('replies'), 'oid', auto_delete=True, message_ttl=300)
    reply(connection.channel()).declare()
    reply(connection.channel()).delete()
    assert broadcasts.get(NOTICE) == after


def test_pause_and_limits_and_bindings_are_known_without_the_feed_of_the_broker(
    connect: Connect, client: Client, broadcasts: Client, resting: None
) -> None:
    """The changes are written as other processes do: connections of one process share what they know."""
    inbox = wait_until_followed(listen(connect()))
    topology = inbox.connection.transport.topology
    assert topology.lookup('events', 'a.b', recheck=False) == set()
    notices = BroadcastsDatabase(client)
    queues.pause(client, 'work')
    inbox.drain_until(lambda: topology.paused == {'work'}, 'the pause')
    queues.resume(client, 'work')
    inbox.drain_until(lambda: not topology.paused, 'the end of the pause')
    [queue] = topology.queues(['work'])
    client.put({**queue, 'arguments': {'x-max-length': 7}})
    client.put(
        {
            '_id': binding_id('events', 'a.#', 'monitor'),
            'type': 'Binding',
            'exchange': 'events',
            'routing_key': 'a.#',
            'pattern': 'any',
            'queue': 'monitor',
            'temporary': None,
        }
    )
    assert topology.lookup('events', 'a.b', recheck=False) == set()
    notices.notify()
    inbox.drain_until(lambda: topology.limits.of('work').length == 7, 'the limit')
    assert topology.lookup('events', 'a.b', recheck=False) == {'monitor'}


def test_bells_name_their_queues(connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(Attention, 'heard', lambda self, queue: heard.append(queue))
    inbox = wait_until_followed(listen(connect()))
    bells = BroadcastsDatabase(client)
    for number, queue in enumerate(('work', 'other', 'work'), 1):
        bells.ring(queue)
        inbox.drain_until(partial(rings, number, heard), 'the bell')
    assert heard == ['work', 'other', 'work']


def rings(number: int, heard: list[str]) -> bool:
    return len(heard) == number


# -- remote control and events


@pytest.fixture
def read_bindings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The exchanges whose bindings were read by a lookup, in order."""
    read: list[str] = []
    bindings = Topology.bindings

    def recorded(self: Topology, exchange: str) -> Any:
        read.append(exchange)
        return bindings(self, exchange)

    monkeypatch.setattr(Topology, 'bindings', recorded)
    return read


def test_reply_needs_no_read_of_its_binding(connect: Connect, client: Client, read_bindings: list[str]) -> None:
    app, worker = connect(), connect()
    mailbox = Mailbox('celery', type='fanout', accept=['json'])
    node = mailbox(worker).Node('worker@here', channel=worker.default_channel, handlers={'ping': lambda state: 'pong'})
    node.listen(channel=worker.default_channel)
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            with suppress(TimeoutError):
                worker.drain_events(timeout=0.1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert mailbox(app).call(['worker@here'], 'ping', timeout=PATIENCE) == [{'worker@here': 'pong'}]
    finally:
        done.set()
        thread.join()
    assert read_bindings == []


def test_events_need_no_read_of_bindings(
    connect: Connect, client: Client, read_bindings: list[str], resting: None
) -> None:
    topology = wait_until_followed(listen(connect())).connection.transport.topology

    def reads() -> list[str]:
        time.sleep(0.1)  # longer than bindings that were read are trusted
        read_bindings.clear()
        assert [topology.lookup('events', 'a', recheck=False) for _ in range(5)] == [set()] * 5
        return list(read_bindings)

    wait_for(lambda: not reads(), 'lookups that read nothing')
