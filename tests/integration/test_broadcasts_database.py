"""The broadcasts database: who creates it, what happens without it, and the notices in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from celery_couchdb.testing import Server
from kombu_couchdb.admin import queues
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import BROADCAST, NOTICE
from kombu_couchdb.errors import DatabaseMissing, NotFound
from kombu_couchdb.fleet import coordination, notifier
from kombu_couchdb.fleet.notifier import Notifier
from kombu_couchdb.queues import databases
from kombu_couchdb.queues.databases import BroadcastsDatabase
from tests.conftest import wait_for
from tests.support import Inbox, publish, release_all

from .conftest import Connect

NEWS = Exchange('news', type='fanout')


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
    assert warnings(caplog) == [warning, 'the database of broadcasts is used again']


def test_broadcasts_of_a_member_who_may_not_use_the_database_arrive(
    connect: Connect, connect_as: Connect, broadcasts: Client, caplog: pytest.LogCaptureFixture, impatient: None
) -> None:
    broadcasts.create()
    inboxes = [wait_until_followed(listen(connect(), 'of an administrator')), listen(connect_as(), 'of a member')]
    broadcast(connect_as(), 'hello')
    for inbox in inboxes:
        assert inbox.wait(1) == ['hello']
    assert 'the database of broadcasts cannot be used' in caplog.text


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


def test_changes_that_all_consumers_must_know_are_noticed(connect: Connect, client: Client, broadcasts: Client) -> None:
    channel = connect().channel()
    for queue in (Queue('work'), Queue('unused', Exchange('old', type='fanout')), Queue('gone')):
        queue(channel).declare()
    queues.pause(client, 'paused')
    BroadcastsDatabase(client, create=True).stored()
    changes: dict[str, Callable[[], object]] = {
        'pause': lambda: queues.pause(client, 'work'),
        'resume': lambda: queues.resume(client, 'paused'),
        'new limit': lambda: Queue('unused', max_length=5)(channel).declare(),
        'new queue with a limit': lambda: Queue('new', max_length=5)(channel).declare(),
        'binding': lambda: Queue('work', Exchange('direct'), 'k')(channel).declare(),
        'binding for events': lambda: Queue('monitor', Exchange('events', type='topic'), '#')(channel).declare(),
        'fanout exchange': lambda: NEWS(channel).declare(),
        'deleted exchange': lambda: Exchange('old', type='fanout')(channel).delete(),
        'queue deleted by a channel': lambda: Queue('gone')(channel).delete(),
        'queue deleted by an operator': lambda: sum(queues.deleting(client, 'unused')),
    }
    for name, change in changes.items():
        before = broadcasts.get(NOTICE)
        change()
        assert broadcasts.get(NOTICE) != before, name
    # Nobody but those who are asked for a reply needs a reply queue.
    before = broadcasts.get(NOTICE)
    reply = Queue('reply', Exchange('replies'), 'oid', auto_delete=True, message_ttl=300)
    reply(channel).declare()
    reply(channel).delete()
    assert broadcasts.get(NOTICE) == before


def test_pauses_and_limits_are_known_without_the_feed_of_the_broker(
    connect: Connect, client: Client, broadcasts: Client, resting: None
) -> None:
    """The changes are written as other processes do: connections of one process share what they know."""
    inbox = wait_until_followed(listen(connect()))
    topology = inbox.connection.transport.topology
    queues.pause(client, 'work')
    inbox.drain_until(lambda: topology.paused == {'work'}, 'the pause')
    queues.resume(client, 'work')
    inbox.drain_until(lambda: not topology.paused, 'the end of the pause')
    [queue] = topology.queues(['work'])
    client.put({**queue, 'arguments': {'x-max-length': 7}})
    BroadcastsDatabase(client).notify()
    inbox.drain_until(lambda: topology.known.limit('work').length == 7, 'the limit')
