"""Malformed items: they become dead letters with a reason, and block no other message."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from kombu.exceptions import DecodeError

from kombu_couchdb import design
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import Unstorable
from tests.conftest import wait_for
from tests.hostile.worst import deep, store
from tests.support import Inbox, items, publish

from .conftest import Connect

LONG_AGO = 1e9


def good(client: Client, connection: Connection) -> dict[str, Any]:
    """Publish a message, delete its WorkItem, and return it."""
    publish(connection, 'good')
    [item] = wait_for(lambda: items(client), 'the message')
    client.bulk([{'_id': item['_id'], '_rev': item['_rev'], '_deleted': True}])
    del item['_rev']
    return {**item, '_id': 'malformed', 'published': LONG_AGO}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def message(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda item: item['message'].update(changes)


#: `tests/unit/documents/test_schema.py` has the wrong values of each member.
SPOILERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    'no message': lambda item: item.pop('message'),
    'message is text': lambda item: item.update(message='hello'),
    'headers is text': message(headers='x', body='private words'),
    'base64 cut off': lambda item: item['message'].update(
        body='aGVsbG8', properties={**item['message']['properties'], 'body_encoding': 'base64'}
    ),
    'unknown encoding': lambda item: item['message']['properties'].update(body_encoding='rot13'),
    'content-type is a list': message(**{'content-type': [1]}),
    'content-encoding is a compression': message(**{'content-encoding': 'bz2', 'content-type': 'application/data'}),
    'time limits are text': message(headers={'task': 'add', 'id': 'a', 'timelimit': ['x', 'y']}),
    'attempts is missing': lambda item: item.pop('attempts'),
    'attempts are too many': lambda item: item.update(attempts=int(1.7e308)),
    'headers are nested': lambda item: item['message']['headers'].update(x=nested(600)),
    'date is a list': lambda item: item.update(date=[2026, 11, 21]),
    'date is true': lambda item: item.update(date=True),
    'claimed is empty': lambda item: item.update(claimed={}),
    'claimed is false': lambda item: item.update(claimed=False),
}

#: Changes that the publisher never makes, with which an item can still be delivered.
HARMLESS: dict[str, Callable[..., Any]] = {
    'priority is text': lambda item: item.update(priority='high'),
    'priority is missing': lambda item: item.pop('priority'),
    'priority is below zero': lambda item: item.update(priority=-1000),
    'published is missing': lambda item: item.pop('published'),
    'published is text': lambda item: item.update(published='x'),
    'claimed is missing': lambda item: item.pop('claimed'),
    **{
        f'claimed is by {name!r}': lambda item, name=name: item.update(claimed={'by': name, 'date': LONG_AGO})
        for name in ('', 'nobody', '_all_docs', '_design/celery-v8', '_local/x', '..', 'a/b', 'broker:consumer:', '\0')
    },
    'something more': lambda item: item.update(note='by hand', message={**item['message'], 'note': [1]}),
}


def spoilt(spoilers: dict[str, Callable[..., Any]], connect: Connect, client: Client) -> Inbox:
    """Return an inbox of a queue with an item for each spoiler, before the message `next`."""
    connection = connect()
    item = good(client, connection)
    for name, spoil in spoilers.items():
        doc = deepcopy({**item, '_id': name})
        spoil(doc)
        client.put(doc)
    publish(connection, 'next')
    return Inbox(connect(visibility_timeout=1.5), prefetch=1)


def test_malformed_items_become_dead_letters_with_a_reason(
    connect: Connect, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = spoilt(SPOILERS, connect, client)
    assert inbox.wait(1) == ['next']
    # `next` is acknowledged a moment after it is received.
    wait_for(lambda: {doc['_id'] for doc in items(client) if doc.get('status')} == SPOILERS.keys(), 'the dead letters')
    wait_for(lambda: len(items(client)) == len(SPOILERS), 'the acknowledgement')
    letters = {doc['_id']: doc for doc in items(client)}
    for name, letter in letters.items():
        assert letter['status'] == 'fail'
        assert letter['reason'].startswith('malformed: '), name
        assert '\n' not in letter['reason'], name
    inbox.stays(1, 0.2)
    assert 'dead letter' in caplog.text
    assert 'private words' not in caplog.text


def test_unusual_items_are_delivered(connect: Connect, client: Client) -> None:
    inbox = spoilt(HARMLESS, connect, client)
    assert sorted(inbox.wait(len(HARMLESS) + 1)) == ['good'] * len(HARMLESS) + ['next']
    wait_for(lambda: not items(client), 'all messages to be acknowledged')


def test_items_whose_queues_are_not_names(connect: Connect, client: Client) -> None:
    """They are dead letters, and stop neither a consumer that starts nor one that follows the changes feed."""
    connection, names = connect(), (5, None, ['q'], ['q', 5], {'q': 1}, True, '')
    item = good(client, connection)
    client.bulk([{**item, '_id': f'before {name}', 'queue': name} for name in names])
    inbox = Inbox(connect())
    publish(connection, 'first')
    assert inbox.wait(1) == ['first']
    inbox.stays(1, 2)  # now the consumer waits for the changes feed
    client.bulk([{**item, '_id': f'later {name}', 'queue': name} for name in names])
    publish(connection, 'next')
    assert inbox.wait(2) == ['first', 'next']
    found = {row['id'] for row in client.view(design.NAME, 'dead', reduce=False)}
    assert found == {f'{when} {name}' for when in ('before', 'later') for name in names if name != ''}


def test_foreign_documents_are_not_changed(connect: Connect, client: Client) -> None:
    foreign: list[dict[str, Any]] = [
        {'_id': 'invoice', 'total': 5},
        {'_id': 'typed', 'type': 'Invoice', 'queue': 'q', 'message': {}},
        {'_id': 'type is a number', 'type': 7},
        {'_id': 'broker:other', 'x': 1},
        {'_id': 'broker:consumer:foreign', 'note': 'no heartbeat'},
        {'_id': 'broker:queue:foreign', 'type': 'Queue'},
        {'_id': 'broadcast', 'type': 'Broadcast', 'message': 5, 'number': 'x'},
        {'_id': 'broker:binding:malformed', 'type': 'Binding', 'exchange': 'direct'},
        {'_id': 'broker:binding:regex', 'type': 'Binding', 'exchange': 'direct', 'pattern': '(', 'queue': 'q'},
    ]
    client.bulk(foreign)
    connection = connect()
    inbox = Inbox(connect(visibility_timeout=1.5))
    publish(connection, 'hello')
    inbox.wait(1)
    inbox.stays(1, 2)
    client.bulk([{**doc, '_id': doc['_id'] + ' 2'} for doc in foreign])
    publish(connection, 'again')
    assert inbox.wait(2) == ['hello', 'again']
    assert client.get('invoice')['total'] == 5


def test_message_whose_encoding_is_never_decoded_is_not_published(connection: Connection, client: Client) -> None:
    for encoding in ('bz2', 'punycode'):
        with pytest.raises(Unstorable, match=f'a dead letter: content-encoding must be .*, not {encoding!r}'):
            publish(connection, b'x', serializer=None, content_type='text/plain', content_encoding=encoding)
    assert items(client) == []


@pytest.mark.parametrize(
    'change',
    [{'content-type': 'application/data', 'content-encoding': 'idna'}, {'headers': {'deep': nested(150)}}],
    ids=['encoding', 'nesting'],
)
def test_broadcast_that_cannot_be_delivered_is_left_out(connect: Connect, broadcasts: Client, change: Any) -> None:
    fan = Queue('fan', Exchange('fan', type='fanout'))
    inbox, producer = Inbox(connect(), fan), connect().Producer()
    producer.publish('first', exchange=fan.exchange, serializer='json')
    inbox.wait(1)
    [row] = broadcasts.id_range('broker:broadcast:', docs=True)
    forged = {**row['doc'], '_id': row['id'] + 'x', 'message': {**row['doc']['message'], **change}}
    del forged['_rev']
    broadcasts.put(forged)
    producer.publish('last', exchange=fan.exchange, serializer='json')
    assert inbox.wait(2) == ['first', 'last']


@pytest.mark.parametrize('place', ['headers', 'claimed'])
def test_documents_that_python_cannot_parse_become_dead_letters(
    connect: Connect, client: Client, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection, depths = connect(), (950, 980, 1200)
    item = good(client, connection)
    if place == 'claimed':
        item['claimed'] = {'by': 'broker:consumer:gone', 'date': LONG_AGO}
    item['message']['headers']['x'] = 'here'
    store(client, [json.dumps({**item, '_id': f'{n}'}).replace('"here"', deep(n)) for n in depths])
    publish(connection, 'next')
    inbox = Inbox(connect(visibility_timeout=1.5))
    assert inbox.wait(1) == ['next']
    wait_for(lambda: len(client.view(design.NAME, 'dead', reduce=False)) == len(depths), 'the dead letters')
    assert all(row['value'].startswith('malformed:') for row in client.view(design.NAME, 'dead', reduce=False))
    publish(connection, 'last')
    assert inbox.wait(2) == ['next', 'last']
    assert len([record for record in caplog.records if 'passed over' in record.getMessage()]) <= len(depths)


def test_messages_with_undecodable_bodies_are_delivered_and_become_dead_letters(
    connection: Connection, client: Client
) -> None:
    for _ in range(2):
        publish(connection, '{broken json', serializer=None, content_type='application/json', content_encoding='utf-8')
    inbox = Inbox(connection, ack=False)
    inbox.drain_until(lambda: len(inbox.messages) == 2, 'the messages')
    for message in inbox.messages:
        assert message.body == b'{broken json'
        with pytest.raises(DecodeError):
            message.decode()
    first, second = inbox.messages
    first.ack()
    second.reject()
    wait_for(lambda: [item.get('status') for item in items(client)] == ['fail', 'fail'], 'the dead letters')
    assert all(item['reason'].startswith('malformed: the body cannot be decoded (') for item in items(client))


def test_numbers_that_overflow_when_squared_block_no_message(connect: Connect, client: Client) -> None:
    connection = connect()
    item = good(client, connection)
    for number in (1e300, -1e300):
        docs = [
            {**item, 'expires': number},
            {**item, 'claimed': {'by': 'nobody', 'date': number}},
            {'_id': 'broker:consumer:', 'type': 'Consumer', 'expires': number},
            {'_id': 'broker:queue:', 'type': 'Queue', 'name': 'x', 'expires': number},
        ]
        client.bulk([{**doc, '_id': f'{doc["_id"]}{number}-{place}'} for place, doc in enumerate(docs)])
    publish(connection, 'next')
    inbox = Inbox(connect(visibility_timeout=1.5))
    inbox.drain_until(lambda: 'next' in inbox.bodies, 'the message')
