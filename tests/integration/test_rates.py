"""Rates: of the messages with one rate key, at most so many are claimed in a period, over all consumers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError
from tests.conftest import wait_for
from tests.support import Inbox, Peer, Request, items, publish, publish_many


def rated(rate: Any = '5/h', key: Any = 'k', **headers: Any) -> dict[str, Any]:
    """Return the options of a message with a rate."""
    return {'headers': {'rate_key': key, 'rate': rate, **headers}}


def parked(client: Client) -> list[Any]:
    """Return the messages that wait for a start."""
    return sorted(doc['message']['body'] for doc in items(client) if doc.get('parked'))


def document(client: Client) -> dict[str, Any]:
    """Return the document of the rate key."""
    return client.get('rate:k')


def now_due(client: Client) -> None:
    """Set the time of the next start to now, as if the time had passed. The last start was another consumer's."""
    client.put({**document(client), 'next': client.clock.now(), 'by': 'broker:consumer:other'})


def dates_of(client: Client, count: int, inboxes: list[Inbox]) -> list[float]:
    """Wait for so many messages that are held; return the dates of their claims, which consumers wrote, sorted."""

    def held() -> list[Any]:
        for inbox in inboxes:
            inbox.drain(0.02)
        return [doc for doc in items(client) if doc['claimed']]

    wait_for(lambda: len(held()) == count, f'{count} messages to be claimed')
    return sorted(doc['claimed']['date'] for doc in held())


def test_consumers_together_do_not_exceed_the_rate(connect: Callable[..., Connection], client: Client) -> None:
    publish_many(connect(), range(20), **rated('10/s'))
    inboxes = [Inbox(connect(), ack=False) for _ in range(2)]
    dates = dates_of(client, 20, inboxes)
    # A claim is dated after its start was stored, which can take a moment; so the distance of two claims can be shorter
    # by that moment than the distance of their starts.
    assert min(late - early for early, late in zip(dates, dates[10:], strict=False)) > 0.5
    # Whatever a request takes: the starts themselves are stored with their distances.
    assert document(client)['next'] - dates[0] >= 19 * 0.11 - 0.1


def test_a_message_over_the_rate_takes_no_prefetch_and_blocks_nobody(
    connect: Callable[..., Connection], client: Client
) -> None:
    connection = connect()
    publish_many(connection, [f'k{number}' for number in range(30)], **rated())
    publish(connection, 'other key', **rated(key='é:0'))
    publish(connection, 'no key')
    inbox = Inbox(connect(), ack=False, prefetch=3)
    assert sorted(inbox.wait(3)) == ['k0', 'no key', 'other key']
    inbox.stays(3, 0.5)


def test_a_task_that_has_expired_takes_no_start(connect: Callable[..., Connection], client: Client) -> None:
    """It is delivered for Celery to revoke."""
    expiring = rated('1/h', id='a', expires='2030-01-01T00:00:00+00:00')
    publish_many(connect(), range(5), expiration=0.001, **expiring)
    publish_many(connect(), ['first', 'second'], **rated('1/h'))
    inbox = Inbox(connect(), ack=False)
    assert sorted(map(str, inbox.wait(6))) == ['0', '1', '2', '3', '4', 'first']
    wait_for(lambda: parked(client) == ['"second"'], 'the other message to wait')


def test_priority_and_age_decide_who_is_next(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    publish(connection, 'first', **rated())
    inbox.wait(1)
    publish(connection, 'old', **rated('2/s'))
    publish(connection, 'new', **rated('2/s'))
    publish(connection, 'important', priority=9, **rated('2/s'))
    inbox.drain_until(lambda: len(parked(client)) == 3)
    now_due(client)
    other = Inbox(connect(visibility_timeout=2), ack=False)
    assert other.wait(3) == ['important', 'old', 'new']


def test_killed_consumer(connect: Callable[..., Connection], client: Client, url: str) -> None:
    """Another consumer goes on with what it has parked. The start that was taken is lost."""
    publish_many(connect(visibility_timeout=2), ['a', 'b', 'c'], **rated('1/s'))
    with Peer(url, options={'visibility_timeout': 2}) as peer:
        assert peer.next()['got'] == 'a'
        wait_for(lambda: len(parked(client)) >= 1)
        before = document(client)['next']
        peer.signal(signal.SIGKILL)
    inbox = Inbox(connect(visibility_timeout=2), ack=False)
    assert sorted(inbox.wait(3)) == ['a', 'b', 'c']
    dates = dates_of(client, 3, [inbox])
    assert dates[0] >= before - 0.2
    assert document(client)['next'] >= before + 3 * 1.1 - 0.1


def test_concurrency_limit_and_rate(connect: Callable[..., Connection], client: Client) -> None:
    """A message needs both. While it has no start, it holds no slot."""
    inbox = Inbox(connect(), ack=False)
    publish_many(connect(), range(4), **rated('5/s', concurrency_key='c', concurrency_limit=2))
    inbox.wait(2)
    inbox.stays(2, 1.0)
    for number in range(4):
        inbox.wait(min(4, number + 2))
        inbox.messages[number].ack()
    assert sorted(inbox.wait(4)) == [*range(4)]
    wait_for(lambda: not items(client) and not client.id_range('slot:'))
    publish_many(connect(), ['a', 'b'], **rated(key='l', concurrency_key='c', concurrency_limit=2))
    inbox.wait(5)
    inbox.drain_until(lambda: len(parked(client)) == 1)
    assert len(client.id_range('slot:')) == 1


def test_a_requeued_message_needs_another_start(connect: Callable[..., Connection], client: Client) -> None:
    publish(connect(), 'a', **rated())
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.messages[0].requeue()
    inbox.drain_until(lambda: parked(client))
    inbox.stays(1, 0.3)


def test_basic_get(connect: Callable[..., Connection], client: Client) -> None:
    publish_many(connect(), ['a', 'b'], **rated('30/m'))
    channel = connect().channel()
    assert channel.basic_get('q', no_ack=True).decode() == 'a'
    assert channel.basic_get('q', no_ack=True) is None
    found = wait_for(lambda: channel.basic_get('q'))
    assert found.decode() == 'b'
    found.ack()
    wait_for(lambda: not items(client))


@pytest.mark.parametrize('malformed', [{'type': 'Rate', 'next': 'soon'}, {'type': 7, 'next': 1e300}])
def test_malformed_document_is_replaced(
    connect: Callable[..., Connection], client: Client, malformed: dict[str, Any]
) -> None:
    client.put({'_id': 'rate:k', **malformed})
    publish_many(connect(), ['a', 'b'], **rated())
    inbox = Inbox(connect(), ack=False)
    assert inbox.wait(1) == ['a']
    inbox.drain_until(lambda: len(parked(client)) == 1)
    assert 600 < document(client)['next'] - client.clock.now() < 800


def test_wrong_rates_and_keys_are_refused(connection: Connection) -> None:
    for wrong, sentence in (
        (rated('10/d'), 'the header rate must be a rate from one a day to 1,000 a second'),
        (rated(key=7), 'the header rate_key must be text of 1 to 500 characters'),
        ({'headers': {'concurrency_key': 'rate:x', 'concurrency_limit': 1}}, "must not begin with 'rate:'"),
        ({'headers': {'concurrency_key': 'k', 'concurrency_limit': 0}}, 'concurrency_limit must be'),
        ({'headers': {'concurrency_key': 'k'}}, 'concurrency_limit must be'),
        ({'headers': {'concurrency_limit': 2}}, 'concurrency_limit needs the header concurrency_key'),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            publish(connection, 'a', **wrong)


def test_nothing_is_polled_while_messages_wait(
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    publish_many(connect(), range(10), **rated())
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.drain_until(lambda: len(parked(client)) == 9)
    inbox.drain(1.0)
    sent.clear()
    inbox.drain(2.0)
    assert not [request for request in sent if re.search('rate|parked', f'{request.path} {request.body}')]


def test_no_requests_about_limits_without_limits(
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    publish_many(connect(), range(10), headers={'rate': 'a header of the program'})
    sent.clear()
    Inbox(connect(visibility_timeout=2)).wait(10)
    wait_for(lambda: not items(client))
    assert sent
    assert not [each for each in sent if re.search('slot|rate:|rate%3A|parked', f'{each.path} {each.body}')]
