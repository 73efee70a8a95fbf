"""Names of queues and exchanges, and routing keys: any text is kept distinct from any other, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_couchdb.admin.status import status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.bindings import topic_matches
from kombu_couchdb.documents.validation import check_names
from kombu_couchdb.errors import ConfigurationError
from tests.support import Inbox, items, publish

from .strategies import ODD
from .test_messages import clear

#: Names that CouchDB collates as equal: with and without invisible characters, one letter in two encodings, digits of
#: two scripts.
TWINS = ['a', 'a\0', 'a\u200b', 'a\u00ad', 'a\ufeff', '\u00e9', 'e\u0301', 'K', '\u212a', 'q1', 'q\u0661', '\U0001d41a']


def fit(name: str) -> bool:
    try:
        check_names(queue=name)
    except ConfigurationError as exc:
        clear(exc)
        return False
    return name != ''


def test_queues_whose_names_collate_as_equal_are_separate(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    for name in TWINS:
        for number in range(2):
            publish(connection, [name, number], name)
    channel = connection.channel()
    assert {name: queue['ready'] for name, queue in status(client)['queues'].items()} == dict.fromkeys(TWINS, 2)
    for name in TWINS[::2]:
        assert channel.queue_purge(name) == 2
    for name in TWINS[1::2]:
        inbox = Inbox(connection, name)
        assert sorted(inbox.wait(2)) == [[name, 0], [name, 1]]
        inbox.consumer.cancel()
    assert not [item for item in items(client) if item['queue'] in TWINS[::2]]


def test_queues_with_any_names_are_separate(connect: Callable[..., Connection], client: Client) -> None:
    connection, names = connect(), [name for name in ODD if fit(name)]
    for name in names:
        publish(connection, name, name)
    inbox = Inbox(connect(), *names)
    assert sorted(inbox.wait(len(names))) == sorted(names)
    assert all(message.delivery_info['routing_key'] == message.decode() for message in inbox.messages)


def test_bindings_with_any_keys_lead_to_their_queues(connect: Callable[..., Connection], client: Client) -> None:
    connection, names = connect(), [name for name in ODD if fit(name)]
    exchange = Exchange('exchange \u00e9/%', type='direct')
    channel = connection.channel()
    for name in names:
        Queue('to ' + name[:490], exchange, routing_key=name)(channel).declare()
    producer = connection.Producer()
    for name in names:
        producer.publish(name, exchange=exchange, routing_key=name, serializer='json')
    assert sorted((item['queue'], item['message']['body']) for item in items(client)) == sorted(
        ('to ' + name[:490], connection.Producer()._prepare(name, 'json')[0]) for name in names
    )


@pytest.mark.parametrize(
    'use',
    [
        lambda channel, name: channel.queue_declare(name),
        lambda channel, name: channel.basic_consume(name, True, print, 'tag'),
        lambda channel, name: channel.basic_get(name),
        lambda channel, name: channel.queue_delete(name),
        lambda channel, name: channel.queue_purge(name),
        lambda channel, name: channel.queue_bind('q', 'exchange', name),
        lambda channel, name: channel.exchange_delete(name),
        lambda channel, name: channel.basic_publish(channel.prepare_message('x'), '', name),
    ],
    ids=['declare', 'consume', 'get', 'delete', 'purge', 'bind', 'exchange', 'publish'],
)
def test_invalid_names_are_refused_at_once(connection: Connection, client: Client, use: Any) -> None:
    for name in ('\ud800', 'x' * 501, 'ß' * 251, 5, b'q'):
        with pytest.raises(ConfigurationError, match='must be text of at most 500 bytes') as caught:
            use(connection.default_channel, name)
        clear(caught.value)


def test_matching_long_topics_is_fast() -> None:
    assert not topic_matches('#.a.' * 100 + 'b', 'a.' * 200 + 'c')
    assert topic_matches('#.' * 100 + 'b', 'a.' * 200 + 'b')
