"""Unique jobs: at most one message with a job key waits, however often it is published."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Queue

from kombu_couchdb.consumer.pending_writes import give_up
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.queues.store import Store
from kombu_couchdb.unique import AGAIN, ENQUEUED, MOVED, Outcome, collect_outcomes
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Request, eta, items, publish, publish_many, replace_in_clients

JOB = 'job:["q","report","k"]'


def send(connection: Connection, task_id: str, key: str = 'k', **headers: Any) -> Outcome:
    """Publish a message with a job key and return the outcome."""
    with collect_outcomes() as outcomes:
        publish(connection, task_id, headers={**headers, 'id': task_id, 'task': 'report', 'job_key': key})
    [outcome] = outcomes
    return outcome


def test_new_job_takes_one_request(connection: Connection, client: Client, sent: list[Request]) -> None:
    publish(connection, 'warm')
    sent.clear()
    assert send(connection, 'a') == Outcome(ENQUEUED, 'a')
    assert [request.path for request in sent] == ['/_bulk_docs']


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


def test_running_job_is_released_with_its_consumer(connect: Callable[..., Connection], client: Client) -> None:
    connection, consuming = connect(), connect()
    inbox = Inbox(consuming, ack=False)
    send(connection, 'a')
    inbox.wait(1)
    send(connection, 'b')
    consuming.release()
    assert Inbox(connect()).wait(2) == ['a', 'b']


def test_rejected_job_gives_way_to_the_next(connect: Callable[..., Connection], client: Client) -> None:
    connection, inbox = connect(), Inbox(connect(), ack=False)
    send(connection, 'a')
    inbox.wait(1)
    send(connection, 'b')
    inbox.messages[0].reject()
    assert inbox.wait(2) == ['a', 'b']
    [dead] = [doc for doc in items(client) if doc.get('status')]
    assert (dead['message']['body'], dead['reason'], dead['key']) == ('"a"', 'rejected', 'k')


def test_dead_job_is_kept_and_a_new_one_is_enqueued(connect: Callable[..., Connection], client: Client) -> None:
    connection, inbox = connect(), Inbox(connect(), ack=False)
    for name in 'ab':
        assert send(connection, name) == Outcome(ENQUEUED, name)
        inbox.wait(1 if name == 'a' else 2)
        inbox.messages[-1].reject()
        wait_for(
            lambda name=name: any(  # type: ignore[misc]
                doc.get('status') and doc['message']['body'] == f'"{name}"' for doc in items(client)
            )
        )
    send(connection, 'c')
    assert inbox.wait(3) == ['a', 'b', 'c']
    assert sorted(doc['message']['body'] for doc in items(client) if doc.get('status')) == ['"a"', '"b"']


def test_unique_jobs_in_a_batch(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    with collect_outcomes() as outcomes:
        publish_many(connection, ['a', 'b'], headers={'id': 'x', 'task': 'report', 'job_key': 'k'})
        publish_many(connection, ['c', 'd'], headers={'id': 'y', 'task': 'report'})
    assert outcomes[0].what == ENQUEUED
    assert Counter('key' in doc for doc in items(client)) == {True: 1, False: 2}


def test_many_concurrent_publishers(connect: Callable[..., Connection], client: Client) -> None:
    connect().connect()
    connections = [connect() for _ in range(8)]
    for connection in connections:
        connection.connect()
    gate, outcomes = threading.Barrier(8), list[Outcome]()

    def publisher(number: int) -> None:
        gate.wait(PATIENCE)
        for turn in range(10):
            outcomes.append(send(connections[number], f'{number}-{turn}', **eta(100 + number)))

    threads = [threading.Thread(target=publisher, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(outcomes) == 80
    [first] = [outcome for outcome in outcomes if outcome.what == ENQUEUED]
    assert {outcome.task_id for outcome in outcomes} == {first.task_id}
    [item] = items(client)
    assert item['_id'] == JOB


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
        outbox = unacked.writes.take()
        answers = client.bulk([doc for doc, _ in outbox])
        assert [answer.is_stored for answer in answers] == [True]
        assert send(connection, 'b') == Outcome(ENQUEUED, 'b')
        give_up(outbox)
        unacked.wakeup.set()
    assert inbox.wait(2) == ['a', 'b']
    inbox.messages[1].ack()
    wait_for(lambda: not items(client), 'the second job to be completed')
    inbox.stays(2, 0.2)


def contend(monkeypatch: pytest.MonkeyPatch, database: str, act: Callable[[int], object], times: int) -> None:
    """Call a function just before each of the next writes of the job by a consumer."""
    bulk, left, acting = Client.bulk, list(range(times)), list[bool]()

    def contended(self: Client, docs: Any, **kwargs: Any) -> Any:
        if left and not acting and any(doc['_id'] == JOB for doc in docs):
            acting.append(True)
            act(left.pop(0))
            acting.clear()
        return bulk(self, docs, **kwargs)

    replace_in_clients(monkeypatch, database, 'bulk', contended)


def test_ack_while_publishers_keep_sending(
    connect: Callable[..., Connection], client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, consuming = connect(), connect()
    inbox = Inbox(consuming, ack=False)
    send(connection, 'a')
    inbox.wait(1)
    contend(monkeypatch, database, lambda number: send(connection, f'b{number}', **eta(3600 + number)), 5)
    inbox.messages[0].ack()
    consuming.release()
    [item] = items(client)
    assert (item['message']['body'], item['claimed'], 'next' in item) == ('"b0"', None, False)
    assert not client.id_range('broker:consumer:')


def test_reject_while_publishers_keep_sending(
    connect: Callable[..., Connection], client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, inbox = connect(), Inbox(connect(), ack=False)
    send(connection, 'a')
    inbox.wait(1)
    send(connection, 'b', **eta(3600))
    contend(monkeypatch, database, lambda number: send(connection, f'c{number}', **eta(7200 + number)), 4)
    inbox.messages[0].reject()
    wait_for(lambda: any(doc['message']['body'] == '"b"' for doc in items(client)), 'the next job to take its place')
    assert [doc['message']['body'] for doc in items(client) if doc.get('status')] == ['"a"']


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
