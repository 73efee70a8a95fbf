"""Temporary queues: kept while they are used, deleted afterwards, and declared again by consumers that were paused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases.housekeeping import UnusedQueues
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Peer, Request, items, publish, replace_in_clients, run_python

DIRECT, NEWS = Exchange('direct', type='direct'), Exchange('news', type='fanout')

#: Options with which a consumer sweeps every half second.
SWEEPS = {'visibility_timeout': 1.5}


def queues(client: Client) -> set[str]:
    return {row['doc']['name'] for row in client.id_range('broker:queue:', docs=True)}


def bindings(client: Client) -> list[str]:
    return [
        row['doc']['queue'] for row in client.id_range('broker:binding:', docs=True) if row['doc']['type'] == 'Binding'
    ]


# -- paused consumers


def test_paused_consumer_declares_its_queue_again(url: str, connect: Callable[..., Connection], client: Client) -> None:
    Inbox(connect(**SWEEPS), 'other')  # this consumer sweeps
    with Peer(url, ack=True, queue_name='temporary', fanout='news', auto_delete=True, options=SWEEPS) as peer:
        wait_for(lambda: 'temporary' in queues(client))
        peer.signal(signal.SIGSTOP)
        wait_for(lambda: 'temporary' not in queues(client), 'the queue to be deleted')
        peer.signal(signal.SIGCONT)
        wait_for(lambda: 'temporary' in queues(client), 'the queue to be declared again')
        publish(connect(), 'hello', 'temporary')
        assert peer.next()['got'] == 'hello'
        connect().Producer().publish('to all', exchange='news', serializer='json')
        assert peer.next()['got'] == 'to all'


def test_explicitly_deleted_queues_are_not_declared_again(connect: Callable[..., Connection], client: Client) -> None:
    own = [Queue(name, auto_delete=True) for name in ('temporary', 'last')]
    inbox = Inbox(connect(**SWEEPS), 'durable', *own)
    connect().channel().queue_delete('durable')
    inbox.channel.queue_delete('temporary')
    [last] = client.id_range('broker:queue:last', docs=True)
    client.bulk([{'_id': last['id'], '_rev': last['doc']['_rev'], '_deleted': True}])
    wait_for(lambda: 'last' in queues(client), 'the last queue to be declared again')
    assert queues(client) == {'last'}


@pytest.mark.parametrize('exclusive', [True, False])
def test_exclusive_queue_ends_with_its_connection(
    connect: Callable[..., Connection], client: Client, exclusive: bool
) -> None:
    """Also if nothing has subscribed to it; a queue that is only deleted with its last consumer stays, as in AMQP."""
    connection = connect()
    Queue('own', DIRECT, routing_key='k', exclusive=exclusive, auto_delete=True)(connection.channel()).declare()
    publish(connection, 'hello', 'own')
    connection.release()
    assert (queues(client), len(bindings(client)), len(items(client))) == (
        (set(), 0, 0) if exclusive else ({'own'}, 1, 1)
    )


def test_exclusive_queue_that_another_connection_consumes_stays(
    connect: Callable[..., Connection], client: Client
) -> None:
    connection, queue = connect(), Queue('own', exclusive=True)
    queue(connection.channel()).declare()
    inbox = Inbox(connect(), queue)
    connection.release()
    publish(connect(), 'hello', 'own')
    assert inbox.wait(1) == ['hello']


# -- messages that come too late


def reply_queue(**options: Any) -> Queue:
    """Return a queue as kombu declares it for replies to remote control."""
    return Queue('reply', DIRECT, routing_key='k', auto_delete=True, expires=10, **options)


@pytest.mark.parametrize('moment', ['before it is stored', 'after it is stored'])
def test_reply_to_a_queue_that_is_deleted_meanwhile_is_dropped(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    receiver, worker = connect().channel(), connect()
    reply_queue()(receiver).declare()
    store = worker.default_channel.connection.store
    name = 'publish_each' if moment == 'before it is stored' else 'delete_without_queue'
    original = getattr(store, name)

    def late(docs: Any) -> Any:
        assert [doc['queue'] for doc in docs] == ['reply']
        receiver.queue_delete('reply')
        return original(docs)

    monkeypatch.setattr(store, name, late)
    worker.Producer().publish('pong', exchange='direct', routing_key='k', serializer='json')
    assert (items(client), queues(client), bindings(client)) == ([], set(), [])


@pytest.mark.parametrize('release', [lambda inbox: inbox.consumer.cancel(), lambda inbox: inbox.connection.release()])
def test_message_that_a_consumer_releases_late_is_deleted_with_its_queue(
    connect: Callable[..., Connection],
    client: Client,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    release: Callable[[Inbox], object],
) -> None:
    """The consumer has claimed a message that kombu never received; it writes the release after the queue is gone."""
    bulk = Client.bulk

    def late(self: Client, docs: Any, **kwargs: Any) -> Any:
        if any(doc.get('type') == 'WorkItem' and doc.get('claimed') is None for doc in docs):
            wait_for(lambda: not queues(client), 'the queue to be deleted')
        return bulk(self, docs, **kwargs)

    inbox = Inbox(connect(), reply_queue())
    connect().Producer().publish('pong', exchange='direct', routing_key='k', serializer='json')
    wait_for(lambda: items(client)[0]['claimed'], 'the claim')
    replace_in_clients(monkeypatch, database, 'bulk', late)
    release(inbox)
    wait_for(lambda: not items(client), 'the message to be deleted')


def test_message_for_a_temporary_queue_expires_as_its_queue_says(
    connect: Callable[..., Connection], client: Client
) -> None:
    reply_queue(message_ttl=300)(connect().channel()).declare()
    connect().Producer().publish('pong', exchange='direct', routing_key='k', serializer='json')
    connect().Producer().publish('pong', exchange='direct', routing_key='k', serializer='json', expiration=7)
    lifetimes = sorted(round(item['expires'] - item['published']) for item in items(client))
    assert lifetimes == [7, 300]


# -- consumers that start and end at the same time


def test_new_consumer_keeps_the_queue_of_a_leaving_one(connect: Callable[..., Connection], client: Client) -> None:
    queue = Queue('temporary', auto_delete=True)
    inbox = Inbox(connect(), queue)
    for number in range(4):
        publish(connect(), number, 'temporary')
        old, inbox = inbox, Inbox(connect(), queue, ack=number == 3)
        old.consumer.cancel()
        assert queues(client) == {'temporary'}, f'after {number} consumers'
        old.connection.release()
    inbox.drain_until(lambda: not items(client), 'all messages to be delivered')


# -- declarations that differ


def test_durable_queue_is_not_deleted_by_a_consumer_that_declares_it_auto_delete(
    connect: Callable[..., Connection], client: Client
) -> None:
    Queue('durable')(connect().channel()).declare()
    for number in range(4):
        publish(connect(), number, 'durable')
    inbox = Inbox(connect(), Queue('durable', auto_delete=True), prefetch=1, ack=False)
    inbox.wait(1)
    inbox.connection.release()
    assert queues(client) == {'durable'}
    assert len(items(client)) == 4


# -- a forked child


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')
def test_forked_child_keeps_the_queue_of_its_parent(url: str) -> None:
    run_python(
        """
import os
import kombu_couchdb
from kombu import Connection, Exchange, Queue
from tests.support import Inbox, publish
connection = Connection(os.environ['URL'])
inbox = Inbox(connection, Queue('temporary', Exchange('direct'), routing_key='k', auto_delete=True))
for act in (
    'inbox.consumer.cancel()',
    'inbox.channel.close()',
    'connection.release()',
    'connection.collect()',
    'del connection, inbox',
):
    child = os.fork()
    if not child:
        try:
            exec(act)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with Connection(os.environ['URL']) as other:
        other.Producer().publish(act, exchange='direct', routing_key='k', serializer='json')
        assert other.default_channel.queue_declare('temporary', passive=True)
    assert inbox.wait(len(inbox.messages) + 1)[-1] == act
connection.release()
""",
        URL=url,
    )


# -- basic_get


def end_of(client: Client, queue: str) -> float:
    return float(client.get(f'broker:queue:{queue}')['expires'])


def test_basic_get_extends_the_lifetime_of_a_queue(
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    Queue('expiring', expires=3600)(connect().default_channel).declare()
    before, reader = end_of(client, 'expiring'), connect()
    reader.connect()
    sent.clear()
    for number in range(3):
        publish(connect(), number, 'expiring')
        message = wait_for(lambda: Queue('expiring')(reader.default_channel).get(no_ack=True), 'a message')
        assert message.decode() == number
    assert end_of(client, 'expiring') >= before + 900
    assert sum(doc.get('type') == 'Queue' for request in sent for doc in request.docs) == 1


def test_queue_used_during_a_sweep_is_kept(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    getter, sweeper = connect(), connect().default_channel.connection
    Queue('expiring', expires=0.001)(connect().channel()).declare()
    publish(getter, 'hello', 'expiring')
    topology, got = sweeper.topology, list[Any]()
    delete = topology.delete_unused

    def get_and_delete(doc: Any) -> Any:
        got.append(getter.default_channel.basic_get('expiring').decode())
        return delete(doc)

    monkeypatch.setattr(topology, 'delete_unused', get_and_delete)
    UnusedQueues(sweeper.store, topology).delete(
        ['expiring'], end_of(client, 'expiring') + 10, time.monotonic() + PATIENCE
    )
    assert got == ['hello']
    assert (queues(client), len(items(client))) == ({'expiring'}, 1)
