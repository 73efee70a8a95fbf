"""The documents of messages, as a person reads them in the database."""

from __future__ import annotations

import json
import pickle
import time
import zlib
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.support import Inbox, eta, items, publish

from .conftest import Connect


def test_fields_of_a_message(connection: Connection, client: Client) -> None:
    before = time.time()
    publish(connection, {'name': 'Zoë'}, 'orders', priority=7)
    [item] = items(client)
    assert {name: item[name] for name in ('type', 'queue', 'priority', 'date', 'claimed', 'attempts')} == {
        'type': 'WorkItem',
        'queue': 'orders',
        'priority': 7,
        'date': None,
        'claimed': None,
        'attempts': 0,
    }
    assert before - 3 < item['published'] < time.time() + 3
    assert 'status' not in item
    assert set(item['message']) == {'body', 'headers', 'properties', 'content-type', 'content-encoding'}
    publish(connection, 'later', headers=eta(3600))
    assert abs(items(client)[1]['date'] - time.time() - 3600) < 60


def base64(read: Callable[[bytes], Any]) -> Callable[[str], Any]:
    return lambda body: read(b64decode(body))


PLAIN = {'serializer': None, 'content_type': 'text/plain', 'content_encoding': 'utf-8'}
BINARY = {'serializer': None, 'content_type': 'application/data', 'content_encoding': 'binary'}

BODIES: dict[str, tuple[Any, dict[str, Any], Callable[[str], Any]]] = {
    'json': ({'name': 'Zoë', 'sum': 3}, {}, json.loads),
    'text': ('Grüße', PLAIN, str),
    'pickle': ({1, 2}, {'serializer': 'pickle'}, base64(pickle.loads)),
    'bytes': (
        b'\x00\xff',
        {'serializer': None, 'content_type': 'application/data', 'content_encoding': 'binary'},
        base64(bytes),
    ),
    'compressed': ('x' * 10_000, {'compression': 'zlib'}, base64(lambda body: json.loads(zlib.decompress(body)))),
}


def test_text_is_readable_and_other_bodies_are_base64(connection: Connection, client: Client) -> None:
    for body, properties, _ in BODIES.values():
        publish(connection, body, **properties)
    for item, (body, _, read) in zip(items(client), BODIES.values(), strict=True):
        assert read(item['message']['body']) == body
    assert Inbox(connection).wait(len(BODIES)) == [body for body, _, _ in BODIES.values()]


def test_claimed_message_names_its_consumer(connection: Connection, client: Client) -> None:
    publish(connection, 'hello')
    Inbox(connection, ack=False).wait(1)
    [item] = items(client)
    assert item['attempts'] == 1
    assert client.get(item['claimed']['by'])['type'] == 'Consumer'
    assert abs(item['claimed']['date'] - time.time()) < 60


def test_acknowledged_message_leaves_no_body(connect: Connect, client: Client) -> None:
    connection = connect()
    publish(connection, 'secret', 'q')
    doc_id = items(client)[0]['_id']
    Inbox(connection).wait(1)
    wait_for(lambda: not items(client), 'the message to be deleted')
    [change] = [
        row for row in client.request('GET', '/_changes', {'include_docs': True})['results'] if row['id'] == doc_id
    ]
    assert set(change['doc']) <= {'_id', '_rev', '_deleted'}


def test_headers_and_properties_are_delivered(connection: Connection) -> None:
    headers = {'id': 'x', 'nested': {'list': [1, None, 'ü']}, 'number': 1.5}
    publish(connection, 'hello', headers=headers, correlation_id='c', reply_to='r', priority=3)
    inbox = Inbox(connection)
    inbox.wait(1)
    [message] = inbox.messages
    assert message.headers == headers
    properties = {name: message.properties[name] for name in ('correlation_id', 'reply_to', 'priority')}
    assert properties == {'correlation_id': 'c', 'reply_to': 'r', 'priority': 3}
    assert message.delivery_info['routing_key'] == 'q'
    assert message.content_type == 'application/json'
