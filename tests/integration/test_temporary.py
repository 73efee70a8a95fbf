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
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.leases import housekeeping
from kombu_couchdb.leases.lease import Unchanged
from kombu_couchdb.transport import temporary_queues
from tests.conftest import wait_for
from tests.support import Inbox, Peer, Request, eta, items, publish, replace_in_clients, run_python

DIRECT, NEWS = Exchange('direct', type='direct'), Exchange('news', type='fanout')

#: Options with which a consumer sweeps every half second.
SWEEPS = {'visibility_timeout': 1.5}


def queues(client: Client) -> set[str]:
    return {row['doc']['name'] for row in client.id_range('broker:queue:', docs=True)}


def bindings(client: Client) -> list[str]:
    return [
        row['doc']['queue'] for row in client.id_range('broker:binding:', docs=True) if row['doc']['type'] == 'Binding'
    ]


def sweep_now(connection: Connection) -> None:
    """Let the consumer of a connection sweep in its next pass."""
    consumer = connection.transport.consumer
    consumer._cycle.sweeper._next = float('-inf')
    consumer.unacked.wakeup.set()


# -- paused consumers


@pytest.mark.parametrize('fanout', [None, 'news'])
def test_paused_consumer_declares_its_queue_again(
    url: str, connect: Callable[..., Connection], client: Client, fanout: str | None
) -> None:
    Inbox(connect(**SWEEPS), 'other')  # this consumer sweeps
    with Peer(url, ack=True, queue_name='temporary', fanout=fanout, auto_delete=True, options=SWEEPS) as peer:
        wait_for(lambda: 'temporary' in queues(client))
        peer.signal(signal.SIGSTOP)
        wait_for(lambda: 'temporary' not in queues(client), 'the queue to be deleted')
        peer.signal(signal.SIGCONT)
        wait_for(lambda: 'temporary' in queues(client), 'the queue to be declared again')
        publish(connect(), 'hello', 'temporary')
        assert peer.next()['got'] == 'hello'
        if fanout:
            connect().Producer().publish('to all', exchange=fanout, serializer='json')
            assert peer.next()['got'] == 'to all'


def test_bindings_are_restored_with_their_queue(connect: Callable[..., Connection], client: Client) -> None:
    inbox = Inbox(connect(), Queue('temporary', DIRECT, routing_key='k', auto_delete=True))
    [binding] = client.id_range('broker:binding:', docs=True)
    [queue] = client.id_range('broker:queue:', docs=True)
    # As a sweeper does that is wrong about the queue:
    client.bulk([{'_id': row['id'], '_rev': row['doc']['_rev'], '_deleted': True} for row in (queue, binding)])
    wait_for(
        lambda: bindings(client) == ['temporary'] and queues(client) == {'temporary'},
        'queue and binding to be declared again',
    )
    connect().Producer().publish('hello', exchange='direct', routing_key='k', serializer='json')
    assert inbox.wait(1) == ['hello']


def test_explicitly_deleted_queues_are_not_declared_again(connect: Callable[..., Connection], client: Client) -> None:
    inbox = Inbox(connect(), 'durable', Queue('temporary', auto_delete=True), Queue('last', auto_delete=True))
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


def test_connection_that_closes_in_an_outage_warns_once(
    connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    temporaries = connection.transport.temporary_queues
    inbox = Inbox(connection, Queue('own', exclusive=True))

    def fail(queue: str) -> bool:
        raise ServerUnavailable('no')

    monkeypatch.setattr(connection.transport, 'has_consumer', fail)
    inbox.consumer.cancel()
    assert temporaries.in_outage
    monkeypatch.setattr(temporary_queues, '_OUTAGE_SECONDS', 0.0)
    connection.close()
    assert caplog.text.count('could not be deleted; it is deleted when it expires') == 1
    assert not temporaries.in_outage  # that was a while ago


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
    name = 'publish' if moment == 'before it is stored' else 'delete_without_queue'
    original = getattr(store, name)

    def late(docs: Any, **again: bool) -> Any:
        assert [doc['queue'] for doc in docs] == ['reply']
        receiver.queue_delete('reply')
        return original(docs, **again)

    monkeypatch.setattr(store, name, late)
    worker.Producer().publish('pong', exchange='direct', routing_key='k', serializer='json')
    assert (items(client), queues(client), bindings(client)) == ([], set(), [])


def test_reply_to_a_queue_that_is_declared_again_is_kept(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, worker = connect(), connect()
    reply_queue()(receiver.default_channel).declare()
    store = worker.default_channel.connection.store
    publish_docs = store.publish

    def late(docs: Any, **again: bool) -> None:
        receiver.default_channel.queue_delete('reply')
        publish_docs(docs, **again)
        reply_queue()(receiver.default_channel).declare()

    monkeypatch.setattr(store, 'publish', late)
    worker.Producer().publish('pong', exchange='direct', routing_key='k', serializer='json')
    assert Inbox(receiver, reply_queue()).wait(1) == ['pong']


@pytest.mark.parametrize('exchange', ['direct', ''], ids=['direct exchange', 'default exchange'])
@pytest.mark.parametrize('release', [lambda inbox: inbox.consumer.cancel(), lambda inbox: inbox.connection.release()])
def test_message_that_a_consumer_releases_late_is_deleted_with_its_queue(
    connect: Callable[..., Connection],
    client: Client,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    exchange: str,
    release: Callable[[Inbox], object],
) -> None:
    """The consumer has claimed a message that kombu never received; it writes the release after the queue is gone."""
    bulk = Client.bulk

    def late(self: Client, docs: Any, **kwargs: Any) -> Any:
        if any(doc.get('type') == 'WorkItem' and doc.get('claimed') is None for doc in docs):
            wait_for(lambda: not queues(client), 'the queue to be deleted')
        return bulk(self, docs, **kwargs)

    inbox = Inbox(connect(), reply_queue())
    key = 'k' if exchange else 'reply'
    connect().Producer().publish('pong', exchange=exchange, routing_key=key, serializer='json')
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
    for number in range(12):
        publish(connect(), number, 'temporary')
        old, inbox = inbox, Inbox(connect(), queue, ack=number > 10)
        old.consumer.cancel()
        assert queues(client) == {'temporary'}, f'after {number} consumers'
        old.connection.release()
    inbox.drain_until(lambda: not items(client), 'all messages to be delivered')


def test_new_consumer_of_another_process_keeps_the_queue(
    url: str, connect: Callable[..., Connection], client: Client
) -> None:
    inbox = Inbox(connect(), Queue('temporary', auto_delete=True))
    with Peer(url, ack=True, queue_name='temporary', auto_delete=True) as peer:
        inbox.consumer.cancel()
        assert queues(client) == {'temporary'}
        publish(connect(), 'hello', 'temporary')
        assert peer.next()['got'] == 'hello'


def test_consumer_starts_during_an_outage(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that cannot write in time that it uses the queue consumes all the same."""
    connection = connect(request_timeout=0.5)
    queue = Queue('temporary', auto_delete=True)
    queue(connection.default_channel).declare()
    transport, away = connection.transport, [True]
    bulk = transport.couchdb.bulk

    def refuse(docs: Any, **kwargs: Any) -> Any:
        if away:
            raise ServerUnavailable('away')
        return bulk(docs, **kwargs)

    monkeypatch.setattr(transport.couchdb, 'bulk', refuse)
    inbox = Inbox(connection, Queue('temporary', auto_delete=True, no_declare=True))
    away.clear()
    publish(connect(), 'hello', 'temporary')
    assert inbox.wait(1) == ['hello']


def test_sweeper_checks_for_new_consumers_before_it_deletes_a_queue(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that subscribes during a sweep is not in the data that the sweep read at its start."""
    sweeper, late = connect(), list[Inbox]()
    Inbox(sweeper, 'other')
    Queue('expiring', expires=0.001)(connect().channel()).declare()
    monkeypatch.setattr(housekeeping, 'GRACE_SECONDS', 0.0)
    monkeypatch.setattr(sweeper.transport.consumer._cycle.sweeper, '_overdue', Unchanged(0.0))
    store = sweeper.transport.consumer._cycle._store
    leases = store.leases

    def leases_and_subscription() -> Any:
        found = leases()
        if 'expiring' in found['queue'] and not late:
            late.append(Inbox(connect(), Queue('expiring', no_declare=True)))
            wait_for(
                lambda: any(
                    'expiring' in row['doc']['queues'] for row in client.id_range('broker:consumer:', docs=True)
                )
            )
        return found

    monkeypatch.setattr(store, 'leases', leases_and_subscription)

    def extended() -> bool:
        sweep_now(sweeper)
        return bool(late) and client.get('broker:queue:expiring')['expires'] > time.time() + 60

    wait_for(extended, 'the lifetime of the queue to be extended')


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


def test_auto_delete_queue_is_deleted_by_a_consumer_that_declares_it_durable(
    connect: Callable[..., Connection], client: Client
) -> None:
    first = Inbox(connect(), Queue('temporary', auto_delete=True))
    second = connect()
    second.connect()
    wait_for(lambda: not second.transport.topology.is_fresh, 'what was seen to be trusted no longer')
    last = Inbox(second, Queue('temporary'))
    wait_for(
        lambda: sum('temporary' in row['doc']['queues'] for row in client.id_range('broker:consumer:', docs=True)) == 2
    )
    first.connection.release()
    assert queues(client) == {'temporary'}
    last.consumer.cancel()
    assert not queues(client)


# -- a forked child


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')
@pytest.mark.parametrize(
    'act',
    [
        'inbox.consumer.cancel()',
        'inbox.channel.close()',
        'connection.release()',
        'connection.collect()',
        'del connection, inbox',
    ],
)
def test_forked_child_keeps_the_queue_of_its_parent(url: str, act: str) -> None:
    run_python(
        f"""
import os
import kombu_couchdb
from kombu import Connection, Exchange, Queue
from kombu_couchdb.couchdb.client import Client
from tests.support import Inbox, publish
connection = Connection(os.environ['URL'])
inbox = Inbox(connection, Queue('temporary', Exchange('direct'), routing_key='k', auto_delete=True))
child = os.fork()
if not child:
    try:
        {act}
    finally:
        os._exit(0)
os.waitpid(child, 0)
with Connection(os.environ['URL']) as other:
    other.Producer().publish('hello', exchange='direct', routing_key='k', serializer='json')
    assert other.default_channel.queue_declare('temporary', passive=True)
assert inbox.wait(1) == ['hello']
connection.release()
""",
        URL=url,
    )


# -- basic_get


def end_of(client: Client, queue: str) -> float:
    return float(client.get(f'broker:queue:{queue}')['expires'])


@pytest.mark.parametrize('declares', [True, False])
def test_basic_get_extends_the_lifetime_of_a_queue(
    connect: Callable[..., Connection], client: Client, sent: list[Request], declares: bool
) -> None:
    connection = connect()
    queue = Queue('expiring', expires=3600)(connection.default_channel)
    queue.declare()
    before = end_of(client, 'expiring')
    reader = connection if declares else connect()
    reader.connect()
    sent.clear()
    for number in range(3):
        publish(connection, number, 'expiring')
        message = wait_for(lambda: Queue('expiring')(reader.default_channel).get(no_ack=True), 'a message')
        assert message.decode() == number
    assert end_of(client, 'expiring') >= before + 900
    assert sum(doc.get('type') == 'Queue' for request in sent for doc in request.docs) == 1


def test_basic_get_writes_nothing_for_a_queue_without_a_lifetime(
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    Queue('q')(connect().default_channel).declare()
    own, other = connect(), connect()
    Queue('q')(own.default_channel).declare()
    other.connect()
    for reader, reads in ((own, 0), (other, 1)):
        sent.clear()
        for _ in range(3):
            assert reader.default_channel.basic_get('q') is None
        assert sum('queue' in str(request.path) for request in sent) == reads


def test_queue_used_during_a_sweep_is_kept(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper, getter = connect(), connect()
    Inbox(sweeper, 'other')
    queue = Queue('expiring', expires=0.001)
    queue(connect().channel()).declare()
    for number in range(7):
        publish(getter, number, 'expiring')
    monkeypatch.setattr(housekeeping, 'GRACE_SECONDS', 0.0)
    monkeypatch.setattr(sweeper.transport.consumer._cycle.sweeper, '_overdue', Unchanged(0.0))
    topology, got = sweeper.transport.topology, list[Any]()
    delete = topology.delete_unused

    def get_and_delete(doc: Any) -> Any:
        got.append(getter.default_channel.basic_get('expiring'))
        return delete(doc)

    monkeypatch.setattr(topology, 'delete_unused', get_and_delete)

    def swept() -> list[Any]:
        sweep_now(sweeper)
        return got

    wait_for(swept, 'the sweep')
    publish(connect(), 'done', 'other')
    monkeypatch.undo()
    assert queues(client) == {'expiring', 'other'}
    assert len([item for item in items(client) if item['queue'] == 'expiring']) == 7


# -- empty queues


def test_queue_with_scheduled_or_claimed_messages_is_not_empty(
    connect: Callable[..., Connection], client: Client
) -> None:
    channel = connect().channel()
    channel.queue_declare('q')
    publish(connect(), 'later', headers=eta(3600))
    assert channel.queue_delete('q', if_empty=True) == 0
    assert len(items(client)) == 1
    assert channel.queue_purge('q') == 1
    publish(connect(), 'runs')
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    assert channel.queue_delete('q', if_empty=True) == 0
    assert queues(client) == {'q'}
    inbox.messages[0].ack()
    wait_for(lambda: not items(client))
    channel.queue_delete('q', if_empty=True)
    assert not queues(client)
