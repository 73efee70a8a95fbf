"""Claim order (highest priority, then oldest), exactly one consumer for each message, and few conflicts."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.http import encoded
from kombu_couchdb.errors import DocumentTooLarge
from tests.conftest import wait_for
from tests.support import Inbox, eta, items, publish, publish_many, replace_in_clients

from .conftest import Connect

CONSUMERS = 8


def test_highest_priority_first_then_oldest(connection: Connection) -> None:
    sent = [(priority, number) for number in range(3) for priority in random.Random(0).sample(range(10), 10)]
    for priority, number in sent:
        publish(connection, [priority, number], priority=priority)
    inbox = Inbox(connection, prefetch=1)
    assert inbox.wait(len(sent)) == [[priority, number] for priority in range(9, -1, -1) for number in range(3)]


def test_oldest_due_date_first(connection: Connection) -> None:
    publish(connection, 'now')
    publish(connection, 'since yesterday', headers=eta(-86400))
    publish(connection, 'since last year', headers=eta(-31e6))
    assert Inbox(connection, prefetch=1).wait(3) == ['since last year', 'since yesterday', 'now']


def test_urgent_message_is_delivered_before_a_long_queue(connect: Connect, client: Client) -> None:
    publisher = connect()
    publish_many(publisher, range(200))
    inbox = Inbox(connect(), prefetch=1, ack=False)
    inbox.wait(1)
    publish(publisher, 'urgent', priority=9)
    # The consumer may have read some candidates ahead, which it uses for at most a second.
    threading.Event().wait(3)
    inbox.messages[0].ack()
    assert inbox.wait(2)[1] == 'urgent'


@pytest.mark.parametrize('priority', [-5, 42])
def test_priority_out_of_range_is_clamped(connection: Connection, client: Client, priority: int) -> None:
    publish(connection, 'hello', priority=priority)
    assert items(client)[0]['priority'] == (0 if priority < 0 else 9)
    Inbox(connection).wait(1)


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


@pytest.mark.parametrize('prefetch', [1, 16])
@pytest.mark.parametrize('waits', ['messages', 'consumers'])
def test_each_message_goes_to_exactly_one_of_many_consumers(
    connect: Connect,
    client: Client,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    prefetch: int,
    waits: str,
) -> None:
    """Whoever waits for the other: the messages for consumers, or the consumers for messages."""
    count, publisher, claims = 200, connect(), Claims(monkeypatch, database)
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


def test_shares_of_busy_and_stopped_consumers_are_claimed_by_others(connect: Connect, client: Client) -> None:
    count, prefetch = 600, 16
    publish_many(connect(), range(count))
    busy = Inbox(connect(), ack=False, prefetch=prefetch)
    busy.drain_until(lambda: len(busy.messages) == prefetch, 'the busy consumer to use its credit')
    with consuming([connect() for _ in range(2)], prefetch) as got:
        wait_for(got, 'the others to work')
        stopped = Inbox(connect(), prefetch=prefetch)
        stopped.drain_until(lambda: stopped.messages or not items(client), 'the third consumer to work')
        stopped.connection.release()  # it has prefetched more messages
        wait_for(lambda: len(items(client)) == prefetch, 'the shares of the others to be claimed')
        busy.connection.release()
        wait_for(lambda: not items(client), 'all messages to be acknowledged')
    assert got() + Counter(stopped.bodies) == Counter(range(count))


def test_busy_queue_does_not_delay_a_quiet_one(connect: Connect, client: Client) -> None:
    publisher = connect()
    publish_many(publisher, range(400), to='busy')
    inbox = Inbox(connect(), 'busy', 'quiet', prefetch=4)
    inbox.wait(50)
    publish(publisher, 'hello', to='quiet')
    inbox.wait(401)
    assert 'hello' in inbox.bodies
    publish(publisher, 'again', to='quiet')
    assert inbox.wait(402)[-1] == 'again'


def test_claims_are_split_if_a_request_is_too_large(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may limit the size of requests. A message that is too large stays in the queue and blocks no other."""
    publisher, connection = connect(), connect()
    publish(publisher, 'x' * 3000)
    publish_many(publisher, range(20))
    transport = connection.transport
    request, sizes = transport.couchdb.request, list[int]()

    def narrow(method: str, path: str | None, params: Any = None, body: Any = None, **kwargs: Any) -> Any:
        if path == '/_bulk_docs':
            sizes.append(len(encoded(body)))
            if sizes[-1] > 3000:
                raise DocumentTooLarge('the proxy takes no more')
        return request(method, path, params, body, **kwargs)

    monkeypatch.setattr(transport.couchdb, 'request', narrow)
    channel = connection.channel()
    first = channel.basic_get('q')
    assert first.decode() == 0
    first.ack()
    inbox = Inbox(connection)
    assert sorted(inbox.wait(19)) == list(range(1, 20))
    assert max(sizes) > 3000
    wait_for(lambda: len(items(client)) == 1, 'the acks')
    assert items(client)[0]['claimed'] is None
