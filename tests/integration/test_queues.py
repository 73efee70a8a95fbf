"""Queues: declare, count, purge and delete; temporary queues are deleted by workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from kombu.exceptions import ChannelError

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.queues import store
from kombu_couchdb.queues.store import MAX_BATCH_DOCS
from tests.conftest import wait_for
from tests.support import Inbox, eta, items, publish, publish_many


def queues(client: Client) -> set[str]:
    return {row['doc']['name'] for row in client.id_range('broker:queue:', docs=True)}


def test_declare(connect: Callable[..., Connection], client: Client) -> None:
    channel = connect().channel()
    with pytest.raises(ChannelError, match='unknown') as caught:
        channel.queue_declare('unknown', passive=True)
    assert int(caught.value.reply_code) == 404
    for passive in (False, False, True):
        declared = connect().channel().queue_declare('q', passive=passive)
        assert (declared.queue, declared.message_count, declared.consumer_count) == ('q', 0, 0)
    assert queues(client) == {'q'}
    names = {channel.queue_declare('').queue, channel.queue_declare().queue}
    assert (len(names), all(names)) == (2, True)


def test_size_counts_ready_messages(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    for number in range(5):
        publish(connection, number)
    publish(connection, 'elsewhere', 'q2')
    for seconds in (3600, 3700):
        publish(connection, 'later', headers=eta(seconds))
    publish(connection, 'overdue', headers=eta(-60))
    channel = connect().channel()
    assert channel.queue_declare('q', passive=False).message_count == 6
    inbox = Inbox(connect(), prefetch=2, ack=False)
    inbox.wait(2)
    assert channel.queue_declare('q').message_count == 4
    inbox.messages[0].reject()
    wait_for(lambda: len([i for i in items(client) if i.get('status')]) == 1)
    wait_for(lambda: channel.queue_declare('q').message_count == 3)


def test_purge(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    inbox = Inbox(connect(), prefetch=1, ack=False)
    for number in range(4):
        publish(connection, number)
    publish(connection, 'later', headers=eta(3600))
    publish(connection, 'elsewhere', 'q2')
    inbox.wait(1)
    assert connection.channel().queue_purge('q') == 4
    assert [(item['queue'], bool(item['claimed'])) for item in items(client)] == [('q', True), ('q2', False)]
    inbox.messages[0].ack()
    wait_for(lambda: len(items(client)) == 1)


def test_purge_of_more_than_one_batch(connection: Connection, client: Client) -> None:
    publish_many(connection, range(MAX_BATCH_DOCS + 10))
    channel, purged = connection.channel(), [0]
    # On a cluster, the view may be read from a copy that lags behind.

    def purge() -> bool:
        purged.append(channel.queue_purge('q'))
        return sum(purged) == MAX_BATCH_DOCS + 10

    wait_for(purge, 'all messages to be purged')
    assert not items(client)


@pytest.mark.parametrize('headers', [{}, eta(10**9)], ids=['at once', 'planned'])
def test_purge_keeps_what_is_published_meanwhile(
    connection: Connection, client: Client, monkeypatch: pytest.MonkeyPatch, headers: dict[str, Any]
) -> None:
    monkeypatch.setattr(store, 'MAX_BATCH_DOCS', 2)
    publish_many(connection, range(3), 'q', headers=headers)
    purge = store.Store(client).purging('q')
    assert next(purge) == 2
    with idempotent('a schedule'):  # the ids of its messages do not say when they were published
        publish(connection, 'derived', 'q', headers={**headers, 'id': 'task'})
    publish(connection, 'usual', 'q', headers=headers)
    assert sum(purge) == 1
    assert len(items(client)) == 2


def test_delete(connect: Callable[..., Connection], client: Client) -> None:
    connection, exchange = connect(), Exchange('direct')
    queue = Queue('q', exchange, routing_key='a')(connection.channel())
    queue.declare()
    publish(connection, 'hello')
    assert queue.delete() == 1
    assert not items(client)
    assert not queues(client)
    connection.Producer().publish('hello', exchange=exchange, routing_key='a')
    assert not items(client)


def test_delete_if_empty_or_unused(connect: Callable[..., Connection], client: Client) -> None:
    channel = connect().channel()
    channel.queue_declare('q')
    publish(connect(), 'scheduled', headers=eta(3600))
    channel.queue_delete('q', if_empty=True)
    assert queues(client) == {'q'}
    assert channel.queue_purge('q') == 1
    publish(connect(), 'runs')
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    channel.queue_delete('q', if_empty=True)
    assert len(items(client)) == 1
    inbox.messages[0].ack()
    wait_for(lambda: not items(client))
    channel.queue_delete('q', if_unused=True)
    assert queues(client) == {'q'}
    inbox.connection.release()
    channel.queue_delete('q', if_unused=True, if_empty=True)
    assert not queues(client)


def consumers_of(client: Client, queue: str) -> int:
    return sum(queue in row['doc']['queues'] for row in client.id_range('broker:consumer:', docs=True))


def test_auto_delete_queue_is_deleted_with_its_last_consumer(
    connect: Callable[..., Connection], client: Client
) -> None:
    first, second = (Inbox(connect(), Queue('temporary', auto_delete=True)) for _ in range(2))
    wait_for(lambda: consumers_of(client, 'temporary') == 2, 'the heartbeats of both consumers')
    first.consumer.cancel()
    wait_for(lambda: consumers_of(client, 'temporary') == 1, 'the first consumer to end')
    assert queues(client) == {'temporary'}
    publish(connect(), 'hello', 'temporary')
    second.wait(1)
    second.consumer.cancel()
    assert not queues(client)


def test_auto_delete_queue_is_deleted_with_its_connection(connect: Callable[..., Connection], client: Client) -> None:
    inbox = Inbox(connect(), Queue('temporary', Exchange('direct'), routing_key='a', auto_delete=True))
    inbox.connection.release()
    wait_for(lambda: not queues(client), 'the queue to be deleted')
    assert not client.id_range('broker:binding:')


def test_expired_queue_is_deleted(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    Queue('expiring', Exchange('direct'), routing_key='a', expires=1.0)(connection.channel()).declare()
    publish(connection, 'hello', 'expiring')
    Inbox(connect(visibility_timeout=1.5), 'other')
    wait_for(lambda: queues(client) == {'other'}, 'the queue to be deleted')
    wait_for(lambda: not items(client), 'its messages to be deleted')
    assert not client.id_range('broker:binding:')


def test_queue_in_use_does_not_expire(connect: Callable[..., Connection], client: Client) -> None:
    Inbox(connect(visibility_timeout=1.5), Queue('expiring', expires=1.0))
    Queue('unused', expires=1.0)(connect().channel()).declare()
    wait_for(lambda: 'unused' not in queues(client), 'the other queue to be deleted')
    assert queues(client) == {'expiring'}


NAMES = [
    'ünïcödé 😀',
    'with space',
    'a/b',
    '/',
    'a:b',
    'quote"\'`',
    'a+b',
    '100%',
    '%2F',
    '..',
    '_underscore',
    '[1,"x"]',
    'a?b#c&d=e',
    '\\back',
    'new\nline',
    'x' * 300,
]


def test_queue_names_of_any_characters(connect: Callable[..., Connection], client: Client) -> None:
    connection, exchange = connect(), Exchange('exchange ü/+%2F', type='direct')
    inbox = Inbox(connect(), *(Queue(name, exchange, routing_key=name) for name in NAMES))
    for name in NAMES:
        connection.Producer().publish(['bound', name], exchange=exchange, routing_key=name, serializer='json')
        publish(connection, ['straight', name], name)
    inbox.wait(2 * len(NAMES))
    assert sorted(inbox.bodies) == sorted([how, name] for how in ('bound', 'straight') for name in NAMES)
    wait_for(lambda: not items(client))
    inbox.consumer.cancel()
    for name in NAMES:
        assert connection.channel().queue_declare(name, passive=True).message_count == 0
        connection.channel().queue_delete(name)
    wait_for(lambda: not queues(client), 'the queues to be deleted')
