"""Broadcasts: each listener gets each one, in order, and they leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable

from kombu import Connection, Exchange, Queue

from kombu_couchdb.client import Client
from tests.support import Inbox, Peer, Request, items

NEWS = Exchange('news', type='fanout')


def listen(connection: Connection, queue: str) -> Inbox:
    return Inbox(connection, Queue(queue, NEWS, auto_delete=True))


def broadcast(connection: Connection, *bodies: object) -> None:
    with connection.Producer() as producer:
        for body in bodies:
            producer.publish(body, exchange=NEWS, routing_key='', serializer='json', declare=[NEWS])


def deleted(client: Client) -> int:
    return sum(bool(row.get('deleted')) for row in client.request('GET', '/_changes')['results'])


def test_every_listener_gets_every_broadcast(connect: Callable[..., Connection], client: Client) -> None:
    listeners = [listen(connect(), f'listener-{number}') for number in range(3)]
    broadcast(connect(), 1, 2, 3)
    for inbox in listeners:
        assert inbox.wait(3) == [1, 2, 3]
        inbox.stays(3, 0.3)


def test_across_processes(url: str, connect: Callable[..., Connection], client: Client) -> None:
    here = listen(connect(), 'here')
    with Peer(url, ack=True, queue_name='there', fanout='news') as there, \
            Peer(url, ack=True, queue_name='yonder', fanout='news') as yonder:
        broadcast(connect(), 'one', 'two')
        for peer in (there, yonder):
            assert [peer.next()['got'] for _ in range(2)] == ['one', 'two']
    assert here.wait(2) == ['one', 'two']


def test_500_in_order(connect: Callable[..., Connection], client: Client) -> None:
    inboxes = [listen(connect(), f'listener-{number}') for number in range(2)]
    broadcast(connect(), *range(500))
    for inbox in inboxes:
        # The nodes of a cluster may tell of two in another order.
        assert (sorted if client.is_cluster() else list)(inbox.wait(500)) == list(range(500))


def test_several_publishers(connect: Callable[..., Connection], client: Client) -> None:
    inbox = listen(connect(), 'listener')
    publishers = [connect() for _ in range(3)]
    for number in range(20):
        for name, publisher in enumerate(publishers):
            broadcast(publisher, [name, number])
    bodies = inbox.wait(60)
    for name in range(3):
        numbers = [number for n, number in bodies if n == name]
        assert (sorted(numbers) if client.is_cluster() else numbers) == list(range(20))  # a cluster keeps no order


def test_who_joins_later_gets_nothing_old(connect: Callable[..., Connection], client: Client) -> None:
    publisher, early = connect(), listen(connect(), 'early')
    broadcast(publisher, 'old')
    early.wait(1)
    late = listen(connect(), 'late')
    late.stays(0, 1.5)
    broadcast(publisher, 'new')
    assert late.wait(1) == ['new']
    assert early.wait(2) == ['old', 'new']


def test_nobody_listens(connect: Callable[..., Connection], client: Client) -> None:
    broadcast(connect(), 'into the void')
    assert not items(client)


def test_who_left_gets_nothing_more(connect: Callable[..., Connection], client: Client) -> None:
    inbox = listen(connect(), 'listener')
    broadcast(connect(), 'one')
    inbox.wait(1)
    inbox.consumer.cancel()
    broadcast(connect(), 'two')
    inbox.stays(1, 1)


def test_old_broadcasts_are_written_over_and_leave_no_tombstones(connect: Callable[..., Connection],
                                                                 client: Client, sent: list[Request]) -> None:
    publisher = connect(fanout_retention=0.2)
    inbox = listen(connect(fanout_retention=0.2), 'listener')
    tombstones = deleted(client)
    for number in range(60):
        broadcast(publisher, number)
        inbox.wait(number + 1)
        inbox.drain(0.02)
    assert inbox.bodies == list(range(60))
    broadcasts = client.id_range('broker:broadcast:')
    assert 0 < len(broadcasts) < 60
    assert deleted(client) == tombstones
    assert len([doc for request in sent for doc in request.docs if doc.get('type') == 'Broadcast']) == 60


def test_broadcast_is_one_write_however_many_listen(connect: Callable[..., Connection], client: Client,
                                                    sent: list[Request]) -> None:
    inboxes = [listen(connect(), f'listener-{number}') for number in range(4)]
    broadcast(connect(), 'hello')
    for inbox in inboxes:
        inbox.wait(1)
    assert len(client.id_range('broker:broadcast:')) == 1
    assert len([doc for request in sent for doc in request.docs if doc.get('type') == 'Broadcast']) == 1
