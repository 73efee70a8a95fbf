"""Messages with an `eta` wait in the database and are delivered when they are due, without polling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Peer, due, eta, items, publish, publish_many

#: How late a message may be, in seconds. The documentation says two; the rest is for a busy machine.
LATE = PATIENCE


def test_message_is_delivered_when_it_is_due(connect: Callable[..., Connection], client: Client) -> None:
    inboxes = [Inbox(connect()) for _ in range(2)]
    publish(connect(), 'later', headers=eta(2))
    wait_for(lambda: any(inbox.drain(0.1).messages for inbox in inboxes), 'the message')
    [(message, at)] = [(inbox.messages[0], inbox.times[0]) for inbox in inboxes if inbox.messages]
    assert 0 <= at - due(message) < LATE


def test_scheduled_messages_are_on_time_in_a_busy_queue(connect: Callable[..., Connection], client: Client) -> None:
    publisher, finished = connect(), threading.Event()
    inbox = Inbox(connect(), prefetch=10)
    for number in range(3):
        publish(publisher, ['later', number], headers=eta(1.5 + number))

    def flow() -> None:
        number = 0
        while not finished.wait(0.005):
            if number - len(inbox.messages) < 5:  # a backlog would delay all less urgent messages
                number += 1
                publish(publisher, ['flow', number], priority=number % 10)

    thread = threading.Thread(target=flow)
    thread.start()
    try:
        inbox.drain_until(
            lambda: sum(m.headers.get('eta') is not None for m in inbox.messages) == 3, 'all three scheduled messages'
        )
    finally:
        finished.set()
        thread.join()
    late = [
        (message, at) for message, at in zip(inbox.messages, inbox.times, strict=True) if message.headers.get('eta')
    ]
    assert [message.decode()[1] for message, _ in late] == [0, 1, 2]
    assert all(0 <= at - due(message) < LATE for message, at in late)
    assert len(inbox.messages) > 10


def test_priorities_of_messages_due_together(connect: Callable[..., Connection], client: Client) -> None:
    publisher, headers = connect(), eta(4)
    for priority in (0, 9, 5, 2, 7):
        publish(publisher, priority, priority=priority, headers=headers)
    inbox = Inbox(connect(), prefetch=1)
    assert inbox.wait(5) == [9, 7, 5, 2, 0]
    assert inbox.times[0] >= due(inbox.messages[0])


def test_many_scheduled_messages_do_not_delay_ready_ones(connect: Callable[..., Connection], client: Client) -> None:
    publisher = connect()
    for priority in (0, 4, 9):
        publish_many(publisher, range(100), priority=priority, headers=eta(86400))
        publish_many(publisher, [['ready', priority]] * 5, priority=priority)
    assert connect().channel().queue_declare('q').message_count == 15
    inbox = Inbox(connect(), prefetch=4)
    assert inbox.wait(15) == [['ready', priority] for priority in (9, 4, 0) for _ in range(5)]
    publish(publisher, 'soon', headers=eta(1))
    assert inbox.wait(16)[15] == 'soon'
    assert 0 <= inbox.times[15] - due(inbox.messages[15]) < LATE
    inbox.stays(16, 0.5)
    assert sum(item['claimed'] is None and item['date'] is not None for item in items(client)) == 300


def test_consumer_with_a_wrong_clock(url: str, connect: Callable[..., Connection], client: Client) -> None:
    with Peer(url, ack=True, skew=300) as peer:
        publish(connect(), 'now')
        assert peer.next()['got'] == 'now'
        headers = eta(2)
        publish(connect(), 'later', headers=headers)
        event = peer.next()
    assert event['got'] == 'later'
    assert -2 <= event['at'] - datetime.fromisoformat(headers['eta']).timestamp() < LATE
    assert any('clock' in line for line in peer.log)


@pytest.mark.parametrize('ahead', [3600, -3600], ids=['ahead', 'behind'])
def test_ready_messages_are_delivered_although_the_server_clock_changes(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """The clock is set right after messages were published with a wrong one, or it is set wrong."""
    publisher, inbox = connect(), Inbox(connect(), 'waits', prefetch=10)
    clock = publisher.transport.couchdb.clock
    now = clock.now
    publish_many(publisher, range(3))
    monkeypatch.setattr(clock, 'now', lambda: now() + ahead)
    publish(publisher, 3, 'waits')
    publish_many(publisher, range(3, 6))
    monkeypatch.setattr(clock, 'now', now)
    publish_many(publisher, range(6, 9))
    assert publisher.default_channel.queue_declare('q').message_count == 9
    assert inbox.wait(1) == [3]
    got = connect().channel().basic_get('q')
    got.ack()
    assert sorted([got.decode(), *Inbox(connect()).wait(8)]) == list(range(9))


def test_basic_get_skips_messages_that_are_not_due(connection: Connection) -> None:
    for number in range(12):
        publish(connection, number, priority=9, headers=eta(600))
    publish(connection, 'now')
    channel = connection.channel()
    assert channel.basic_get('q', no_ack=True).decode() == 'now'
    publish(connection, 'soon', headers=eta(1))
    message = wait_for(lambda: channel.basic_get('q'), 'the message')
    assert message.decode() == 'soon'
    assert time.time() >= due(message)


def test_messages_with_an_invalid_eta_are_delivered_at_once(connection: Connection) -> None:
    values: list[object] = ['no date', 5, None, '2026-13-01T00:00:00']
    for value in values:
        publish(connection, value, headers={'eta': value})
    assert Inbox(connection).wait(4) == values
