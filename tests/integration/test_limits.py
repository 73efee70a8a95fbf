"""Limits of messages and queues: delivery limit, expiry, `x-message-ttl` and `x-max-length`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import pytest
from kombu import Connection, Queue

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.errors import ConfigurationError, ServerUnavailable
from kombu_couchdb.queues import waiting
from kombu_couchdb.queues.store import Store
from tests.conftest import wait_for
from tests.support import Inbox, Peer, Request, eta, items, publish, publish_many, replace_in_clients

from .conftest import Connect

#: A consumer with this lease sweeps often.
SWEEPS = {'visibility_timeout': 1.5}


def reject_all(inbox: Inbox, count: int) -> None:
    """Requeue each message at once, `count` times in all."""
    for number in range(count):
        inbox.wait(number + 1)
        inbox.messages[-1].requeue()


def dead_letter(client: Client) -> dict[str, Any]:
    """Wait for one dead letter and return it."""
    [dead] = wait_for(lambda: [doc for doc in items(client) if doc.get('status')], 'the dead letter')
    return dead


def bodies(client: Client) -> list[str]:
    """Return the bodies of the stored messages, oldest first."""
    return [doc['message']['body'] for doc in items(client)]


# -- queues without consumers

#: Arguments of a queue, messages that are published before somebody declares them, and those that a sweep leaves.
SWEPT: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], set[str]]] = {
    'expired': (
        {},
        {
            'short': {'expiration': 0.5},
            'planned and short': {'expiration': 0.5, 'headers': eta(3600)},
            'long': {'expiration': 3600},
            'for ever': {},
        },
        {'long', 'for ever'},
    ),
    'older than x-message-ttl': (
        {'message_ttl': 0.5},
        {'old': {}, 'urgent': {'priority': 9}, 'planned': {'headers': eta(3600)}},
        {'planned'},
    ),
    'more than x-max-length': ({'max_length': 4}, {f'{number}': {} for number in range(10)}, set('6789')),
}


@pytest.mark.parametrize(('arguments', 'messages', 'left'), SWEPT.values(), ids=SWEPT.keys())
def test_sweep_deletes_what_is_over_a_limit(
    connect: Connect, client: Client, arguments: Any, messages: dict[str, dict[str, Any]], left: set[str]
) -> None:
    connection = connect()
    for body, properties in messages.items():
        publish(connection, body, to='nobody', **properties)
    publish(connection, 'of another queue', to='unlimited')
    Queue('nobody', **arguments)(connect().channel()).declare()
    Inbox(connect(**SWEEPS), 'another')
    kept = {f'"{body}"' for body in (*left, 'of another queue')}
    wait_for(lambda: set(bodies(client)) == kept, 'the others to be deleted')


# -- delivery limit


@pytest.mark.parametrize(
    ('options', 'arguments', 'limit'),
    [({}, {}, 20), ({'delivery_limit': 2}, {'x-delivery-limit': 4}, 4)],
    ids=['default', 'of the queue'],
)
def test_delivery_limit_makes_a_dead_letter(
    connect: Connect, client: Client, options: Any, arguments: dict[str, int], limit: int
) -> None:
    publish(connect(), 'poison')
    inbox = Inbox(connect(**options), Queue('q', queue_arguments=arguments), ack=False)
    reject_all(inbox, limit)
    dead = dead_letter(client)
    assert dead['status'] == 'fail'
    assert dead['reason'] == f'delivery limit: delivered {limit} times and never acknowledged'
    assert dead['attempts'] == limit
    assert dead['consumer'].startswith('broker:consumer:')
    assert dead['message']['body'] == '"poison"'
    publish(connect(), 'next')
    assert inbox.wait(limit + 1)[limit] == 'next'


def test_delivery_limit_of_0_means_none(connect: Connect, client: Client) -> None:
    publish(connect(), 'poison')
    inbox = Inbox(connect(delivery_limit=0), ack=False)
    reject_all(inbox, 25)
    assert inbox.wait(26)[25] == 'poison'


@pytest.mark.parametrize('end', ['close', 'channel'])
def test_orderly_stop_does_not_count_as_an_attempt(connect: Connect, client: Client, end: str) -> None:
    """A message that several stopping workers have prefetched must not become a dead letter without having run."""
    publish(connect(), 'hello')
    for number in range(3):
        inbox = Inbox(connect(delivery_limit=2), ack=False)
        assert inbox.wait(1) == ['hello']
        info = inbox.messages[0].delivery_info
        assert (info['redelivered'], info['delivery_count']) == (number > 0, 1)
        if end == 'close':
            inbox.connection.release()
        else:
            inbox.channel.close()
        wait_for(lambda: not items(client)[0]['claimed'], 'the release')
    [item] = items(client)
    assert (item['attempts'], item.get('status')) == (0, None)
    assert item['consumer'].startswith('broker:consumer:')


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_message_that_stops_its_consumer_counts_as_an_attempt(
    connect: Connect, client: Client, error: type[BaseException]
) -> None:
    """The consumer closes in an orderly way after each error, and another starts."""

    def fail(message: object) -> None:
        raise error('poison')

    publish(connect(), 'poison')
    for _ in range(2):
        connection = connect(delivery_limit=2)
        inbox = Inbox(connection)
        inbox.consumer.on_message = fail
        with pytest.raises(error):
            inbox.wait(1)
        connection.release()
    Inbox(connect(delivery_limit=2)).stays(0, 1)
    wait_for(lambda: items(client)[0].get('status') == 'fail', 'the dead letter')


def test_message_that_kills_its_process_becomes_a_dead_letter(client: Client, url: str, connect: Connect) -> None:
    publish(connect(), 'deadly')
    options = {'visibility_timeout': 1.0, 'delivery_limit': 2}
    for _ in range(2):
        with Peer(url, options=options) as peer:
            assert peer.next()['got'] == 'deadly'
    # Two processes were killed with the message. This consumer sweeps, and does not get the message.
    inbox = Inbox(connect(**options))
    inbox.drain_until(lambda: any(doc.get('status') for doc in items(client)), 'the dead letter')
    assert inbox.messages == []
    [dead] = items(client)
    assert 'delivered 2 times' in dead['reason']


# -- expiry


#: The headers of a task with `expires`, whose publisher's clock is an hour ahead.
EXPIRING = {'id': 'a', 'expires': datetime.fromtimestamp(time.time() + 3600, timezone.utc).isoformat()}


def test_expired_task_is_delivered_for_celery_to_revoke(connect: Connect, client: Client) -> None:
    publish(connect(), 'task', to='later', expiration=0.5, headers=EXPIRING)
    publish(connect(), 'other', to='later', expiration=0.5)
    publish(connect(), 'in time', to='later', expiration=3600, headers=EXPIRING)
    Inbox(connect(**SWEEPS), 'another')
    wait_for(lambda: len(items(client)) == 2, 'the other message to be deleted')
    inbox = Inbox(connect(), 'later')
    assert inbox.wait(2) == ['task', 'in time']
    expires = [datetime.fromisoformat(message.headers['expires']) for message in inbox.messages]
    assert expires[0] < datetime.now(timezone.utc) < expires[1]
    wait_for(lambda: not items(client), 'the messages to be deleted')


@pytest.mark.parametrize('no_ack', [False, True])
def test_message_that_expires_while_its_consumer_is_busy(connect: Connect, client: Client, no_ack: bool) -> None:
    inbox = Inbox(connect(), no_ack=no_ack, prefetch=3)
    publish_many(connect(), ['first', 'late'], expiration=3600)
    publish(connect(), 'task', expiration=3600, headers=EXPIRING)
    mailbox = inbox.connection.transport._mailbox
    wait_for(lambda: len(mailbox) == 3, 'the messages to be claimed')
    for item in mailbox._items:
        item.doc['expires'] -= 7200
    publish(connect(), 'in time', expiration=3600)
    assert sorted(inbox.wait(2)) == ['in time', 'task']
    wait_for(lambda: not items(client), 'all messages to be deleted')


@pytest.mark.parametrize('expires', ['message', 'queue'])
def test_heartbeats_continue_while_many_messages_are_deleted(
    connect: Connect,
    client: Client,
    sent: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    expires: str,
) -> None:
    """An expired queue is deleted with all its messages."""
    connection = connect()
    Queue('unused', expires=0.001 if expires == 'queue' else None)(connection.default_channel).declare()
    publish_many(connection, range(20), 'unused', **({'expiration': 0.001} if expires == 'message' else {}))
    sent.clear()
    monkeypatch.setattr('kombu_couchdb.queues.store.MAX_BATCH_DOCS', 1)
    bulk = Client.bulk

    def slow_bulk(self: Client, docs: Sequence[Document], **kwargs: Any) -> list[WriteResult]:
        time.sleep(0.1 if all(doc.get('_deleted') for doc in docs) else 0.0)
        return bulk(self, docs, **kwargs)

    replace_in_clients(monkeypatch, client.address.database, 'bulk', slow_bulk)
    Inbox(connect(**SWEEPS))
    wait_for(lambda: not items(client), 'all messages to be deleted')
    written = [doc for request in sent for doc in request.docs]
    writes = ''.join('x' if doc.get('_deleted') else 'b' if doc.get('type') == 'Consumer' else '' for doc in written)
    assert 'b' in writes.strip('b')


def test_message_older_than_x_message_ttl_is_not_delivered(connect: Connect, client: Client) -> None:
    queue = Queue('q', message_ttl=1800)
    queue(connect().channel()).declare()
    publish(connect(), 'old')
    publish(connect(), 'due late', headers=eta(1))
    for doc in items(client):
        client.put({**doc, 'published': doc['published'] - 3600})
    inbox = Inbox(connect(), queue)
    # The other message is an hour old, but has been ready for a moment only.
    assert inbox.wait(1) == ['due late']
    wait_for(lambda: not items(client), 'the old message to be deleted')
    inbox.stays(1, 0.2)


# -- queue length


def test_declaration_without_limits_keeps_those_that_are_known(connect: Connect, client: Client) -> None:
    connection = connect()
    Queue('q', max_length=3)(connection.channel()).declare()
    for other in (connection, connect()):
        Queue('q')(other.channel()).declare()
    publish_many(connection, range(5))
    assert bodies(client) == ['2', '3', '4']


@pytest.mark.parametrize('batch', [False, True], ids=['one by one', 'in a batch'])
def test_x_max_length_drops_the_oldest(connection: Connection, client: Client, batch: bool) -> None:
    Queue('q', max_length=3)(connection.channel()).declare()
    if batch:
        publish_many(connection, range(10))
    else:
        for number in range(10):
            publish(connection, number)
    assert bodies(client) == ['7', '8', '9']


def test_scheduled_and_claimed_messages_do_not_count(connect: Connect, client: Client) -> None:
    connection = connect()
    Queue('q', max_length=2)(connection.channel()).declare()
    publish(connection, 'planned', headers=eta(3600))
    publish(connection, 'held')
    inbox = Inbox(connect(), ack=False, prefetch=1)
    inbox.wait(1)
    for number in range(3):
        publish(connection, number)
    assert set(bodies(client)) == {'"planned"', '"held"', '1', '2'}


def test_concurrent_publishers_do_not_drop_too_many(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_many(connect(), range(30))
    read = waiting.read

    def late(*args: Any) -> list[waiting.WaitingPage]:
        monkeypatch.setattr(waiting, 'read', read)
        # Another publisher drops messages between the count and the reading of this one.
        assert Store(client).trim('q', 10) == 20
        return read(*args)

    monkeypatch.setattr(waiting, 'read', late)
    assert Store(client).trim('q', 10) == 0
    assert bodies(client) == [str(number) for number in range(20, 30)]


def test_publish_succeeds_if_trimming_the_queue_fails(
    connection: Connection, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    Queue('q', max_length=1)(connection.channel()).declare()

    def fail(*args: object) -> None:
        raise ServerUnavailable('just now')

    monkeypatch.setattr(connection.transport.store, 'trim', fail)
    for number in range(3):
        publish(connection, number, retry=True, retry_policy={'max_retries': 1})
    assert bodies(client) == ['0', '1', '2']


def test_later_declarations_change_limits_and_keep_the_other_attributes_of_the_queue(
    connect: Connect, client: Client
) -> None:
    Queue('q', expires=60)(connect().channel()).declare()
    Queue('q2', auto_delete=True)(connect().channel()).declare()
    for name in ('q', 'q2'):
        Queue(name, message_ttl=60, max_length=10)(connect().channel()).declare()
    Queue('q', max_length=3)(connect().channel()).declare()
    Queue('q')(connect().channel()).declare()
    first, second = (client.get(f'broker:queue:{name}') for name in ('q', 'q2'))
    assert first['lifetime'] == 60
    assert first['arguments'] == {'x-expires': 60_000, 'x-message-ttl': 60_000, 'x-max-length': 3}
    assert first['expires'] > client.clock.now()
    assert second['auto_delete'] is True


def test_limit_that_is_not_a_number_is_refused(connection: Connection) -> None:
    with pytest.raises(
        ConfigurationError, match="queue 'q': the argument x-max-length must be a number from 0 on, not 'ten'"
    ):
        Queue('q', queue_arguments={'x-max-length': 'ten'})(connection.channel()).declare()
