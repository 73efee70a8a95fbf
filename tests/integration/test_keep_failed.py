"""Messages of tasks that failed, which are kept as dead letters: in how many writes, for how long, and how many."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection
from kombu.message import Message

from kombu_couchdb import design
from kombu_couchdb.admin import dead
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.leases import sweeper
from kombu_couchdb.queues.store import Store
from kombu_couchdb.queues.topology import Topology
from tests.conftest import wait_for
from tests.support import Inbox, Request, items, publish

from .conftest import Connect

ERROR: Any = {'type': 'ValueError', 'text': 'no\nmoney', 'traceback': 'lines', 'worker': 'w@1', 'retries': 2}

WEEK = 7 * 86_400.0

MESSAGE: dict[str, Any] = {'body': 'x', 'headers': {}, 'properties': {'priority': 0}}


def received(connection: Connection, body: Any = 'x', **properties: Any) -> Message:
    """Publish a message, and receive it."""
    publish(connection, body, **properties)
    inbox = Inbox(connection, ack=False)
    inbox.wait(1)
    return inbox.messages[0]


def letters(client: Client, number: int = 1) -> list[dict[str, Any]]:
    """Wait for dead letters alone."""

    def found() -> list[dict[str, Any]]:
        docs = items(client)
        return docs if len(docs) == number and all(doc.get('status') for doc in docs) else []

    return wait_for(found, 'the dead letters')


def writes(requests: list[Request]) -> int:
    """Return how many documents were written, without heartbeats."""
    return sum(doc.get('type') != 'Consumer' for request in requests for doc in request.docs)


def test_failure_is_stored_in_the_write_that_would_have_deleted_the_message(
    connect: Connect, client: Client, sent: list[Request]
) -> None:
    message = received(connect())
    sent.clear()
    message.fail(ERROR, acknowledged=False)
    message.ack()
    [doc] = letters(client)
    assert writes(sent) == 1
    assert (doc['reason'], doc['error'], doc['claimed']) == ('failed: ValueError: no money', ERROR, None)
    assert doc['expires'] == doc['failed'] + WEEK
    assert doc['message']['body'] == '"x"'


def test_success_writes_its_deletion_alone(connect: Connect, client: Client, sent: list[Request]) -> None:
    message = received(connect())
    sent.clear()
    message.ack()
    wait_for(lambda: not items(client), 'the ack')
    assert writes(sent) == 1


@pytest.mark.parametrize('options', [{}, {'keep_done': 3600.0}], ids=str)
@pytest.mark.parametrize('body', ['x', 'x' * 50_000], ids=len)
def test_failure_of_a_message_that_was_acknowledged_early_is_one_write_more(
    connect: Connect, client: Client, sent: list[Request], body: str, options: dict[str, Any]
) -> None:
    message = received(connect(**options), body)
    sent.clear()
    message.ack()
    message.fail(ERROR, acknowledged=True)
    [doc] = letters(client)
    assert writes(sent) == 2
    assert doc['error'] == ERROR
    [replayed], refused = dead.replay(client, [doc])
    assert refused == {}
    inbox = Inbox(connect(), ack=False)
    assert inbox.wait(1) == [body]
    # It fails again: that is another failure of the same message.
    inbox.messages[0].ack()
    inbox.messages[0].fail(ERROR, acknowledged=True)
    wait_for(lambda: [doc['_id'] for doc in items(client)] not in ([], [replayed['_id']]), 'the second failure')


def test_failure_that_is_noted_twice_is_kept_once(connect: Connect, client: Client) -> None:
    message = received(connection := connect())
    message.ack()
    for _ in range(3):
        message.fail(ERROR, acknowledged=True)
    connection.release()
    assert len(letters(client)) == 1


def test_requeued_message_is_no_failure(connect: Connect, client: Client) -> None:
    message = received(connect())
    message.fail(ERROR, acknowledged=False)
    message.reject(requeue=True)
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.messages[0].ack()
    wait_for(lambda: not items(client), 'the second delivery to be acknowledged')


def test_rejected_message_of_a_failed_task_has_its_error(connect: Connect, client: Client) -> None:
    message = received(connect())
    message.fail(ERROR, acknowledged=False)
    message.reject()
    [doc] = letters(client)
    assert dead_letter.error_type(doc) == 'ValueError'


def test_nothing_is_kept_with_keep_failed_0(connect: Connect, client: Client) -> None:
    connection = connect(keep_failed=0)
    message = received(connection)
    message.fail(ERROR, acknowledged=False)
    message.ack()
    wait_for(lambda: not items(client), 'the ack')
    message.fail(ERROR, acknowledged=True)
    connection.release()
    assert items(client) == []


def test_failure_after_the_consumer_has_stopped_is_kept(connect: Connect, client: Client) -> None:
    """As in a warm shutdown, which cancels the subscriptions and waits for the tasks that run."""
    connection = connect()
    message = received(connection)
    message.ack()
    wait_for(lambda: not items(client), 'the ack')
    message.channel.basic_cancel(next(iter(message.channel._consumers)))
    transport = message.channel.connection
    wait_for(lambda: transport.unacked.retired or not transport.unacked.busy, 'the I/O thread to have no work')
    message.fail(ERROR, acknowledged=True)
    letters(client)


def test_failures_expire_and_other_dead_letters_stay(connect: Connect, client: Client) -> None:
    connect().connect()
    now = client.clock.now()
    for name, seconds in (('old', -1.0), ('young', 60.0), ('job:["q","t","k"]', -1.0)):
        item = workitem.new(name, 'q', MESSAGE, now)
        client.put(dead_letter.failed({**item, '_id': name}, ERROR, seconds, now))
    client.put({**dead_letter.made_of(workitem.new('rejected', 'q', MESSAGE, now), 'rejected', now), 'expires': 1.0})
    assert [stats['count'] for stats in Store(client).leases()['failed'].values()] == [3]
    assert Store(client).drop_expired() == 2
    assert {doc['_id'] for doc in items(client)} == {'young', 'rejected'}


def test_oldest_failures_go_if_there_are_too_many(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, '_MAX_FAILED', 2)
    for number in range(5):
        item = workitem.new(f'm{number}', 'q', MESSAGE, 1.0)
        client.put(dead_letter.failed(item, ERROR, WEEK, client.clock.now() + number))
    client.put(dead_letter.made_of(workitem.new('rejected', 'q', MESSAGE, 1.0), 'rejected', 1.0))
    Inbox(connect(visibility_timeout=1.0, request_timeout=0.9, connect_timeout=0.9)).drain(0.1)
    wait_for(lambda: {doc['_id'] for doc in items(client)} == {'m3', 'm4', 'rejected'}, 'a sweep')


def test_index_of_failures_is_updated_before_somebody_looks(
    client: Client, connect: Connect, apache_couchdb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server updates an index whenever it is read')
    message = received(connect())
    message.fail(ERROR, acknowledged=False)
    message.ack()
    letters(client)

    def rows() -> list[Any]:
        return client.view(design.JOBS, 'failures', reduce=False, update='false')

    assert not rows()
    monkeypatch.setattr(sweeper, '_CLEAN_UP_INTERVAL_SECONDS', 0.0)
    sweeper.Sweeper(Store(client), Topology(client), 60.0).sweep('broker:consumer:own', set(), lambda: None)
    wait_for(rows, 'the index')
