"""Broadcasts through fanout exchanges: every queue gets each one in order, and old ones leave no tombstones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue, binding

from kombu_couchdb.couchdb.changes import open_feed
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import BROADCAST
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.queues.fanout import AFTER
from tests.conftest import wait_for
from tests.support import Inbox, Peer, Request, items, publish, publish_many, replace_in_clients

from .conftest import Connect

NEWS, SPORTS = Exchange('news', type='fanout'), Exchange('sports', type='fanout')


def listen(connection: Connection, queue: str) -> Inbox:
    return Inbox(connection, Queue(queue, NEWS, auto_delete=True))


def broadcast(connection: Connection, *bodies: object) -> None:
    with connection.Producer() as producer:
        for body in bodies:
            producer.publish(body, exchange=NEWS, routing_key='', serializer='json', declare=[NEWS])


def deleted(client: Client) -> int:
    return sum(bool(row.get('deleted')) for row in client.request('GET', '/_changes')['results'])


@pytest.mark.parametrize('no_ack', [False, True])
def test_broadcasts_are_received_one_at_a_time(connect: Connect, client: Client, no_ack: bool) -> None:
    """`basic_get` from a queue that is bound to a fanout exchange, without a subscription."""
    queue = Queue('alone', NEWS)(connect().channel())
    queue.declare()
    broadcast(connect(), 1, 2)
    for expected in (1, 2):
        message = wait_for(lambda: queue.get(no_ack=no_ack), 'the broadcast')
        assert message.payload == expected
        if not no_ack:
            message.ack()
    assert queue.get(no_ack=no_ack) is None


def test_broadcasts_across_processes(url: str, connect: Connect, client: Client) -> None:
    here = listen(connect(), 'here')
    with (
        Peer(url, ack=True, queue_name='there', fanout='news') as there,
        Peer(url, ack=True, queue_name='yonder', fanout='news') as yonder,
    ):
        broadcast(connect(), 'one', 'two')
        for peer in (there, yonder):
            assert [peer.next()['got'] for _ in range(2)] == ['one', 'two']
    assert here.wait(2) == ['one', 'two']


def test_100_broadcasts_in_order(connect: Connect, client: Client) -> None:
    inboxes = [listen(connect(), f'listener-{number}') for number in range(2)]
    broadcast(connect(), *range(100))
    for inbox in inboxes:
        # The changes feeds of cluster nodes may swap two broadcasts.
        assert (sorted if client.is_cluster() else list)(inbox.wait(100)) == list(range(100))


def test_new_queue_gets_no_old_broadcasts(connect: Connect, client: Client) -> None:
    publisher, early = connect(), listen(connect(), 'early')
    broadcast(publisher, 'old')
    early.wait(1)
    late = listen(connect(), 'late')
    late.stays(0, 0.5)
    broadcast(publisher, 'new')
    assert late.wait(1) == ['new']
    assert early.wait(2) == ['old', 'new']
    late.consumer.cancel()
    broadcast(publisher, 'newer')
    assert early.wait(3) == ['old', 'new', 'newer']
    late.stays(1, 0.3)


def test_old_broadcasts_are_overwritten_without_tombstones(
    connect: Connect, broadcasts: Client, sent_broadcasts: list[Request]
) -> None:
    publisher = connect(fanout_retention=0.2)
    inbox = listen(connect(fanout_retention=0.2), 'listener')
    malformed = {'_id': f'{BROADCAST}malformed', 'expires': 'long ago'}
    rev = broadcasts.put(malformed)
    for number in range(30):
        broadcast(publisher, number)
        inbox.wait(number + 1)
        inbox.drain(0.02)
    assert inbox.bodies == list(range(30))
    assert 0 < len(broadcasts.id_range('broker:broadcast:')) < 30
    assert broadcasts.get(malformed['_id']) == {**malformed, '_rev': rev}
    assert deleted(broadcasts) == 0
    assert len([doc for request in sent_broadcasts for doc in request.docs if doc.get('type') == 'Broadcast']) == 30


@pytest.mark.parametrize(
    ('stored', 'reconnects'), [(False, False), (True, False), (True, True)], ids=['lost', 'stored', 'reconnected']
)
def test_broadcast_that_is_sent_again_after_an_error_is_received_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, stored: bool, reconnects: bool
) -> None:
    """The first attempt counts: if the next broadcast had the same number, listeners would ignore it."""
    inbox, publisher = listen(connect(), 'listener'), connect()
    broadcast(publisher, 'first')
    channel, client = publisher.channel(), publisher.transport.broadcasts.client
    message = channel.prepare_message('"again"', content_type='application/json', content_encoding='utf-8')
    create = client.create_once

    def create_and_fail(docs: list[dict[str, object]]) -> None:
        if stored:
            create(docs)
        raise ServerUnavailable('no answer')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'create_once', create_and_fail)
        with pytest.raises(ServerUnavailable):
            channel.basic_publish(message, 'news', '')
    (connect().channel() if reconnects else channel).basic_publish(message, 'news', '')
    broadcast(publisher, 'last')
    assert sorted(inbox.wait(3)) == ['again', 'first', 'last']
    inbox.stays(3, 0.3)


def test_broadcast_is_one_write_for_any_number_of_queues(
    connect: Connect, client: Client, sent: list[Request], sent_broadcasts: list[Request]
) -> None:
    broadcast(connect(), 'into the void')
    assert not items(client)
    inboxes = [listen(connect(), f'listener-{number}') for number in range(4)]
    sent.clear()
    sent_broadcasts.clear()
    broadcast(connect(), 'hello')
    for inbox in inboxes:
        assert inbox.wait(1) == ['hello']
    inboxes[0].stays(1, 0.3)
    assert not [doc for request in sent for doc in request.docs if doc.get('type') != 'Consumer']
    assert len([doc for request in sent_broadcasts for doc in request.docs if doc.get('type') == 'Broadcast']) == 1


def both(connection: Connection) -> Inbox:
    """Bind one queue to two exchanges."""
    queue = Queue('listener', [binding(NEWS), binding(SPORTS)], auto_delete=True)
    return Inbox(connection, queue)


def test_queue_unbound_from_one_exchange_still_gets_the_other(connect: Connect, client: Client) -> None:
    inbox, publisher = both(connect()), connect()
    inbox.channel.queue_unbind('listener', 'news')
    for exchange in (NEWS, SPORTS):
        publisher.Producer().publish(exchange.name, exchange=exchange, serializer='json', declare=[exchange])
    assert inbox.wait(1) == ['sports']
    inbox.stays(1, 0.3)


def test_deleted_exchange_delivers_to_no_queue_of_any_process(connect: Connect, client: Client) -> None:
    here, there, publisher = both(connect()), listen(connect(), 'there'), connect()
    broadcast(publisher, 'first')
    for inbox in (here, there):
        inbox.wait(1)
    NEWS(here.channel).delete()
    wait_for(
        lambda: 'news' not in there.connection.transport.listener.exchanges,
        'the other connection to notice',
    )
    NEWS(connect().channel()).declare()
    for exchange in (NEWS, SPORTS):
        publisher.Producer().publish(exchange.name, exchange=exchange, serializer='json')
    assert here.wait(2) == ['first', 'sports']
    for inbox, count in ((here, 2), (there, 1)):
        inbox.stays(count, 0.3)


def test_exchange_that_is_redeclared_at_once_delivers(connect: Connect, client: Client) -> None:
    inbox, publisher = listen(connect(), 'listener'), connect()
    for number in range(8):
        NEWS(inbox.channel).delete()
        Queue('listener', NEWS, auto_delete=True)(inbox.channel).declare()
        broadcast(publisher if number % 2 else connect(), number)
        assert inbox.wait(number + 1)[-1] == number


@pytest.mark.parametrize('kind', [None, 'direct'])
def test_publisher_that_declares_no_fanout_exchange_reaches_all_queues(
    connect: Connect, client: Client, sent: list[Request], kind: str | None
) -> None:
    """Celery assumes a direct exchange for a queue that it knows only from `task_routes`."""
    inboxes, publisher = [listen(connect(), name) for name in ('one', 'two')], connect()
    if kind:
        Queue('news', Exchange('news', type=kind), routing_key='news')(publisher.channel()).declare()
    for number in range(3):
        sent.clear()
        publisher.Producer().publish(number, exchange='news', routing_key='news', serializer='json')
    for inbox in inboxes:
        assert inbox.wait(3) == [0, 1, 2]
    assert not items(client)


# -- the order of broadcasts and messages


@pytest.fixture
def arrive(monkeypatch: pytest.MonkeyPatch, broadcasts: Client) -> Iterator[threading.Event]:
    """Listeners learn of no broadcast from their feeds until this event is set."""
    event = threading.Event()

    def held_back(client: Client, *args: Any, **options: Any) -> Any:
        if client.address.database == broadcasts.address.database:
            event.wait()
        return open_feed(client, *args, **options)

    monkeypatch.setattr('kombu_couchdb.couchdb.changes.open_feed', held_back)
    yield event
    event.set()


def listen_and_consume(connection: Connection) -> Inbox:
    """Receive broadcasts and the messages of a queue; the listener follows the database of broadcasts afterwards."""
    inbox = Inbox(connection, Queue('listener', NEWS, auto_delete=True), 'q')
    publish(connection, 'ready')
    inbox.wait(1)
    return inbox


def reads(sent: list[Request]) -> int:
    """Return how often all broadcasts were read since the list of requests was cleared."""
    return sum('_all_docs' in str(request.path) for request in sent)


def test_message_arrives_after_a_broadcast_that_its_process_has_sent_before(
    connect: Connect, arrive: threading.Event, sent_broadcasts: list[Request]
) -> None:
    """Celery's `revoke(task_id)` returns, and then the task is sent, with another connection."""
    inbox = listen_and_consume(connect())
    broadcast(connect(), 'first')
    sent_broadcasts.clear()
    publish(connect(), 'second')
    assert inbox.wait(3) == ['ready', 'first', 'second']
    publish_many(connect(), range(20))
    inbox.wait(23)
    assert reads(sent_broadcasts) == 1, 'the later messages name a broadcast that has arrived'
    broadcast(connect(), 'third')
    arrive.set()
    assert inbox.wait(24)[-1] == 'third'
    inbox.stays(24, 0.3)


@pytest.mark.parametrize(
    'after',
    [
        {'publisher': 'nobody', 'number': 1, 'expires': 1e12},
        {'publisher': 'nobody', 'number': 1, 'expires': 1.0},
        {'publisher': ['x'], 'number': {}, 'expires': 'never'},
        {},
        'text',
    ],
    ids=repr,
)
def test_message_that_names_no_stored_broadcast_is_delivered(connect: Connect, client: Client, after: Any) -> None:
    """It was deleted, or somebody has written this by hand. The broadcasts that follow are received."""
    inbox = listen_and_consume(connect())
    publish(connect(), 'alone', **{AFTER: after})
    assert inbox.wait(2) == ['ready', 'alone']
    broadcast(connect(), 'news')
    assert inbox.wait(3) == ['ready', 'alone', 'news']


def test_message_does_not_wait_for_broadcasts_that_cannot_be_read(
    connect: Connect, broadcasts: Client, arrive: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = listen_and_consume(connect())
    broadcast(connect(), 'late')

    def fail(self: Client, *args: Any, **options: Any) -> None:
        raise ServerUnavailable('no answer')

    replace_in_clients(monkeypatch, broadcasts.address.database, 'id_range', fail)
    publish(connect(), 'message')
    assert inbox.wait(2) == ['ready', 'message']
    arrive.set()
    assert inbox.wait(3) == ['ready', 'message', 'late']


def test_messages_name_the_last_broadcast_of_their_process_while_it_is_kept(connect: Connect, client: Client) -> None:
    publish(connect(), 'before')
    publisher = connect()
    broadcast(publisher, 'news')
    publish(connect(), 'after')
    before, after = (item['message']['properties'].get(AFTER) for item in items(client))
    assert before is None
    late, last = dict[str, Any](), dict[str, Any]()
    publisher.transport.broadcaster.mark(last, after['expires'] - 0.001)
    publisher.transport.broadcaster.mark(late, after['expires'])
    assert (last, late) == ({AFTER: after}, {})
