"""Concurrency limits: of the messages with one key, at most so many are delivered and not acknowledged at a time."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kombu_couchdb.consumer import worker_hooks
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.limits.gate import ParkedMessages
from kombu_couchdb.queues.store import Store
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, Peer, Request, eta, items, publish, publish_many

from .conftest import Connect


def limited(key: str = 'k', limit: Any = 1, **headers: Any) -> dict[str, Any]:
    """Return the options of a message with a limit."""
    return {'headers': {'concurrency_key': key, 'concurrency_limit': limit, **headers}}


def slots(client: Client) -> list[str]:
    """Return the ids of the slots that are taken."""
    return [row['id'] for row in client.id_range('slot:')]


def parked(client: Client) -> list[Any]:
    """Return the messages that wait for a slot."""
    return [doc['message']['body'] for doc in items(client) if doc.get('parked')]


def test_messages_of_one_key_are_delivered_one_after_the_other(connect: Connect, client: Client) -> None:
    """A slot that is free goes to the highest priority, then to the oldest message."""
    publish_many(connect(), ['a', 'b', 'c'], **limited())
    inbox = Inbox(connect(), ack=False)
    assert inbox.wait(1) == ['a']
    publish(connect(), 'important', priority=9, **limited())
    inbox.drain_until(lambda: len(parked(client)) == 3, 'the others to be parked')
    inbox.stays(1, 0.3)
    assert slots(client) == ['slot:k:0']
    for number, name in enumerate(['important', 'b', 'c']):
        inbox.messages[number].ack()
        assert inbox.wait(number + 2)[-1] == name
    inbox.messages[3].ack()
    wait_for(lambda: not items(client) and not slots(client), 'the slot to be freed')


def test_limit_of_several_consumers(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(20), **limited(limit=3))
    inboxes = [Inbox(connect(), ack=False) for _ in range(3)]
    done = 0
    while done < 20:
        wait_for(lambda: any(len(inbox.drain(0.05).messages) for inbox in inboxes))
        held = [(inbox, message) for inbox in inboxes for message in inbox.messages]
        assert len(held) <= 3
        assert len(slots(client)) <= 3
        inbox, message = random.choice(held)
        inbox.messages.remove(message)
        message.ack()
        done += 1
    wait_for(lambda: not items(client) and not slots(client))


def test_killed_consumer(connect: Connect, client: Client, url: str) -> None:
    """Its slot is free when its lease has ended, and the message that waits for the slot is woken."""
    publish_many(connect(visibility_timeout=2), ['a', 'b'], **limited())
    with Peer(url, options={'visibility_timeout': 2}) as peer:
        assert peer.next()['got'] == 'a'
        wait_for(lambda: len(parked(client)) == 1)
        peer.signal(signal.SIGKILL)
    inbox = Inbox(connect(visibility_timeout=2), ack=True)
    assert sorted(inbox.wait(2)) == ['a', 'b']
    wait_for(lambda: not slots(client))


def test_slots_of_a_lost_lease_are_not_used_again(connect: Connect, client: Client, url: str) -> None:
    """After an outage a consumer does not claim with a slot that another consumer has taken meanwhile."""
    address, options = client.address, {'visibility_timeout': 2}
    publish(connect(**options), 'a', **limited())
    with Proxy(address.host, address.port) as proxy:
        behind = url.replace(f':{address.port}/', f':{proxy.port}/')
        with PatientConnection(behind, transport_options=options) as connection:
            channel = connection.channel()
            assert channel.basic_get('q').decode() == 'a'
            proxy.refuse()
            publish(connect(**options), 'x', to='other', **limited())
            assert Inbox(connect(**options), 'other', ack=False).wait(1) == ['x']
            with ThreadPoolExecutor() as executor:
                found = executor.submit(channel.basic_get, 'q')
                wait_for(lambda: channel.connection.unacked.pulls, 'the consumer to be asked for a message')
                proxy.restore()
                assert found.result(PATIENCE) is None
    assert len(slots(client)) == 1


def test_messages_over_the_limit_are_parked_together(connect: Connect, client: Client, sent: list[Request]) -> None:
    """A consumer with little credit reaches what is behind them after few requests."""
    connection = connect()
    publish(connection, 'x', to='first', **limited())
    blocker = Inbox(connect(), 'first', ack=False)
    assert blocker.wait(1) == ['x']
    publish_many(connection, range(150), **limited())
    publish(connection, 'no key')
    sent.clear()
    assert Inbox(connect(), ack=False, prefetch=1).wait(1) == ['no key']
    assert len(parked(client)) == 150
    assert len([request for request in sent if any(doc.get('parked') for doc in request.docs)]) < 20


def test_queues_share_a_key(connect: Connect, client: Client) -> None:
    """The consumer that frees the slot does not consume the queue of the message that waits."""
    connection = connect()
    one, other = Inbox(connect(), 'one', ack=False), Inbox(connect(), 'other', ack=False)
    publish(connection, 'a', to='one', **limited())
    one.wait(1)
    publish(connection, 'b', to='other', **limited())
    other.drain_until(lambda: parked(client))
    one.messages[0].ack()
    assert other.wait(1) == ['b']


def test_consumer_without_credit_wakes_another(connect: Connect, client: Client) -> None:
    connection = connect()
    busy = Inbox(connect(), ack=False, prefetch=2)
    publish(connection, 'a', **limited())
    publish(connection, 'x')
    busy.wait(2)
    idle = Inbox(connect(), ack=False)
    publish(connection, 'b', **limited())
    idle.drain_until(lambda: parked(client))
    busy.channel.basic_qos(0, 1, False)  # so that it has no credit when it frees the slot
    next(message for message in busy.messages if message.decode() == 'a').ack()
    assert idle.wait(1) == ['b']


@pytest.mark.parametrize('how', ['requeue', 'reject', 'cancel and close'])
def test_other_ends_of_a_message_free_its_slot(
    connect: Connect, client: Client, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_many(connect(), ['a', 'b'], **limited(id='t', task='task'))
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    if how == 'requeue':
        inbox.messages[0].requeue()
        assert inbox.wait(2)[1] in ('a', 'b')
    elif how == 'reject':
        inbox.messages[0].reject()
        assert inbox.wait(2) == ['a', 'b']
    else:
        other = Inbox(connect(), ack=True)
        monkeypatch.setitem(worker_hooks._hooks, 'while_running', lambda task_id: False)
        inbox.connection.close()
        assert sorted(other.wait(2)) == ['a', 'b']
        wait_for(lambda: not slots(client))


def test_slot_of_a_task_that_may_run_is_kept_until_the_lease_ends(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(worker_hooks._hooks, 'while_running', lambda task_id: True)
    publish_many(connect(), ['a', 'b'], **limited(id='t', task='task'))
    inbox = Inbox(connect(visibility_timeout=3), ack=False)
    inbox.wait(1)
    other = Inbox(connect(visibility_timeout=3))
    inbox.connection.close()
    assert slots(client)
    other.stays(0, 1)
    assert sorted(other.wait(2)) == ['a', 'b']


def test_lost_wakeup_is_found_by_a_sweep(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **limited(limit=2))
    [doc] = items(client)
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': 1}}])
    assert Store(client).leases()['parked'].popitem()[1]['count'] == 1
    assert Inbox(connect(visibility_timeout=2)).wait(1) == ['a']


def test_longest_key(connect: Connect, client: Client) -> None:
    """An encoded key can be longer than a URL may be."""
    key = 500 * '\U0001f600'
    publish_many(connect(), ['a', 'b', 'c'], **limited(key, limit=2))
    inbox = Inbox(connect(), ack=False)
    inbox.wait(2)
    inbox.drain_until(lambda: len(parked(client)) == 1)
    assert len(slots(client)) == 2
    assert ParkedMessages(client).keys(10, None) == [key]
    assert ParkedMessages(client).keys(10, key) == []
    inbox.messages[0].ack()
    inbox.wait(3)


def test_basic_get(connect: Connect, client: Client) -> None:
    publish_many(connect(), ['a', 'b'], **limited())
    channel = connect().channel()
    first = channel.basic_get('q')
    assert first.decode() == 'a'
    assert channel.basic_get('q') is None
    first.ack()
    found = wait_for(lambda: channel.basic_get('q'))
    assert found.decode() == 'b'
    found.ack()
    wait_for(lambda: not items(client) and not slots(client))


def test_due_dates_and_counts(connect: Connect, client: Client) -> None:
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    publish(connection, 'now', **limited())
    inbox.wait(1)
    publish(connection, 'soon', **limited(**eta(0.2)))
    inbox.drain_until(lambda: parked(client))
    assert connection.channel().queue_declare('q', passive=True).message_count == 1
    inbox.messages[0].ack()
    assert inbox.wait(2) == ['now', 'soon']
    publish(connection, 'x', **limited())
    inbox.drain_until(lambda: parked(client))
    assert connection.channel().queue_purge('q') == 1
    assert not parked(client)


def test_unique_job(connect: Connect, client: Client) -> None:
    """A message behind a running unique job takes its slot."""
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    for name in ('a', 'b'):
        publish(connection, name, **limited(id=name, task='t', job_key='j'))
        inbox.wait(1)
    publish(connection, 'other', **limited())
    inbox.drain_until(lambda: parked(client))
    for number in range(3):
        inbox.wait(number + 1)
        assert len(slots(client)) == 1
        inbox.messages[number].ack()
    assert sorted(inbox.bodies) == ['a', 'b', 'other']
    wait_for(lambda: not items(client) and not slots(client))


def test_malformed_limit_becomes_a_dead_letter(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **limited())
    publish(connect(), 'b', headers={'rate_key': 'k', 'rate': '5/h'})
    docs, names = items(client), ['concurrency_limit', 'rate']
    for doc, name in zip(docs, names, strict=True):
        doc['message']['headers'][name] = 'many'
    client.bulk(docs)
    Inbox(connect()).drain_until(lambda: all(doc.get('status') for doc in items(client)))
    for dead, name in zip(items(client), names, strict=True):
        assert dead['reason'].startswith(f'malformed: the header {name} must be')
