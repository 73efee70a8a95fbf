"""Publishing: one request for a message and one document for each queue; a batch is one request for many messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import requests
from kombu import Connection, Exchange, Producer, Queue

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.queues.declarations import _tables
from tests.support import Inbox, Request, eta, items, publish, replace_in_clients

needs_batch = pytest.mark.skipif(not hasattr(Producer, 'batch'), reason='kombu has Producer.batch() since 5.7')


@pytest.mark.parametrize('properties', [{}, {'priority': 9}, {'headers': eta(3600)}, {'serializer': 'pickle'}])
def test_publish_is_one_request_and_one_document(
    connection: Connection, client: Client, sent: list[Request], properties: dict[str, Any]
) -> None:
    publish(connection, 'the first may set the database up')
    sent.clear()
    for number in range(5):
        publish(connection, number, **properties)
    assert [(request.path, len(request.docs)) for request in sent] == [('/_bulk_docs', 1)] * 5
    assert len(items(client)) == 6


def test_each_queue_gets_a_document_in_the_same_request(
    connection: Connection, client: Client, sent: list[Request]
) -> None:
    exchange = Exchange('topics', type='topic')
    for name in 'abc':
        Queue(name, exchange, routing_key='#')(connection.channel()).declare()
    producer = connection.Producer(exchange=exchange)
    producer.publish('x', routing_key='x', serializer='json')
    sent.clear()
    producer.publish('hello', routing_key='x', serializer='json')
    assert [(request.method, request.path) for request in sent if request.docs] == [('POST', '/_bulk_docs')]
    assert sorted(item['queue'] for item in items(client)) == ['a', 'a', 'b', 'b', 'c', 'c']
    assert len({item['_id'] for item in items(client)}) == 6


def test_connection_that_only_publishes_starts_no_thread(connection: Connection) -> None:
    before = set(threading.enumerate())
    publish(connection, 'hello')
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


#: How kombu tries again.
SOON = {'interval_start': 0, 'max_retries': 3}


def lose_first_response(
    monkeypatch: pytest.MonkeyPatch,
    database: str,
    act: Callable[[], object] = lambda: None,
    cause: Exception | None = None,
) -> list[object]:
    """Let CouchDB store the next message, and let its response be lost; return a list that contains it then."""
    request, lost = Client.request, list[object]()

    def request_and_lose(self: Client, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = request(self, method, *args, **kwargs)
        if args[:1] == ('/_bulk_docs',) and not lost:
            lost.append(answer)
            act()
            raise ServerUnavailable('the answer was lost') from cause
        return answer

    replace_in_clients(monkeypatch, database, 'request', request_and_lose)
    return lost


def test_retry_after_a_lost_response_stores_the_message_once(
    connection: Connection, client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt was stored, although its response was lost. The retry must not store a second message."""
    publish(connection, 'the first may set the database up')
    lost = lose_first_response(monkeypatch, database)
    publish(connection, 'hello', retry=True, retry_policy=SOON)
    assert len(lost) == 1
    assert len(items(client)) == 2


@pytest.mark.parametrize('cause', [None, requests.ConnectionError()], ids=['no answer', 'cut'])
def test_retry_does_not_store_a_message_that_was_completed(
    connection: Connection, client: Client, database: str, monkeypatch: pytest.MonkeyPatch, cause: Exception | None
) -> None:
    def complete() -> None:
        with connection.clone() as other:
            Inbox(other).wait(2)
        assert items(client) == []

    publish(connection, 'the first may set the database up')
    lost = lose_first_response(monkeypatch, database, complete, cause)
    publish(connection, 'hello', retry=True, retry_policy=SOON)
    assert len(lost) == 1
    assert items(client) == []


def test_task_that_is_published_again_after_an_error_is_stored_once(
    connection: Connection, client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery 5.7 makes a new message for each attempt to publish the next step of a chain."""
    publish(connection, 'the first may set the database up')
    lose_first_response(monkeypatch, database)
    with pytest.raises(connection.connection_errors):
        publish(connection, 'step', headers={'id': 'a-task', 'retries': 0})
    publish(connection, 'another step', headers={'id': 'a-task', 'retries': 0})
    publish(connection, 'step', headers={'id': 'a-task', 'retries': 0})
    assert len(items(client)) == 3
    publish(connection, 'step', headers={'id': 'a-task', 'retries': 0})  # no attempt has failed since
    assert len(items(client)) == 4


@pytest.mark.parametrize('batched', [False, pytest.param(True, marks=needs_batch)], ids=['alone', 'batched'])
def test_prepared_message_published_twice_is_two_messages(
    connection: Connection, client: Client, batched: bool
) -> None:
    channel = connection.channel()
    body, headers = b'\xff', {'of': [1]}
    message = channel.prepare_message(body, content_type='application/data', content_encoding='binary', headers=headers)
    batch = channel.create_publish_batch(100) if batched else None
    for number in (1, 2):
        headers['of'][0] = number
        (batch.publish if batch else channel.basic_publish)(message, exchange='', routing_key='q')
        assert message['body'] == body
    if batch:
        batch.flush()
    assert [item['message']['headers'] for item in items(client)] == [{'of': [1]}, {'of': [2]}]
    inbox = Inbox(connection)
    inbox.wait(2)
    assert [received.body for received in inbox.messages] == [body, body]


def test_first_publish_of_a_process_takes_two_requests(
    connection: Connection, connect: Callable[..., Connection], client: Client, sent: list[Request]
) -> None:
    """The first of them shows that the queue exists."""
    queue = Queue('celery', Exchange('celery'), routing_key='celery')
    for one in (connection, connect()):
        _tables._objects.clear()  # as in a new process
        sent.clear()
        one.Producer().publish('hello', routing_key='celery', serializer='json', declare=[queue])
    assert len(sent) <= 2, [(request.method, request.path) for request in sent]
    assert len(items(client)) == 2


@needs_batch
def test_batch_is_one_request(connection: Connection, client: Client, sent: list[Request]) -> None:
    producer = connection.Producer()
    assert producer.supports_batch_publish
    producer.publish('the first may set the database up', routing_key='q', serializer='json')
    sent.clear()
    with producer.batch() as batch:
        for number in range(250):
            producer.publish(number, routing_key='q', serializer='json', priority=number % 10)
        assert not sent
        batch.flush()
        producer.publish('last', routing_key='q', serializer='json')
    assert [(request.path, len(request.docs)) for request in sent] == [('/_bulk_docs', 250), ('/_bulk_docs', 1)]
    assert len(items(client)) == 252
    sent.clear()
    with producer.batch(max_size=10):
        for number in range(25):
            producer.publish(number, routing_key='other', serializer='json')
    assert [len(request.docs) for request in sent] == [10, 10, 5]
    assert Inbox(connection, 'other', prefetch=1).wait(25) == list(range(25))


@needs_batch
def test_batch_with_an_exception_stores_nothing(connection: Connection, client: Client) -> None:
    producer = connection.Producer()

    def break_off() -> None:
        with producer.batch():
            producer.publish('hello', routing_key='q', serializer='json')
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert not items(client)
    producer.publish('after it', routing_key='q', serializer='json')
    assert len(items(client)) == 1


@needs_batch
def test_broadcasts_are_sent_at_once_within_a_batch(connect: Callable[..., Connection], client: Client) -> None:
    news = Exchange('news', type='fanout')
    inbox = Inbox(connect(), Queue('listener', news))
    producer = connect().Producer()
    with producer.batch():
        for number in range(5):
            producer.publish(number, exchange=news, declare=[news], serializer='json')
            producer.publish(number, routing_key='q', serializer='json')
        assert inbox.wait(5) == [0, 1, 2, 3, 4]
        assert not items(client)
    assert len(items(client)) == 5


def test_queue_declare_counts_messages_only_on_demand(
    connection: Connection, client: Client, sent: list[Request]
) -> None:
    channel = connection.channel()
    for number in range(2):
        publish(connection, number)
    declared = channel.queue_declare('q')
    sent.clear()
    assert (declared.queue, declared[0], declared.consumer_count) == ('q', 'q', 0)
    assert not sent
    name, count, consumers = declared
    assert (name, count, consumers, declared[1], declared.message_count) == ('q', 2, 0, 2, 2)
    assert declared[:2] == ('q', 2)
    assert declared._asdict() == {'queue': 'q', 'message_count': 2, 'consumer_count': 0}
    assert len(sent) <= 2


def test_consuming_program_stores_transient_messages_before_publish_returns(
    connection: Connection, client: Client
) -> None:
    exchange = Exchange('prices', type='direct', delivery_mode='transient')
    Queue('prices', exchange, routing_key='all')(connection.channel()).declare()
    Inbox(connection, 'others').drain(0.1)
    producer = connection.Producer(exchange=exchange, routing_key='all')
    for number in range(3):
        producer.publish(number)
        assert len(items(client)) == number + 1
