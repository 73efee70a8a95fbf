"""The documents of messages, as a person reads them in the database."""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Callable

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.support import Inbox, eta, items, publish


def test_fields_of_a_ready_message(connection: Connection, client: Client) -> None:
    before = time.time()
    publish(connection, {'name': 'Zoë'}, 'orders', priority=7)
    [item] = wait_for(lambda: items(client), 'the message')
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


def test_json_body_is_readable(connection: Connection, client: Client) -> None:
    publish(connection, {'name': 'Zoë', 'sum': 3})
    [item] = items(client)
    assert json.loads(item['message']['body']) == {'name': 'Zoë', 'sum': 3}


def test_text_body_is_readable(connection: Connection, client: Client) -> None:
    publish(connection, 'Grüße', serializer=None, content_type='text/plain', content_encoding='utf-8')
    assert items(client)[0]['message']['body'] == 'Grüße'
    assert Inbox(connection).wait(1) == ['Grüße']


def test_pickle_body_is_base64(connection: Connection, client: Client) -> None:
    publish(connection, {1, 2}, serializer='pickle')
    assert pickle.loads(base64.b64decode(items(client)[0]['message']['body'])) == {1, 2}
    assert Inbox(connection).wait(1) == [{1, 2}]


def test_msgpack_body_is_base64(connection: Connection, client: Client) -> None:
    msgpack = pytest.importorskip('msgpack')
    publish(connection, [1, 'zwei'], serializer='msgpack')
    assert msgpack.unpackb(base64.b64decode(items(client)[0]['message']['body'])) == [1, 'zwei']
    assert Inbox(connection).wait(1) == [[1, 'zwei']]


@pytest.mark.parametrize('body', [b'', b'\x00\xff\xfe', bytes(range(256)) * 40])
def test_bytes_survive_a_round_trip(connection: Connection, body: bytes) -> None:
    publish(connection, body, serializer=None, content_type='application/data', content_encoding='binary')
    inbox = Inbox(connection)
    inbox.wait(1)
    assert inbox.messages[0].body == body


@pytest.mark.parametrize('compression', ['zlib', 'bzip2'])
def test_compressed_body(connection: Connection, compression: str) -> None:
    publish(connection, 'x' * 10_000, compression=compression)
    assert Inbox(connection).wait(1) == ['x' * 10_000]


def test_scheduled_message_has_a_date(connection: Connection, client: Client) -> None:
    publish(connection, 'later', headers=eta(3600))
    [item] = items(client)
    assert abs(item['date'] - time.time() - 3600) < 60


def test_claimed_message_names_its_consumer(connection: Connection, client: Client) -> None:
    publish(connection, 'hello')
    Inbox(connection, ack=False).wait(1)
    [item] = items(client)
    assert item['attempts'] == 1
    assert client.get(item['claimed']['by'])['type'] == 'Consumer'
    assert abs(item['claimed']['date'] - time.time()) < 60


def test_acknowledged_message_leaves_no_body(connect: Callable[..., Connection], client: Client) -> None:
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
