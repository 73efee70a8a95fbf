"""Costs of many queues: those of the worker, those that others declared, and bodies that are not needed."""

from __future__ import annotations

import pytest
from kombu import Exchange, Queue

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE
from tests.support import Inbox, Request, publish, publish_many

from .conftest import Connect

QUEUES, EACH = 25, 4


def consume(connect: Connect, sent: list[Request], names: list[str], each: int) -> int:
    """Publish to each queue, consume all messages with one consumer, and return its number of requests."""
    publisher = connect()
    for name in names:
        publish_many(publisher, range(each), to=name)
    connection = connect()
    # Declare the queues and claim some messages, so that the index is up to date.
    Inbox(connection, *names, prefetch=16, ack=False)
    connection.release()
    inbox = Inbox(connect(), *names, prefetch=16)
    sent.clear()
    inbox.wait(each * len(names))
    return len(sent)


def test_consumer_of_many_queues_needs_few_more_requests_than_of_one(
    connect: Connect, client: Client, sent: list[Request]
) -> None:
    one = consume(connect, sent, ['q'], QUEUES * EACH)
    many = consume(connect, sent, [f'q{number}' for number in range(QUEUES)], EACH)
    assert many < 3 * one + 20  # with some requests for each queue it would be a hundred times as many


def test_many_queues_that_exist_are_declared_without_a_request_for_each(
    connect: Connect, client: Client, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = [Queue(f'q{number}', Exchange('ex'), routing_key=f'k{number}') for number in range(40)]
    others = connect().channel()
    for queue in queues[:-1]:
        queue(others).declare()
    fresh = 'kombu_couchdb.queues.declarations._FRESH_SECONDS'
    monkeypatch.setattr(fresh, 0.0)  # what was read when the connection was established is not trusted any more
    channel = connect().channel()
    monkeypatch.setattr(fresh, 10.0 * PATIENCE)
    sent.clear()
    for queue in queues[:-1]:
        queue(channel).declare()
    assert len(sent) < 20
    queues[-1](channel).declare()
    publish(connect(), 'hello', to='k39', exchange='ex')
    assert Inbox(connect(), 'q39').wait(1) == ['hello']


def test_queue_that_another_program_has_deleted_is_declared_again(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if this program has just declared another one, and has read what was declared when it connected."""
    known, other = (Queue(name, Exchange('ex'), routing_key=name) for name in ('known', 'other'))
    known(connect().channel()).declare()
    monkeypatch.setattr('kombu_couchdb.queues.declarations._FRESH_SECONDS', 0.0)
    connection = connect()
    channel = connection.channel()
    monkeypatch.setattr('kombu_couchdb.queues.declarations._FRESH_SECONDS', 10.0 * PATIENCE)
    other(channel).declare()
    client.bulk([deletion(row['doc']) for row in client.id_range('', docs=True) if 'known' in row['id']])
    known(channel).declare()
    publish(connection, 'hello', to='known', exchange='ex')
    assert Inbox(connect(), 'known').wait(1) == ['hello']


def test_queues_of_others_cost_a_consumer_no_requests(connect: Connect, client: Client, sent: list[Request]) -> None:
    others = connect().channel()
    for number in range(20):
        exchange = Exchange(f'other exchange {number}')
        Queue(f'other {number}', exchange, routing_key='k', max_length=5)(others).declare()
    publish(connect(), 'hello')
    connection = connect()
    connection.connect()
    sent.clear()
    inbox = Inbox(connection)
    assert inbox.wait(1) == ['hello']
    asked = [name for request in sent if request.path == '/_bulk_get' for name in request.body['docs']]
    assert not [one for one in asked if 'other' in one['id']]
