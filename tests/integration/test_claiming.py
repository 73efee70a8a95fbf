"""Claim order (highest priority, then oldest), exactly one consumer for each message, few conflicts; claiming ahead."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.consumer.delivery import Delivery
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.flow import Throughput
from tests.conftest import wait_for
from tests.support import Inbox, Request, eta, items, publish, publish_many, replace_in_clients

from .conftest import Connect

CONSUMERS = 4


def test_highest_priority_first_then_oldest(connection: Connection) -> None:
    sent = [(priority, number) for number in range(2) for priority in (3, 0, 9, 5, 1)]
    for priority, number in sent:
        publish(connection, [priority, number], priority=priority)
    inbox = Inbox(connection, prefetch=1)
    assert inbox.wait(len(sent)) == [[priority, number] for priority in (9, 5, 3, 1, 0) for number in range(2)]


def test_oldest_due_date_first(connection: Connection) -> None:
    publish(connection, 'now')
    publish(connection, 'since yesterday', headers=eta(-86400))
    publish(connection, 'since last year', headers=eta(-31e6))
    assert Inbox(connection, prefetch=1).wait(3) == ['since last year', 'since yesterday', 'now']


def test_urgent_message_is_delivered_before_a_long_queue(connect: Connect, client: Client) -> None:
    publisher = connect()
    publish_many(publisher, range(100))
    inbox = Inbox(connect(), prefetch=1, ack=False)
    inbox.wait(1)
    publish(publisher, 'urgent', priority=9)
    # The consumer may have read some candidates ahead, which it uses for at most a second.
    threading.Event().wait(3)
    inbox.messages[0].ack()
    assert inbox.wait(2)[1] == 'urgent'


def test_consumer_of_a_long_queue_finds_a_message_in_another_one(connect: Connect, sent: list[Request]) -> None:
    """After as few cycles, also if it has read many messages of the long queue ahead."""
    publisher = connect()
    publish_many(publisher, range(1500))
    inbox = Inbox(connect(), 'q', 'other', prefetch=8)
    inbox.drain_until(lambda: len(inbox.messages) >= 200, 'the consumer to be busy')
    publish(publisher, 'here', 'other')
    sent.clear()
    inbox.drain_until(lambda: inbox.messages[-1].decode() in ('here', 1499), 'the message')
    writes = [[doc['queue'] for doc in request.docs if doc.get('claimed')] for request in list(sent)]
    claims = [queues for queues in writes if queues]
    before = next(number for number, queues in enumerate(claims) if 'other' in queues)
    assert before <= 4, 'a cycle that was under way, and the next one, with a few requests each'


def test_only_consumer_of_a_queue_asks_nobody_to_help(connect: Connect, sent: list[Request]) -> None:
    """The read of a queue waits for its index, and acks would wait for the read."""
    publish_many(connect(), range(1000))
    inbox = Inbox(connect(), prefetch=8)
    inbox.drain_until(lambda: len(inbox.messages) >= 300, 'the consumer to be busy')
    sent.clear()
    inbox.wait(900)
    assert not [request for request in list(sent) if isinstance(request.body, dict) and request.body.get('limit') == 8]


def test_priority_out_of_range_is_clamped(connection: Connection, client: Client) -> None:
    for priority in (-5, 42):
        publish(connection, 'hello', priority=priority)
    assert sorted(item['priority'] for item in items(client)) == [0, 9]
    Inbox(connection).wait(2)


class Claims:
    """Counts the attempted claims, and those that lost to another consumer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
        self.tried = self.lost = 0
        lock, bulk = threading.Lock(), Client.bulk

        def counted(client: Client, docs: Any, **options: Any) -> Any:
            results = bulk(client, docs, **options)
            mine = [result for doc, result in zip(docs, results, strict=True) if doc.get('claimed')]
            with lock:
                self.tried += len(mine)
                self.lost += sum(result.is_conflict for result in mine)
            return results

        replace_in_clients(monkeypatch, database, 'bulk', counted)


@contextmanager
def consuming(connections: Sequence[Connection], prefetch: int) -> Iterator[Callable[[], Counter[Any]]]:
    """Consume the queue in a thread for each connection; at the end the function returns what all have received."""
    finished, inboxes = threading.Event(), [Inbox(connection, prefetch=prefetch) for connection in connections]

    def consume(inbox: Inbox) -> None:
        while not finished.is_set():
            inbox.drain(0.2)

    with ThreadPoolExecutor(len(inboxes)) as pool:
        running = [pool.submit(consume, inbox) for inbox in inboxes]
        try:
            yield lambda: Counter(body for inbox in inboxes for body in inbox.bodies)
        finally:
            finished.set()
    for each in running:
        each.result()


@pytest.mark.parametrize(('waits', 'prefetch'), [('messages', 16), ('consumers', 1)])
def test_each_message_goes_to_exactly_one_of_many_consumers(
    connect: Connect,
    client: Client,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    prefetch: int,
    waits: str,
) -> None:
    """Whoever waits for the other: the messages for consumers, or the consumers for messages."""
    count, publisher, claims = 60, connect(), Claims(monkeypatch, database)
    if waits == 'messages':
        publish_many(publisher, range(count))
    with consuming([connect() for _ in range(CONSUMERS)], prefetch) as got:
        for number in range(count if waits == 'consumers' else 0):
            publish(publisher, number)
        wait_for(lambda: not items(client), 'all messages to be acknowledged')
    assert got() == Counter(range(count))
    assert claims.tried >= count
    # Without a claim order there are six times as many conflicts; a busy machine has some.
    assert claims.lost < 2 * count


# -- claiming ahead


AHEAD = 5


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each channel count as fast until one of its messages has waited for too long."""
    monkeypatch.setattr(Throughput, 'ahead', lambda rate, limit, stock, now: 0 if rate._penalty else AHEAD)


def shelf(inbox: Inbox) -> list[Delivery]:
    return list(inbox.channel.credit.shelf)


def is_given_back(client: Client, claimed: int) -> bool:
    """Tell whether this number of messages is claimed, and the others wait without an attempt."""
    docs = items(client)
    waiting = [doc for doc in docs if doc['claimed'] is None]
    return len(docs) - len(waiting) == claimed and all(doc['attempts'] == 0 for doc in waiting)


@pytest.mark.usefixtures('fast')
def test_kombu_never_has_more_than_the_prefetch_count(connect: Connect) -> None:
    publish_many(connect(), range(20))
    inbox = Inbox(connect(), prefetch=2, ack=False)
    mailbox, seen, handled = inbox.connection.transport._mailbox, 0, 0
    while handled < 20:
        inbox.wait(handled + 1)
        assert len(inbox.channel.qos._tags) + len(mailbox) <= 2
        seen = max(seen, len(shelf(inbox)))
        inbox.messages[handled].ack()
        handled += 1
    assert seen > 0
    assert sorted(inbox.bodies) == list(range(20))


@pytest.mark.usefixtures('fast')
def test_messages_of_a_slow_consumer_go_to_an_idle_one_without_an_attempt(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(4))
    slow = Inbox(connect(), prefetch=1, ack=False)
    slow.wait(1)
    wait_for(lambda: is_given_back(client, claimed=1), 'the messages claimed ahead are given back')
    idle = Inbox(connect(), prefetch=4)
    idle.wait(3)
    assert sorted(slow.bodies + idle.bodies) == [0, 1, 2, 3]
    assert all(not message.delivery_info['redelivered'] for message in idle.messages)


@pytest.mark.usefixtures('fast')
def test_priorities_hold(connect: Connect) -> None:
    sent = [(priority, number) for number in range(3) for priority in (3, 0, 9, 5, 1)]
    publisher = connect()
    for priority, number in sent:
        publish_many(publisher, [[priority, number]], priority=priority)
    inbox = Inbox(connect(), prefetch=2)
    assert [priority for priority, _ in inbox.wait(len(sent))] == sorted((p for p, _ in sent), reverse=True)


@pytest.mark.usefixtures('fast')
@pytest.mark.parametrize(
    ('act', 'claimed'),
    [
        (lambda inbox: inbox.consumer.cancel(), 2),
        (lambda inbox: inbox.channel.basic_qos(0, 1, False), 2),
        (lambda inbox: inbox.connection.close(), 0),
    ],
    ids=['cancel', 'lower prefetch count', 'close'],
)
def test_messages_claimed_ahead_are_given_back_without_an_attempt(
    connect: Connect, client: Client, act: Callable[[Inbox], object], claimed: int
) -> None:
    publish_many(connect(), range(9))
    inbox = Inbox(connect(), prefetch=2, ack=False)
    inbox.wait(2)
    act(inbox)
    assert not shelf(inbox)
    wait_for(lambda: is_given_back(client, claimed), 'the others are given back')


@pytest.mark.usefixtures('fast')
def test_basic_get_of_another_channel_gets_what_is_claimed_ahead(connection: Connection) -> None:
    publish_many(connection, range(3))
    Inbox(connection, prefetch=1, ack=False).wait(1)
    with connection.channel() as channel:
        message = channel.basic_get('q')
        assert message is not None
        message.ack()
