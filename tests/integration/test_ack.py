"""Acknowledge, reject, requeue, recover, prefetch; and what happens to messages when a consumer goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Request, items, publish


def fill(connection: Connection, count: int) -> None:
    for number in range(count):
        publish(connection, number)


def test_ack_deletes(connection: Connection, client: Client) -> None:
    fill(connection, 3)
    Inbox(connection).wait(3)
    wait_for(lambda: not items(client), 'the messages to be deleted')


def test_reject_keeps_the_message_as_dead(connect: Callable[..., Connection], client: Client) -> None:
    fill(connect(), 2)
    inbox = Inbox(connect(), ack=False)
    inbox.wait(2)
    inbox.messages[0].reject()
    inbox.messages[1].ack()
    [item] = wait_for(lambda: [i for i in items(client) if i.get('status')], 'the message to be set aside')
    assert (item['status'], item['claimed'], item['message']['body']) == ('fail', None, '0')
    assert item['reason']
    wait_for(lambda: len(items(client)) == 1)
    inbox.stays(2, 0.5)
    assert inbox.channel.queue_declare('q').message_count == 0


def test_requeue_gives_the_old_place_back(connect: Callable[..., Connection], client: Client) -> None:
    fill(connect(), 4)
    before = items(client)[0]
    inbox = Inbox(connect(), ack=False, prefetch=1)
    assert inbox.wait(1) == [0]
    inbox.messages[0].requeue()
    # The next one may be claimed by the same request that gives this one back, but none after it comes first.
    while inbox.wait(len(inbox.messages) + 1)[-1] != 0:
        inbox.messages[-1].ack()
    assert inbox.bodies in ([0, 0], [0, 1, 0])
    info = inbox.messages[-1].delivery_info
    assert (info['redelivered'], info['delivery_count']) == (True, 2)
    after = client.get(before['_id'])
    assert (after['published'], after['priority'], after['attempts']) == (before['published'], before['priority'], 2)


def test_recover_gives_everything_back(connection: Connection, client: Client) -> None:
    fill(connection, 3)
    inbox = Inbox(connection, ack=False)
    inbox.wait(3)
    inbox.channel.basic_recover(requeue=True)
    assert sorted(inbox.wait(6)[3:]) == [0, 1, 2]
    assert all(message.delivery_info['redelivered'] for message in inbox.messages[3:])


def test_ack_multiple(connection: Connection, client: Client) -> None:
    fill(connection, 5)
    inbox = Inbox(connection, ack=False)
    inbox.wait(5)
    inbox.messages[2].ack(multiple=True)
    wait_for(lambda: len(items(client)) == 2, 'three messages to be deleted')
    assert sorted(item['message']['body'] for item in items(client)) == ['3', '4']


def test_prefetch_is_a_limit(connect: Callable[..., Connection], client: Client) -> None:
    fill(connect(), 10)
    inbox = Inbox(connect(), ack=False, prefetch=3)
    assert inbox.wait(3) == [0, 1, 2]
    inbox.stays(3, 0.5)
    assert sum(item['claimed'] is not None for item in items(client)) == 3
    inbox.messages[0].ack()
    assert inbox.wait(4) == [0, 1, 2, 3]
    inbox.channel.basic_qos(0, 5, False)
    assert inbox.wait(6) == [0, 1, 2, 3, 4, 5]
    inbox.stays(6, 0.5)


def test_prefetch_is_a_channels_own(connection: Connection) -> None:
    fill(connection, 10)
    one, two = Inbox(connection, ack=False, prefetch=1), Inbox(connection, ack=False, prefetch=2)
    one.wait(1)
    two.wait(2)
    one.stays(1, 0.5)
    assert len(two.messages) == 2


def test_acks_ride_together(connect: Callable[..., Connection], client: Client, sent: list[Request]) -> None:
    fill(connect(), 100)
    inbox = Inbox(connect(), ack=False)
    inbox.wait(100)
    sent.clear()
    inbox.messages[99].ack(multiple=True)
    wait_for(lambda: not items(client), 'the acks to be stored')
    assert len([request for request in sent if request.path == '/_bulk_docs']) < 30


def claimed_ahead(inbox: Inbox, client: Client, count: int) -> None:
    """Publish so many messages and wait until they are claimed; nobody takes them from the mailbox."""
    with inbox.connection.clone() as publisher:
        for number in range(count):
            publish(publisher, ['ahead', number])
    wait_for(
        lambda: sum(bool(item['claimed']) for item in items(client)) >= count + len(inbox.messages),
        'all to be claimed ahead',
    )


def test_closing_gives_back_unacknowledged_and_undelivered(connect: Callable[..., Connection], client: Client) -> None:
    fill(connect(), 4)
    first = Inbox(connect(), ack=False, prefetch=10)
    first.wait(4)
    claimed_ahead(first, client, 6)
    first.connection.release()
    assert not any(item['claimed'] for item in items(client))
    second = Inbox(connect(), prefetch=1)
    assert second.wait(10) == [0, 1, 2, 3] + [['ahead', number] for number in range(6)]
    assert [message.delivery_info['redelivered'] for message in second.messages] == [True] * 4 + [False] * 6


@pytest.mark.parametrize(
    'settle',
    [lambda message: message.ack(), lambda message: message.reject(), lambda message: message.requeue()],
    ids=['ack', 'reject', 'requeue'],
)
@pytest.mark.parametrize(
    'end',
    [lambda inbox: inbox.channel.close(), lambda inbox: inbox.connection.collect()],
    ids=['channel', 'connection'],
)
def test_what_is_settled_too_late_is_told_so(
    connect: Callable[..., Connection], client: Client, end: Callable[[Inbox], None], settle: Callable[[Any], None]
) -> None:
    """Celery acknowledges what began before its connection was lost, and knows what to do with such an error."""
    fill(connect(), 1)
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    end(inbox)
    with pytest.raises(ServerUnavailable, match='the channel was closed'):
        settle(inbox.messages[0])
    assert isinstance(ServerUnavailable(), inbox.connection.recoverable_connection_errors)
    wait_for(lambda: [item['claimed'] for item in items(client)] == [None], 'the release')


def test_cancelling_gives_back_the_undelivered_only(connect: Callable[..., Connection], client: Client) -> None:
    fill(connect(), 4)
    first = Inbox(connect(), ack=False, prefetch=10)
    first.wait(4)
    claimed_ahead(first, client, 6)
    first.consumer.cancel()
    second = Inbox(connect(), prefetch=1)
    assert second.wait(6) == [['ahead', number] for number in range(6)]
    for message in first.messages:
        message.ack()
    wait_for(lambda: not items(client), 'all to be acknowledged')


def test_closing_a_channel_gives_back_what_it_holds(connection: Connection, client: Client) -> None:
    fill(connection, 2)
    first = Inbox(connection, ack=False)
    first.wait(2)
    first.channel.close()
    assert sorted(Inbox(connection).wait(2)) == [0, 1]


def test_without_acknowledgement_a_message_is_gone_once_delivered(connection: Connection, client: Client) -> None:
    fill(connection, 5)
    inbox = Inbox(connection, no_ack=True)
    assert inbox.wait(5) == [0, 1, 2, 3, 4]
    wait_for(lambda: not items(client), 'the acknowledgements')


def test_without_acknowledgement_the_undelivered_comes_back(connect: Callable[..., Connection], client: Client) -> None:
    fill(connect(), 1)
    inbox = Inbox(connect(), no_ack=True, prefetch=5)
    inbox.wait(1)
    fill(connect(), 5)
    wait_for(lambda: sum(bool(item['claimed']) for item in items(client)) == 5, 'all to be claimed ahead')
    inbox.connection.release()
    second = Inbox(connect())
    assert second.wait(5) == [0, 1, 2, 3, 4]
    assert not any(message.delivery_info['redelivered'] for message in second.messages)


@pytest.mark.parametrize('no_ack', [False, True])
def test_basic_get(connection: Connection, client: Client, no_ack: bool) -> None:
    fill(connection, 2)
    channel = connection.channel()
    message: Any = channel.basic_get('q', no_ack=no_ack)
    assert message.decode() == 0
    if not no_ack:
        assert sum(item['claimed'] is not None for item in items(client)) == 1
        message.ack()
    wait_for(lambda: len(items(client)) == 1, 'the message to be gone')
    assert channel.basic_get('q', no_ack=True).decode() == 1
    assert channel.basic_get('q') is None


def test_simple_queue(connection: Connection) -> None:
    with connection.SimpleQueue('q') as simple:
        simple.put({'hello': 'world'})
        message = simple.get(timeout=PATIENCE)
        assert message.payload == {'hello': 'world'}
        message.ack()
        with pytest.raises(simple.Empty):
            simple.get_nowait()
