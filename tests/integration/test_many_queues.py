"""What many queues cost: those that a worker consumes, those that others have declared, and the bodies that nobody needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import QUEUE
from kombu_couchdb.queues.routing import exchange_prefix
from tests.support import Inbox, Request, items, publish, publish_many

QUEUES, EACH = 50, 8


def consume(connect: Callable[..., Connection], sent: list[Request], names: list[str], each: int) -> int:
    """Publish so many messages to each queue, take all of them with one consumer, and return how many requests that took."""
    publisher = connect()
    for name in names:
        publish_many(publisher, range(each), to=name)
    connection = connect()
    Inbox(connection, *names, prefetch=64, ack=False)  # declares, and claims a few: the index is up to date then
    connection.release()
    inbox = Inbox(connect(), *names, prefetch=64)
    sent.clear()
    inbox.wait(each * len(names))
    return len(sent)


def test_a_worker_of_many_queues_needs_hardly_more_requests_than_of_one(
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    one = consume(connect, sent, ['q'], QUEUES * EACH)
    many = consume(connect, sent, [f'q{number}' for number in range(QUEUES)], EACH)
    assert many < 3 * one + 20  # it was a hundred times as many: a few for each queue in each turn


def test_queues_that_others_declared_cost_a_consumer_nothing(
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    names = [f'other{number}' for number in range(200)]
    client.bulk(
        [
            {
                '_id': QUEUE + name,
                'type': 'Queue',
                'name': name,
                'arguments': {},
                'auto_delete': False,
                'lifetime': None,
                'expires': None,
            }
            for name in names
        ]
    )
    client.bulk(
        [
            {
                '_id': f'{exchange_prefix(name)}"{name}","{name}"]',
                'type': 'Binding',
                'exchange': name,
                'routing_key': name,
                'pattern': None,
                'queue': name,
            }
            for name in names
        ]
    )
    publish(connect(), 'hello')
    connection = connect()
    connection.connect()
    sent.clear()
    inbox = Inbox(connection)
    assert inbox.wait(1) == ['hello']
    asked = [name for request in sent if request.path == '/_bulk_get' for name in request.body['docs']]
    assert not [one for one in asked if 'other' in one['id']]


def test_purging_and_trimming_read_no_message(
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    connection = connect()
    publish_many(connection, ['x' * 1000] * 20)
    sent.clear()
    assert connection.transport.store.trim('q', 15) == 5
    assert connection.default_channel.queue_purge('q') == 15
    reads, sent[:] = list(sent), []
    assert items(client) == []
    assert not [request for request in reads if request.path in ('/_bulk_get', '/_all_docs')]


def test_what_changed_since_the_view_saw_it_is_not_purged(
    connect: Callable[..., Connection], client: Client, monkeypatch: Any
) -> None:
    connection = connect()
    publish_many(connection, range(2))
    store = connection.transport.store
    view, bulk = store.client.view, store.client.bulk

    def claimed_meanwhile(*args: Any, **kwargs: Any) -> Any:
        rows = view(*args, **kwargs)
        monkeypatch.setattr(store.client, 'view', view)
        [first, _] = items(client)
        bulk([{**first, 'claimed': {'by': 'broker:consumer:another', 'date': 1.0}}])
        return rows

    monkeypatch.setattr(store.client, 'view', claimed_meanwhile)
    assert store.purge('q') == 1
    assert [item['claimed']['by'] for item in items(client)] == ['broker:consumer:another']
