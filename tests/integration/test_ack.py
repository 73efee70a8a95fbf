"""Ack, reject, requeue, recover and prefetch; and the messages of a consumer that closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import wait_for
from tests.support import Inbox, Request, items, publish_many

from .conftest import Connect


def test_rejected_message_becomes_a_dead_letter(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(2))
    inbox = Inbox(connect(), ack=False)
    inbox.wait(2)
    inbox.messages[0].reject()
    inbox.messages[1].ack()
    [item] = wait_for(lambda: [i for i in items(client) if i.get('status')], 'the dead letter')
    assert (item['status'], item['claimed'], item['message']['body']) == ('fail', None, '0')
    assert item['reason']
    wait_for(lambda: len(items(client)) == 1)
    inbox.stays(2, 0.5)
    assert inbox.channel.queue_declare('q').message_count == 0


def test_requeued_message_keeps_its_place_in_the_queue(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(4))
    before = items(client)[0]
    inbox = Inbox(connect(), ack=False, prefetch=1)
    assert inbox.wait(1) == [0]
    inbox.messages[0].requeue()
    # The request that releases this message may also claim the next one. No other message may come first.
    while inbox.wait(len(inbox.messages) + 1)[-1] != 0:
        inbox.messages[-1].ack()
    assert inbox.bodies in ([0, 0], [0, 1, 0])
    info = inbox.messages[-1].delivery_info
    assert (info['redelivered'], info['delivery_count']) == (True, 2)
    after = client.get(before['_id'])
    assert (after['published'], after['priority'], after['attempts']) == (before['published'], before['priority'], 2)


def test_recover_redelivers_all_unacknowledged_messages(connection: Connection, client: Client) -> None:
    publish_many(connection, range(3))
    inbox = Inbox(connection, ack=False)
    inbox.wait(3)
    inbox.channel.basic_recover(requeue=True)
    assert sorted(inbox.wait(6)[3:]) == [0, 1, 2]
    assert all(message.delivery_info['redelivered'] for message in inbox.messages[3:])


def test_ack_multiple_acknowledges_all_earlier_messages_in_few_requests(
    connection: Connection, client: Client, sent: list[Request]
) -> None:
    publish_many(connection, range(60))
    inbox = Inbox(connection, ack=False)
    inbox.wait(60)
    sent.clear()
    inbox.messages[57].ack(multiple=True)
    wait_for(lambda: len(items(client)) == 2, 'the others to be deleted')
    assert {item['message']['body'] for item in items(client)} == {str(body) for body in inbox.bodies[58:]}
    assert len([request for request in sent if request.path == '/_bulk_docs']) < 20


def test_prefetch_count_limits_unacknowledged_messages(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(10))
    inbox = Inbox(connect(), ack=False, prefetch=3)
    assert inbox.wait(3) == [0, 1, 2]
    inbox.stays(3, 0.5)
    assert sum(item['claimed'] is not None for item in items(client)) == 3
    inbox.messages[0].ack()
    assert inbox.wait(4) == [0, 1, 2, 3]
    inbox.channel.basic_qos(0, 5, False)
    assert inbox.wait(6) == [0, 1, 2, 3, 4, 5]
    inbox.stays(6, 0.5)


def test_closing_releases_unacknowledged_and_undelivered_messages(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(4))
    first = Inbox(connect(), ack=False, prefetch=10)
    first.wait(4)
    publish_many(connect(), (['ahead', number] for number in range(6)))
    wait_for(lambda: all(item['claimed'] for item in items(client)), 'all messages to be claimed ahead')
    first.connection.release()
    assert not any(item['claimed'] for item in items(client))
    second = Inbox(connect(), prefetch=1)
    assert second.wait(10) == [0, 1, 2, 3] + [['ahead', number] for number in range(6)]
    assert [message.delivery_info['redelivered'] for message in second.messages] == [True] * 4 + [False] * 6


@pytest.mark.parametrize(
    'end',
    [lambda inbox: inbox.channel.close(), lambda inbox: inbox.connection.collect()],
    ids=['channel', 'connection'],
)
def test_ack_after_the_channel_was_closed_raises(
    connect: Connect, client: Client, end: Callable[[Inbox], None]
) -> None:
    """Celery acknowledges tasks that started before the connection was lost, and handles this error."""
    publish_many(connect(), range(3))
    inbox = Inbox(connect(), ack=False)
    inbox.wait(3)
    end(inbox)
    for message, settle in zip(inbox.messages, ('ack', 'reject', 'requeue'), strict=True):
        with pytest.raises(ServerUnavailable, match='the channel was closed'):
            getattr(message, settle)()
    assert isinstance(ServerUnavailable(), inbox.connection.recoverable_connection_errors)
    wait_for(lambda: [item['claimed'] for item in items(client)] == [None] * 3, 'the release')


def test_basic_get(connection: Connection, client: Client) -> None:
    publish_many(connection, range(2))
    channel = connection.channel()
    message: Any = channel.basic_get('q')
    assert message.decode() == 0
    assert sum(item['claimed'] is not None for item in items(client)) == 1
    message.ack()
    wait_for(lambda: len(items(client)) == 1, 'the message to be deleted')
    assert channel.basic_get('q', no_ack=True).decode() == 1
    assert channel.basic_get('q') is None
