"""Direct and topic exchanges: every process uses new bindings at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue, binding
from kombu.exceptions import ChannelError

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError, ServerUnavailable
from tests.conftest import wait_for
from tests.support import Inbox, items, run_python

from .conftest import Connect

TOPICS = Exchange('topics', type='topic')
DIRECT = Exchange('direct', type='direct')
HEADERS = Exchange('ex', type='headers')


def send(connection: Connection, exchange: Exchange, routing_key: str, body: object = 'hello') -> None:
    connection.Producer().publish(
        body, exchange=exchange, routing_key=routing_key, serializer='json', declare=[exchange]
    )


def test_direct_exchange_routes_to_all_queues_with_the_key(
    connect: Connect, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    channel = connect().channel()
    for name, key in (('one', 'a'), ('two', 'a'), ('three', 'b')):
        Queue(name, DIRECT, routing_key=key)(channel).declare()
    with caplog.at_level(logging.DEBUG, 'kombu_couchdb'):
        for exchange, key in ((DIRECT, 'a'), (DIRECT, 'nobody'), (TOPICS, 'no.body')):
            send(connect(), exchange, key)
    assert sorted(item['queue'] for item in items(client)) == ['one', 'two']
    lines = {message for message in caplog.messages if message.startswith('published')}
    assert lines == {f'published message {item["_id"]} to queue {item["queue"]}' for item in items(client)}


def test_binding_of_another_process_is_used_at_once(connect: Connect, client: Client) -> None:
    publisher = connect()
    # A consuming connection follows the bindings through the changes feed.
    Inbox(publisher, Queue('other', DIRECT, routing_key='other'))
    send(publisher, DIRECT, 'new')
    assert not items(client)
    run_python(
        """
import os
import kombu_couchdb
from kombu import Connection, Exchange, Queue
with Connection(os.environ['URL']) as connection:
    Queue('q', Exchange('direct', type='direct'), routing_key='new')(connection.channel()).declare()
""",
        URL=connect().as_uri(include_password=True),
    )
    send(publisher, DIRECT, 'new')
    assert [item['queue'] for item in items(client)] == ['q']


@pytest.mark.parametrize(
    'change', [lambda queue: queue.unbind_from(DIRECT, 'a'), lambda queue: queue.exchange.delete()]
)
def test_queue_that_is_not_bound_any_more_gets_nothing(
    connection: Connection, client: Client, change: Callable[[Queue], object]
) -> None:
    queue = Queue('q', DIRECT, routing_key='a')(connection.channel())
    queue.declare()
    change(queue)
    send(connection, DIRECT, 'a')
    assert not items(client)


def test_topic_exchange_across_connections(connect: Connect, client: Client) -> None:
    errors = Inbox(connect(), Queue('errors', TOPICS, routing_key='*.error'))
    everything = Inbox(connect(), Queue('all', TOPICS, routing_key='#'))
    publisher = connect()
    for number, key in enumerate(('web.error', 'web.info', 'db.error')):
        publisher.Producer().publish(number, exchange='topics', routing_key=key, serializer='json')  # not declared
    assert errors.wait(2) == [0, 2]
    assert everything.wait(3) == [0, 1, 2]
    wait_for(lambda: not items(client), 'all messages to be acknowledged')


def test_unsupported_and_unknown_exchanges_are_refused(connection: Connection) -> None:
    message = "exchange 'ex' has the type 'x-random', which is not supported; use direct, topic, headers or fanout"
    with pytest.raises(ConfigurationError, match=message):
        Exchange('ex', type='x-random')(connection.channel()).declare()
    assert not connection.supports_exchange_type('x-random')
    assert connection.supports_exchange_type('headers')
    message = "queue 'q' is bound to exchange 'ex' with x-match 'some'; use one of all, any, all-with-x, any-with-x"
    with pytest.raises(ConfigurationError, match=message):
        Queue('q', HEADERS, binding_arguments={'x-match': 'some'})(connection.channel()).declare()
    with pytest.raises(ChannelError, match='404'):
        connection.channel().exchange_declare('unknown', passive=True)
    Queue('q', Exchange('known'), routing_key='a')(connection.channel()).declare()
    connection.channel().exchange_declare('known', passive=True)


def test_headers_exchange_across_connections(connect: Connect, client: Client) -> None:
    """A publisher that has declared nothing routes by headers; the bindings of one queue are kept apart."""
    channel, publisher = connect().channel(), connect().Producer(serializer='json')
    red = binding(HEADERS, arguments={'color': 'red', 'size': 1}, unbind_arguments={'color': 'red', 'size': 1})
    Queue('both', bindings=[red, binding(HEADERS, arguments={'urgent': True})])(channel).declare()
    Queue('any', HEADERS, binding_arguments={'x-match': 'any', 'color': 'red', 'size': 2})(channel).declare()

    seen = set[str]()

    def sent(**headers: object) -> list[str]:
        publisher.publish('hello', exchange='ex', routing_key='ignored', headers=headers)
        found = [item for item in items(client) if item['_id'] not in seen]
        seen.update(item['_id'] for item in found)
        return sorted(item['queue'] for item in found)

    assert sent(color='red', size=1) == ['any', 'both']
    assert [sent(urgent=True), sent(urgent=1), sent(size=2), sent()] == [['both'], [], ['any'], []]
    red.unbind(Queue('both')(channel))
    assert [sent(color='red', size=1), sent(urgent=True)] == [['any'], ['both']]


def test_tasks_reach_the_queues_of_a_headers_exchange(app: Celery, client: Client) -> None:
    app.conf.task_queues = [
        Queue(color, HEADERS, binding_arguments={'x-match': 'any', 'color': color}) for color in ('red', 'blue')
    ]
    with app.connection_for_write() as connection:
        for queue in app.amqp.queues.values():
            queue(connection.default_channel).declare()
    for options in ({'exchange': 'ex', 'routing_key': 'any'}, {'queue': 'blue'}):  # Celery takes the queue's exchange
        app.send_task('paint', headers={'color': 'red'}, **options)
        app.send_task('paint', headers={'color': 'green'}, **options)
    assert [item['queue'] for item in items(client)] == ['red', 'red']


@pytest.mark.parametrize('stored', [True, False])
@pytest.mark.parametrize('binds', [True, False])
def test_each_queue_gets_one_copy_if_bindings_change_before_a_retry(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch, binds: bool, stored: bool
) -> None:
    publisher, other = connect(), connect().channel()
    first, *others = (Queue(name, DIRECT, routing_key='k')(other) for name in 'abc')
    for queue in others if binds else (first, *others):
        queue.declare()
    publisher.connect()
    store_items, tries = publisher.transport.store_items, list[object]()

    def lose(docs: list[dict[str, object]], **kwargs: bool) -> object:
        if tries or stored:
            store_items(docs, **kwargs)
        tries.append(docs)
        if len(tries) == 1:
            first.declare() if binds else first.unbind_from(DIRECT, 'k')
            raise ServerUnavailable('the answer was lost')
        return []

    monkeypatch.setattr(publisher.transport, 'store_items', lose)
    publisher.Producer().publish(
        'hello',
        exchange='direct',
        routing_key='k',
        serializer='json',
        retry=True,
        retry_policy={'interval_start': 0, 'max_retries': 3},
    )
    there = ['b', 'c'] if not (binds or stored) else ['a', 'b', 'c']
    assert sorted(item['queue'] for item in items(client)) == there


def test_forked_child_reads_the_bindings_itself(url: str) -> None:
    """The routing table of the parent follows the changes feed; the copy in the child does not."""
    run_python(
        """
import os
import kombu_couchdb
from kombu import Connection, Consumer, Exchange, Queue
direct = Exchange('direct', type='direct')
parent = Connection(os.environ['URL'])
old, new = (Queue(name, direct, routing_key='k') for name in ('old', 'new'))
old(parent.default_channel).declare()
Consumer(parent.channel(), [Queue('other')], on_message=lambda message: None).consume()
producer = parent.Producer(exchange=direct, routing_key='k', serializer='json')
topology = parent.transport.topology
topology.lookup('direct', 'k', {})
while not topology.known.knows('direct'):
    pass
import time; time.sleep(0.5)
child = os.fork()
if not child:
    try:
        with Connection(os.environ['URL']) as own:
            bound = new(own.default_channel)
            bound.declare()
            old(own.default_channel).unbind_from(direct, 'k')
        producer.publish('hello')
    finally:
        os._exit(0)
os.waitpid(child, 0)
with Connection(os.environ['URL']) as other:
    assert new(other.default_channel).get(no_ack=True), 'not in the queue that is bound'
    assert not old(other.default_channel).get(no_ack=True), 'in the queue that is not bound any more'
parent.release()
""",
        URL=url,
    )
