"""Claiming ahead: more than the prefetch count is claimed, kombu never has more, and the rest is given back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Queue

from kombu_couchdb.consumer.pace import Throughput
from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.support import Inbox, items, publish_many, record_requests

AHEAD = 5


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each channel count as fast until one of its messages has waited for too long."""
    monkeypatch.setattr(Throughput, 'ahead', lambda rate, limit, now: 0 if rate._penalty else AHEAD)


def shelf(inbox: Inbox) -> dict[str, Any]:
    found: dict[str, Any] = inbox.channel.credit.shelf
    return found


def is_given_back(client: Client, claimed: int) -> bool:
    """Tell whether this number of messages is claimed, and the others wait without an attempt."""
    docs = items(client)
    waiting = [doc for doc in docs if doc['claimed'] is None]
    return len(docs) - len(waiting) == claimed and all(doc['attempts'] == 0 for doc in waiting)


@pytest.mark.usefixtures('fast')
def test_kombu_never_has_more_than_the_prefetch_count(connect: Callable[..., Connection]) -> None:
    publish_many(connect(), range(60))
    inbox = Inbox(connect(), prefetch=2, ack=False)
    mailbox, seen, handled = inbox.connection.transport._mailbox, 0, 0
    while handled < 60:
        inbox.wait(handled + 1)
        assert len(inbox.channel.qos._tags) + len(mailbox) <= 2
        seen = max(seen, len(shelf(inbox)))
        inbox.messages[handled].ack()
        handled += 1
    assert seen > 0
    assert sorted(inbox.bodies) == list(range(60))


@pytest.mark.usefixtures('fast')
def test_messages_of_a_slow_consumer_go_to_an_idle_one_without_an_attempt(
    connect: Callable[..., Connection], client: Client
) -> None:
    publish_many(connect(), range(4))
    slow = Inbox(connect(), prefetch=1, ack=False)
    slow.wait(1)
    wait_for(lambda: is_given_back(client, claimed=1), 'the messages claimed ahead are given back')
    idle = Inbox(connect(), prefetch=4)
    idle.wait(3)
    assert sorted(slow.bodies + idle.bodies) == [0, 1, 2, 3]
    assert all(not message.delivery_info['redelivered'] for message in idle.messages)


def test_slow_consumer_claims_nothing_ahead(connect: Callable[..., Connection]) -> None:
    publish_many(connect(), range(30))
    inbox = Inbox(connect(), prefetch=1, ack=False)
    for number in range(20):
        inbox.wait(number + 1)
        time.sleep(0.1)  # the work on one message
        inbox.messages[-1].ack()
        assert not shelf(inbox)


@pytest.mark.usefixtures('fast')
def test_priorities_hold(connect: Callable[..., Connection]) -> None:
    sent = [(priority, number) for number in range(4) for priority in random.Random(0).sample(range(10), 10)]
    publisher = connect()
    for priority, number in sent:
        publish_many(publisher, [[priority, number]], priority=priority)
    inbox = Inbox(connect(), prefetch=2)
    assert [priority for priority, _ in inbox.wait(len(sent))] == sorted((p for p, _ in sent), reverse=True)


@pytest.mark.usefixtures('fast')
def test_cancel_gives_back_at_once(connect: Callable[..., Connection], client: Client) -> None:
    publish_many(connect(), range(4))
    inbox = Inbox(connect(), prefetch=1, ack=False)
    inbox.wait(1)
    inbox.consumer.cancel()
    assert not shelf(inbox)
    wait_for(lambda: is_given_back(client, claimed=1), 'the others are given back')


@pytest.mark.usefixtures('fast')
def test_lower_prefetch_count_gives_back_at_once(connect: Callable[..., Connection], client: Client) -> None:
    publish_many(connect(), range(9))
    inbox = Inbox(connect(), prefetch=2, ack=False)
    inbox.wait(2)
    inbox.channel.basic_qos(0, 1, False)
    assert not shelf(inbox)
    wait_for(lambda: is_given_back(client, claimed=2), 'the others are given back')


@pytest.mark.usefixtures('fast')
def test_closed_connection_gives_back_without_an_attempt(connect: Callable[..., Connection], client: Client) -> None:
    publish_many(connect(), range(6))
    inbox = Inbox(connect(), prefetch=1, ack=False)
    inbox.wait(1)
    inbox.connection.close()
    assert is_given_back(client, claimed=0)


@pytest.mark.usefixtures('fast')
def test_basic_get_of_another_channel_gets_what_is_claimed_ahead(connection: Connection) -> None:
    publish_many(connection, range(3))
    Inbox(connection, prefetch=1, ack=False).wait(1)
    with connection.channel() as channel:
        message = channel.basic_get('q')
        assert message is not None
        message.ack()


@pytest.mark.usefixtures('fast')
def test_large_messages_are_delivered_in_full(connect: Callable[..., Connection]) -> None:
    bodies = [f'{number}' * 20_000 for number in range(8)]
    publish_many(connect(), bodies)
    assert sorted(Inbox(connect(), prefetch=1).wait(8)) == bodies


@pytest.mark.usefixtures('fast')
def test_several_consumers_get_each_message_once(connect: Callable[..., Connection], client: Client) -> None:
    publish_many(connect(), range(300))
    inboxes = [Inbox(connect(), prefetch=2) for _ in range(3)]

    def drain(inbox: Inbox) -> None:
        while sum(len(each.messages) for each in inboxes) < 300 and not stopped.is_set():
            inbox.drain(0.1)

    stopped = threading.Event()
    threads = [threading.Thread(target=drain, args=(inbox,)) for inbox in inboxes]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: not any(thread.is_alive() for thread in threads), 'all messages are received')
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert sorted(body for inbox in inboxes for body in inbox.bodies) == list(range(300))
    wait_for(lambda: not items(client), 'all messages are deleted')


@pytest.mark.usefixtures('fast')
def test_quiet_queue_is_served_beside_a_long_one(connect: Callable[..., Connection]) -> None:
    publisher = connect()
    publish_many(publisher, range(200), to='long')
    publish_many(publisher, ['quiet'], to='quiet')
    inbox = Inbox(connect(), Queue('long'), Queue('quiet'), prefetch=2)
    inbox.drain_until(lambda: 'quiet' in inbox.bodies, 'the message of the quiet queue')
    assert len(inbox.messages) < 200


def test_fast_consumer_claims_several_messages_in_one_request(
    connect: Callable[..., Connection], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Throughput, 'ahead', lambda rate, limit, now: 20)
    publish_many(connect(), range(100))
    requests = record_requests(monkeypatch, database)
    Inbox(connect(), prefetch=1).wait(100)
    claims = [sum(bool(doc.get('claimed')) for doc in request.docs) for request in requests]
    assert max(claims) > 1
