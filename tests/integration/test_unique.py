"""Unique jobs: at most one message with a job key waits, however often it is published."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from kombu import Connection, Queue

from kombu_couchdb.consumer.pending_writes import give_up
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.queues.store import Store
from kombu_couchdb.unique import AGAIN, ENQUEUED, MOVED, Outcome, collect_outcomes
from tests.conftest import wait_for
from tests.support import Inbox, eta, items, publish, publish_many


def send(connection: Connection, task_id: str, key: str = 'k', **headers: Any) -> Outcome:
    """Publish a message with a job key and return the outcome."""
    with collect_outcomes() as outcomes:
        publish(connection, task_id, headers={**headers, 'id': task_id, 'task': 'report', 'job_key': key})
    [outcome] = outcomes
    return outcome


def test_waiting_job_is_delivered_once(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    assert [send(connection, name) for name in 'abc'] == [
        Outcome(ENQUEUED, 'a'),
        Outcome(MOVED, 'a'),
        Outcome(MOVED, 'a'),
    ]
    assert send(connection, 'd', key='another') == Outcome(ENQUEUED, 'd')
    inbox = Inbox(connect())
    assert sorted(inbox.wait(2)) == ['a', 'd']
    wait_for(lambda: not items(client))
    assert send(connection, 'e') == Outcome(ENQUEUED, 'e')
    assert inbox.wait(3)[2] == 'e'


def test_scheduled_job_is_moved(connect: Callable[..., Connection], client: Client) -> None:
    connection, inbox = connect(), Inbox(connect())
    assert send(connection, 'a', **eta(3600)) == Outcome(ENQUEUED, 'a')
    assert send(connection, 'b', **eta(7200)) == Outcome(MOVED, 'a')
    [item] = items(client)
    later = item['date']
    assert send(connection, 'c', **eta(1800)) == Outcome(MOVED, 'a')
    [item] = items(client)
    assert 5000 < later - item['date'] < 5800
    inbox.stays(0, 0.2)
    assert send(connection, 'd') == Outcome(MOVED, 'a')
    assert inbox.wait(1) == ['a']
    assert not inbox.messages[0].headers['eta']


def test_running_job_runs_once_more(connect: Callable[..., Connection], client: Client) -> None:
    connection, inbox = connect(), Inbox(connect(), ack=False)
    send(connection, 'a')
    inbox.wait(1)
    assert [send(connection, name) for name in 'bcd'] == [Outcome(AGAIN, 'b'), Outcome(MOVED, 'b'), Outcome(MOVED, 'b')]
    inbox.stays(1, 0.3)
    inbox.messages[0].ack()
    assert inbox.wait(2) == ['a', 'b']
    assert inbox.messages[1].properties['delivery_info']['delivery_count'] == 1
    inbox.messages[1].ack()
    wait_for(lambda: not items(client), 'the job to be completed')
    inbox.stays(2, 0.2)


def test_released_job_runs_before_the_next(connect: Callable[..., Connection], client: Client) -> None:
    connection, inbox = connect(), Inbox(connect(), ack=False)
    send(connection, 'a')
    inbox.wait(1)
    send(connection, 'b')
    inbox.messages[0].requeue()
    assert inbox.wait(2) == ['a', 'a']
    inbox.messages[1].ack()
    assert inbox.wait(3) == ['a', 'a', 'b']


def test_rejected_job_gives_way_to_the_next(connect: Callable[..., Connection], client: Client) -> None:
    connection, inbox = connect(), Inbox(connect(), ack=False)
    send(connection, 'a')
    inbox.wait(1)
    send(connection, 'b')
    inbox.messages[0].reject()
    assert inbox.wait(2) == ['a', 'b']
    [dead] = [doc for doc in items(client) if doc.get('status')]
    assert (dead['message']['body'], dead['reason'], dead['key']) == ('"a"', 'rejected', 'k')


def test_unique_jobs_in_a_batch(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    with collect_outcomes() as outcomes:
        publish_many(connection, ['a', 'b'], headers={'id': 'x', 'task': 'report', 'job_key': 'k'})
        publish_many(connection, ['c', 'd'], headers={'id': 'y', 'task': 'report'})
    assert outcomes[0].what == ENQUEUED
    assert Counter('key' in doc for doc in items(client)) == {True: 1, False: 2}


def test_concurrent_publishers_and_consumers(connect: Callable[..., Connection], client: Client) -> None:
    """After each publish, a run starts that has not started before."""
    senders, inboxes = [connect() for _ in range(3)], [Inbox(connect(), ack=False) for _ in range(2)]
    outcomes: list[Outcome] = []

    def publisher(number: int) -> None:
        for turn in range(15):
            outcomes.append(send(senders[number], f'{number}-{turn}'))

    threads = [threading.Thread(target=publisher, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    held: list[Any] = []
    seen = [0, 0]

    def step() -> bool:
        for index, inbox in enumerate(inboxes):
            inbox.drain(0.01)
            new = inbox.messages[seen[index] :]
            seen[index] = len(inbox.messages)
            held.extend(new)
        assert len(held) <= 1, 'two concurrent runs of one job'
        while held:
            held.pop().ack()
        return not any(thread.is_alive() for thread in threads) and not items(client)

    wait_for(step, 'all jobs to be completed')
    ran = {message.decode() for inbox in inboxes for message in inbox.messages}
    assert {outcome.task_id for outcome in outcomes} == ran
    assert sum(outcome.what != MOVED for outcome in outcomes) == sum(len(inbox.messages) for inbox in inboxes)


def test_ack_whose_response_was_lost(connect: Callable[..., Connection], client: Client) -> None:
    """An ack whose response was lost is sent again: is the conflict due to the ack itself or to a publisher?"""
    connection, consuming = connect(), connect()
    inbox = Inbox(consuming, ack=False)
    send(connection, 'a')
    inbox.wait(1)
    unacked = consuming.transport.consumer.unacked
    with unacked._lock:  # the I/O thread waits, as in an outage
        inbox.messages[0].ack()
        outbox = unacked.writes.take_ready()
        answers = client.bulk([write.doc for write in outbox])
        assert [answer.is_stored for answer in answers] == [True]
        assert send(connection, 'b') == Outcome(ENQUEUED, 'b')
        give_up(outbox)
        unacked.wakeup.set()
    assert inbox.wait(2) == ['a', 'b']
    inbox.messages[1].ack()
    wait_for(lambda: not items(client), 'the second job to be completed')
    inbox.stays(2, 0.2)


def test_message_ttl_counts_from_the_last_publish(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    queue = Queue('q', message_ttl=30)
    queue(connection.channel()).declare()
    send(connection, 'a')
    [item] = items(client)
    client.put({**item, 'published': item['published'] - 60})
    assert send(connection, 'b') == Outcome(MOVED, 'a')
    Store(client).drop_older('q', 30)
    inbox = Inbox(connect(), queue, ack=False)
    assert inbox.wait(1) == ['a']
    send(connection, 'c')
    [item] = items(client)
    # The next job has waited behind the running one for longer than the TTL of the queue.
    client.put({**item, 'next': [{**item['next'][0], 'published': item['published'] - 60}]})
    inbox.messages[0].ack()
    assert inbox.wait(2) == ['a', 'c']


def test_told_collects_outcomes_of_nested_calls(connection: Connection, client: Client) -> None:
    with collect_outcomes() as outer:
        assert send(connection, 'a') == Outcome(ENQUEUED, 'a')
        send(connection, 'b')
    assert outer == [Outcome(ENQUEUED, 'a'), Outcome(MOVED, 'a')]
