"""Messages of one key with different limits, and slots and starts that CouchDB refuses to store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.limits import permits
from kombu_couchdb.limits.limits_gate import ParkedMessages
from tests.support import Inbox, Request, items, publish, publish_many

from .test_concurrency_limits import limited, parked, slots
from .test_rates import rated


def ack(inbox: Inbox, body: Any) -> None:
    next(message for message in inbox.messages if message.decode() == body).ack()


def test_lower_limit_does_not_hold_back_a_higher_one(connect: Callable[..., Connection], client: Client) -> None:
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
    connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    publish_many(connect(), range(60), **limited(limit=2))
    publish(connect(), 'high', **limited(limit=4))
    now = client.clock.now()
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': now}} for doc in items(client)])
    sent.clear()
    [(key, number, doc)] = ParkedMessages(client).for_slots({'k': {3}})
    assert (key, number, doc and doc['message']['body']) == ('k', 3, '"high"')
    assert len(sent) <= 6
    sent.clear()
    assert [number for _, number, _ in ParkedMessages(client).for_slots({'k': {0, 1}})] == [1, 0]
    assert len(sent) == 2
    assert not ParkedMessages(client).for_slots({'k': {7}, 'unknown': {0}})


def test_sweep_wakes_a_message_behind_one_with_a_lower_limit(
    connect: Callable[..., Connection], client: Client
) -> None:
    holder = Inbox(connect(visibility_timeout=2), ack=False)
    publish(connect(), 'holder', **limited(limit=1))
    holder.wait(1)
    publish(connect(), 'low', to='other', **limited(limit=1))
    publish(connect(), 'high', to='other', **limited(limit=2))
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': 1}} for doc in items(client) if doc['queue'] == 'other'])
    assert Inbox(connect(visibility_timeout=2), 'other', ack=False).wait(1) == ['high']
    assert parked(client) == ['"low"']


@pytest.fixture
def refuse(
    client: Client, monkeypatch: pytest.MonkeyPatch, apache_couchdb: bool
) -> Callable[[str], Callable[[], None]]:
    """Return a function that lets CouchDB refuse documents of a type, and returns one that lets it store them again."""
    if not apache_couchdb:
        pytest.skip('the embedded server does not call validate_doc_update')
    monkeypatch.setattr(permits, 'REFUSED_SECONDS', 0.3)

    def begin(kind: str) -> Callable[[], None]:
        function = f"function (doc) {{ if (doc.type === '{kind}') throw({{forbidden: 'no {kind} here'}}); }}"
        made = {'_id': '_design/refusing', 'validate_doc_update': function}
        rev = client.put(made)

        def end() -> None:
            client.bulk([{**made, '_rev': rev, '_deleted': True}])

        return end

    return begin


@pytest.mark.parametrize(
    ('kind', 'options', 'what'), [('Slot', limited(limit=2), 'concurrency slot'), ('Rate', rated('10/s'), 'next start')]
)
def test_refusal_that_passes(
    connect: Callable[..., Connection],
    client: Client,
    refuse: Callable[[str], Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    options: Any,
    what: str,
) -> None:
    """The message waits, others are delivered, and it is tried again until CouchDB stores its document."""
    inbox = Inbox(connect(), ack=False)
    publish(inbox.connection, 'first')
    inbox.wait(1)
    store_again = refuse(kind)
    publish_many(connect(), ['a', 'b'], **options)
    inbox.drain_until(lambda: len(parked(client)) == 2)
    publish(connect(), 'other')
    assert inbox.wait(2) == ['first', 'other']
    expected = f"the {what} of key 'k' was not stored, and its messages wait: CouchDB refuses it (no {kind} here)"
    assert any(message.startswith(expected) for message in caplog.messages)
    assert not [doc for doc in items(client) if doc.get('status')]
    store_again()
    assert sorted(inbox.wait(4)[2:]) == ['a', 'b']


@pytest.mark.parametrize('options', [limited(), rated()])
def test_basic_get_looks_past_messages_over_their_limit(
    connect: Callable[..., Connection], client: Client, options: Any
) -> None:
    connection = connect()
    publish_many(connection, range(30), **options)
    publish(connection, 'no key')
    channel = connect().channel()
    assert [channel.basic_get('q').decode(), channel.basic_get('q').decode()] == [0, 'no key']
    assert channel.basic_get('q') is None
    assert len(parked(client)) == 29
