"""Paused queues: consumers claim nothing from them, and everything else goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_couchdb.admin import queues
from kombu_couchdb.admin.status import status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError, QueuePaused
from kombu_couchdb.leases import lease
from kombu_couchdb.queues import store
from tests.conftest import wait_for
from tests.support import Inbox, Request, eta, items, leave_leaf, publish, publish_many, record_requests

Connect = Callable[..., Connection]


def knows(connection: Connection, *names: str) -> None:
    """Wait until the consumer of a connection knows that exactly these queues are paused."""
    wait_for(lambda: connection.transport.topology.paused == set(names), f'the consumer to know of {names}')


def learns(connection: Connection, queue: str, *, refuses: bool) -> None:
    """Wait until a program knows or asks whether a queue refuses new messages."""

    def knows_or_asks() -> bool:
        pause = connection.transport.topology.known.pause(queue)
        return pause is None or pause.get('refuse', False) == refuses

    wait_for(knows_or_asks, f'the program to learn of the pause of {queue}')


def claimed(client: Client) -> list[Any]:
    return [item['message']['body'] for item in items(client) if item['claimed']]


@pytest.fixture
def inbox(connect: Connect, client: Client) -> Inbox:
    """An idle consumer of the queues `q` and `other`."""
    inbox = Inbox(connect(), 'q', 'other')
    publish(connect(), 'first')
    inbox.wait(1)
    return inbox


def test_idle_consumer_claims_nothing_until_the_queue_is_resumed(
    inbox: Inbox, connect: Connect, client: Client
) -> None:
    assert queues.pause(client, 'q')
    knows(inbox.connection, 'q')
    publish(connect(), 'waits')
    publish(connect(), 'passes', 'other')
    assert inbox.wait(2) == ['first', 'passes']
    inbox.stays(2, 0.3)
    assert [item['claimed'] for item in items(client)] == [None]
    assert queues.resume(client, 'q')
    assert inbox.wait(3) == ['first', 'passes', 'waits']


def test_pause_and_resume_tell_whether_they_changed_anything(client: Client, connection: Connection) -> None:
    connection.ensure_connection()
    assert not queues.resume(client, 'q')
    assert queues.pause(client, 'q', by='ann', reason='a test')
    assert not queues.pause(client, 'q', by='bob')
    [(name, found)] = queues.paused(client).items()
    assert (name, found['by'], found['reason']) == ('q', 'ann', 'a test')
    with pytest.raises(ConfigurationError, match='the name of the queue is empty'):
        queues.pause(client, '')
    assert queues.resume(client, 'q')
    assert queues.paused(client) == {}
    assert queues.pause(client, 'q')


def test_two_pauses_of_a_cluster_end_together(connection: Connection, client: Client) -> None:
    connection.ensure_connection()
    queues.pause(client, 'q')
    leave_leaf(client, 'broker:closed:q', f'1-{"f" * 32}', type='Pause', queue='q', date=1.0, by=None, reason=None)
    assert queues.resume(client, 'q')
    assert queues.paused(client) == {}


def test_busy_consumer_stops_and_finishes_what_it_has(connect: Connect, client: Client) -> None:
    """A consumer with messages left to claim does not follow the changes feed: it polls."""
    publish_many(connect(), range(100))
    inbox = Inbox(connect(), ack=False, prefetch=4)
    inbox.wait(4)
    queues.pause(client, 'q')

    def work() -> bool:
        for message in inbox.messages[len(done) :]:
            message.ack()
            done.append(message)
        return inbox.connection.transport.topology.paused == {'q'}

    done: list[Any] = []
    inbox.drain_until(work, 'the consumer to know of the pause')
    inbox.drain_until(lambda: work() and not claimed(client), 'what it had received to be acknowledged')
    assert len(items(client)) == 100 - len(done)
    inbox.stays(len(done), 0.3)
    assert {item['attempts'] for item in items(client)} == {0}
    queues.resume(client, 'q')
    inbox.drain_until(lambda: work() or len(done) == 100, 'all messages')


def test_restarted_consumer_knows_of_the_pause_before_it_claims(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(3))
    queues.pause(client, 'q')
    inbox = Inbox(connect(), Queue('q', queue_arguments={'x-max-length': 50}))  # which does not resume the queue
    knows(inbox.connection, 'q')
    assert list(queues.paused(client)) == ['q']
    assert [item['claimed'] for item in items(client)] == [None] * 3
    assert all(item['_rev'].startswith('1-') for item in items(client)), 'no message was ever claimed'
    queues.resume(client, 'q')
    assert inbox.wait(3) == [0, 1, 2]


@pytest.mark.parametrize('consumes', [False, True])
def test_queue_refuses_what_programs_publish(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch, consumes: bool
) -> None:
    """Also messages for later, through an exchange, and in a batch; those of a worker are accepted."""
    connection = connect()
    Queue('other', Exchange('ex'), routing_key='k')(connection.channel()).declare()
    publish(connection, 'before')
    if consumes:
        Inbox(connection, 'another')
    queues.pause(client, 'q')
    publish(connection, 'waits')
    assert queues.pause(client, 'q', refuse=True), 'it was paused, and did not refuse'
    assert not queues.pause(client, 'q', refuse=True)
    queues.pause(client, 'other', by='ann', reason='an upgrade', refuse=True)
    for name in ('q', 'other'):
        learns(connection, name, refuses=True)
    with pytest.raises(QueuePaused, match=r"^queue 'q' is paused and takes no new messages; .*queues resume q"):
        publish(connection, 'refused')
    with pytest.raises(QueuePaused):
        publish(connection, 'refused', headers=eta(60))
    with pytest.raises(QueuePaused, match=r"^queue 'other' is paused by ann and takes no new messages \(an upgrade\);"):
        connection.Producer().publish('refused', exchange='ex', routing_key='k', serializer='json')
    publish(connection, 'passes', 'third')
    with monkeypatch.context() as worker:
        worker.setattr(lease._Process, 'worker', 'worker@host')
        publish(connection, 'accepted')
    bodies = [json.loads(item['message']['body']) for item in items(client)]
    assert bodies == ['before', 'waits', 'passes', 'accepted']
    assert queues.paused(client)['q']['refuse']
    queues.resume(client, 'q')
    learns(connection, 'q', refuses=False)
    publish(connection, 'after')


def test_program_asks_for_a_pause_at_most_once_a_second(
    connect: Connect, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, sent = connect(), record_requests(monkeypatch, database, pauses=True)
    publish(connection, 'first')
    monkeypatch.setattr('kombu_couchdb.queues.declarations._FRESH_SECONDS', 100.0)
    publish(connection, 'reads perhaps')
    sent.clear()
    for number in range(5):
        publish(connection, number)
    assert [request.path for request in sent] == ['/_bulk_docs'] * 5


def test_get_from_a_paused_queue_returns_nothing(connect: Connect, client: Client) -> None:
    publish(connect(), 'hello')
    queues.pause(client, 'q')
    connection = connect()
    channel = connection.channel()
    assert channel.basic_get('q') is None
    queues.resume(client, 'q')
    knows(connection)
    assert channel.basic_get('q').decode() == 'hello'


def test_planned_message_priority_and_unique_job_wait(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect())
    queues.pause(client, 'q')
    knows(inbox.connection, 'q')
    publish(connect(), 'planned', headers=eta(0.2))
    publish(connect(), 'low', priority=1)
    publish(connect(), 'high', priority=9)
    job = {'id': 'a', 'task': 'report', 'job_key': 'k'}
    publish(connect(), 'job', headers=job, priority=5)
    publish(connect(), 'job', headers={**job, 'id': 'b'}, priority=5)
    inbox.stays(0, 0.5)
    assert len(items(client)) == 4
    queues.resume(client, 'q')
    assert sorted(inbox.wait(4)) == ['high', 'job', 'low', 'planned']
    assert [body for body in inbox.bodies if body != 'planned'] == ['high', 'job', 'low']


def test_retry_of_a_running_task_waits(connect: Connect, client: Client) -> None:
    publish(connect(), 'hello')
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    queues.pause(client, 'q')
    knows(inbox.connection, 'q')
    inbox.messages[0].requeue()
    wait_for(lambda: not claimed(client), 'the release')
    inbox.stays(1, 0.3)
    queues.resume(client, 'q')
    assert inbox.wait(2) == ['hello', 'hello']


def test_paused_queue_takes_no_slots_from_queues_with_the_same_concurrency_key(
    connect: Connect, client: Client
) -> None:
    one, other, paused = (Inbox(connect(), name, ack=False) for name in ('one', 'other', 'q'))
    limit = {'headers': {'concurrency_key': 'k', 'concurrency_limit': 1}}
    publish(connect(), 'a', 'one', **limit)
    one.wait(1)
    for body, name in (('b', 'q'), ('c', 'q'), ('d', 'other')):
        publish(connect(), body, name, **limit)
    wait_for(lambda: sum('parked' in item for item in items(client)) == 3, 'the messages to wait for the slot')
    queues.pause(client, 'q')
    for inbox in (one, other, paused):
        knows(inbox.connection, 'q')
    one.messages[0].ack()
    assert other.wait(1) == ['d']
    paused.stays(0, 0.1)
    other.messages[0].ack()
    queues.resume(client, 'q')
    assert paused.wait(1) == ['b']


def test_limits_and_expiry_apply_to_paused_queues(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect(visibility_timeout=1.5), Queue('q', queue_arguments={'x-max-length': 2}))
    queues.pause(client, 'q')
    knows(inbox.connection, 'q')
    publisher = connect()
    publish_many(publisher, range(4))
    publish(publisher, 'short-lived', expiration=0.05)
    wait_for(lambda: not any(item.get('expires') for item in items(client)), 'the expired message to be dropped')
    assert len(items(client)) <= 2


def test_paused_temporary_queue_is_kept_until_it_is_resumed(connect: Connect, client: Client) -> None:
    """Its last consumer leaves, and it expires; a sweep deletes it only after it was resumed."""
    sweeper = Inbox(connect(visibility_timeout=1.5), 'other')
    inbox = Inbox(connect(), Queue('temporary', auto_delete=True, expires=1.0))
    queues.pause(client, 'temporary')
    knows(inbox.connection, 'temporary')
    knows(sweeper.connection, 'temporary')
    publish(connect(), 'hello', 'temporary')
    inbox.consumer.cancel()
    inbox.connection.release()
    before = client.get('broker:queue:temporary')
    sweeper.stays(0, 2.5)  # several sweeps
    assert client.get('broker:queue:temporary')['_rev'] == before['_rev']
    assert len(items(client)) == 1
    queues.resume(client, 'temporary')
    assert client.get('broker:queue:temporary')['expires'] > before['expires']
    wait_for(lambda: not queues.names(client).get('temporary') and not items(client), 'the queue to expire')


def test_consumer_sends_no_request_for_messages_of_a_paused_queue(
    connect: Connect, client: Client, sent: list[Request]
) -> None:
    inbox = Inbox(connect())
    queues.pause(client, 'q')
    knows(inbox.connection, 'q')
    publisher = connect()

    def sends_nothing() -> bool:
        sent.clear()
        publish_many(publisher, range(5))
        inbox.stays(0, 0.5)
        return not [request for request in sent if request.path not in ('/_bulk_docs', '')]

    wait_for(sends_nothing, 'a consumer that does not follow the paused queue')


def test_status_names_paused_queues(inbox: Inbox, client: Client) -> None:
    queues.pause(client, 'q', by='ann', reason='a test')
    queues.pause(client, 'unknown')
    Queue('temporary', auto_delete=True)(inbox.channel).declare()
    assert queues.names(client) == {'q': False, 'other': False, 'temporary': True, 'unknown': False}
    found = status(client)['queues']
    assert found['q']['paused'] == {**queues.paused(client)['q'], 'by': 'ann', 'reason': 'a test'}
    assert found['other']['paused'] is None
    assert found['unknown']['paused'] is not None


def test_purge_and_delete(connect: Connect, client: Client) -> None:
    publisher = connect()
    publish_many(publisher, range(5))
    publish(publisher, 'planned', headers=eta(60))
    assert sum(queues.purging(client, 'q')) == 6
    publish(publisher, 'hello')
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    publish_many(publisher, range(2), 'q')
    queues.pause(client, 'q')
    knows(inbox.connection, 'q')
    with pytest.raises(ConfigurationError, match=r"queue 'q' is in use by .* \(pid \d+\): stop these consumers first"):
        sum(queues.deleting(client, 'q'))
    assert sum(queues.deleting(client, 'q', force=True)) == 2
    assert queues.names(client) == {}
    assert len(claimed(client)) == 1
    inbox.connection.release()
    assert sum(queues.deleting(client, 'q')) == 1


def test_purge_ends_while_publishers_go_on(connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, 'MAX_BATCH_DOCS', 3)
    publisher = connect()
    publish_many(publisher, range(7))
    publish(publisher, 'planned', headers=eta(60))
    publish(publisher, 'unique', headers={'id': 'x', 'task': 'report', 'job_key': 'old'})
    purging = queues.purging(client, 'q')
    deleted = next(purging)
    for number, count in enumerate(purging):
        deleted += count
        publish_many(publisher, range(4))
        publish(publisher, 'urgent', priority=9)
        publish(publisher, 'unique', headers={'id': f'x{number}', 'task': 'report', 'job_key': f'new {number}'})
        assert number < 40
    assert deleted == 9
    assert len(items(client)) == 6 * (number + 1)


def test_invalid_names_are_refused(client: Client) -> None:
    for act in (queues.pause, queues.resume, lambda *given: sum(queues.purging(*given))):
        with pytest.raises(ConfigurationError, match='queue must be text of at most 500 bytes'):
            act(client, 'x' * 501)
