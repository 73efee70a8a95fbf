"""Messages of one key with different limits, and slots and starts that CouchDB refuses to store."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.limits.gate import ParkedMessages
from tests.support import Inbox, Request, items, publish, publish_many

from .conftest import Connect
from .test_concurrency_limits import limited, parked, slots
from .test_rates import rated


def ack(inbox: Inbox, body: Any) -> None:
    next(message for message in inbox.messages if message.decode() == body).ack()


def test_lower_limit_does_not_hold_back_a_higher_one(connect: Connect, client: Client) -> None:
    """A slot that the older message with the lower limit cannot use is for the one behind it."""
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    publish(connection, 'in slot 0', **limited(limit=1))
    inbox.wait(1)
    publish(connection, 'in slot 1', **limited(limit=2))
    inbox.wait(2)
    publish(connection, 'low', **limited(limit=1))
    publish_many(connection, ['high', 'high, too'], **limited(limit=2))
    inbox.drain_until(lambda: len(parked(client)) == 3)
    ack(inbox, 'in slot 1')
    assert inbox.wait(3)[-1] == 'high'
    assert slots(client) == ['slot:k:0', 'slot:k:1']
    ack(inbox, 'in slot 0')
    assert inbox.wait(4)[-1] == 'low'
    ack(inbox, 'high')
    assert inbox.wait(5)[-1] == 'high, too'


def test_message_for_a_slot_is_found_behind_many_with_lower_limits(
    connect: Connect, client: Client, sent: list[Request]
) -> None:
    publish_many(connect(), range(60), **limited(limit=2))
    publish(connect(), 'high', **limited(limit=4))
    now = client.clock.now()
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': now}} for doc in items(client)])
    sent.clear()
    [(key, number, doc)] = ParkedMessages(client).for_slots({'k': {3}})
    assert (key, number, doc and doc['message']['body']) == ('k', 3, '"high"')
    assert len(sent) <= 6


def test_sweep_wakes_a_message_behind_one_with_a_lower_limit(connect: Connect, client: Client) -> None:
    holder = Inbox(connect(visibility_timeout=2), ack=False)
    publish(connect(), 'holder', **limited(limit=1))
    holder.wait(1)
    publish(connect(), 'low', to='other', **limited(limit=1))
    publish(connect(), 'high', to='other', **limited(limit=2))
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': 1}} for doc in items(client) if doc['queue'] == 'other'])
    assert Inbox(connect(visibility_timeout=2), 'other', ack=False).wait(1) == ['high']
    assert parked(client) == ['"low"']


@pytest.mark.parametrize('options', [limited(), rated()])
def test_basic_get_looks_past_messages_over_their_limit(connect: Connect, client: Client, options: Any) -> None:
    connection = connect()
    publish_many(connection, range(30), **options)
    publish(connection, 'no key')
    channel = connect().channel()
    assert [channel.basic_get('q').decode(), channel.basic_get('q').decode()] == [0, 'no key']
    assert channel.basic_get('q') is None
    assert len(parked(client)) == 29
