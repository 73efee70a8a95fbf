"""The network fails: a consumer goes on by itself, says so once, and consumes again soon after the return."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError

from chaos.proxy import Proxy
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, eta, items, publish, publish_many, record_requests

#: Time limits of requests for who shall notice soon that nothing is answered, in seconds. Who is refused notices at once.
QUICK = {'request_timeout': 2.0, 'connect_timeout': 1.0}


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if 'trying again' in record.message]


def returns(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if 'answers again' in record.message]


def told_in_turn(caplog: pytest.LogCaptureFixture) -> bool:
    """Tell whether each trouble, and the end of each, was told of once, however many a busy machine made of it."""
    said = [
        words for record in caplog.records for words in ('trying again', 'answers again') if words in record.message
    ]
    return all(one != other for one, other in pairwise(said))


def test_server_that_refuses_connections(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True))
    publish(connect(), 'before')
    inbox.wait(1)
    proxy.refuse()
    wait_for(lambda: inbox.drain(0.1) or complaints(caplog), 'the consumer to notice')
    publish(connect(), 'meanwhile')
    inbox.stays(1, 4)
    proxy.restore()
    inbox.wait(2)
    wait_for(lambda: returns(caplog), 'the log to tell of the return')
    assert len(complaints(caplog)) == 1
    assert len(returns(caplog)) == 1
    assert all(
        record.levelno <= logging.WARNING for record in caplog.records if record.name.startswith('kombu_couchdb')
    )
    publish(connect(), 'after')
    inbox.wait(3)


def test_retries_neither_hammer_nor_sleep(
    connect: Callable[..., Connection],
    proxy: Proxy,
    database: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox = Inbox(connect(through_proxy=True))
    publish(connect(), 'before')
    inbox.wait(1)
    proxy.refuse()
    wait_for(lambda: inbox.drain(0.1) or complaints(caplog), 'the consumer to notice')
    tried = record_requests(monkeypatch, database)
    wait_for(lambda: inbox.drain(0.1) or (tried and tried[-1].at - tried[0].at > 8), 'tries for eight seconds')
    # Waits grow from a tenth of a second to two; a try may be several requests.
    assert len(tried) < 60 * (tried[-1].at - tried[0].at) / 8


def test_cut_connections_are_hardly_noticed(connect: Callable[..., Connection], proxy: Proxy, client: Client) -> None:
    inbox = Inbox(connect(through_proxy=True))
    for number in range(20):
        publish(connect(), number)
        if number % 3 == 0:
            proxy.cut()
        inbox.drain(0.1)
    inbox.wait(20)
    assert sorted(set(inbox.bodies)) == list(range(20))
    wait_for(lambda: not items(client), 'all to be acknowledged')


def test_network_that_swallows_everything(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True, **QUICK))
    publish(connect(), 'before')
    inbox.wait(1)
    proxy.hang()
    publish(connect(), 'meanwhile')
    wait_for(lambda: inbox.drain(0.1) or complaints(caplog), 'the consumer to notice')
    proxy.go_on()
    inbox.wait(2)
    publish(connect(), 'after')
    inbox.wait(3)
    assert sorted(inbox.bodies) == ['after', 'before', 'meanwhile']


def test_acks_outlive_the_connection(
    connect: Callable[..., Connection], proxy: Proxy, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True), ack=False)
    for number in range(3):
        publish(connect(), number)
    inbox.wait(3)
    proxy.refuse()
    for message in inbox.messages:
        message.ack()
    wait_for(lambda: complaints(caplog), 'the consumer to notice')
    assert len(items(client)) == 3
    proxy.restore()
    wait_for(lambda: not items(client), 'the acks to be stored')
    inbox.stays(3, 1)


def test_cut_off_for_longer_than_the_lease(
    connect: Callable[..., Connection], proxy: Proxy, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True, visibility_timeout=2.0), ack=False)
    publish(connect(), 'hello')
    inbox.wait(1)
    proxy.refuse()
    other = Inbox(connect(), ack=False)  # it sweeps as soon, and keeps its own lease
    assert other.wait(1) == ['hello']
    inbox.messages[0].ack()
    proxy.restore()
    wait_for(lambda: inbox.drain(0.1) or 'lost its lease' in caplog.text, 'the consumer to learn of it')
    [item] = items(client)
    assert item['claimed']['by'] == other.connection.transport.consumer.id
    other.messages[0].ack()
    wait_for(lambda: not items(client), 'the ack of the new holder')


def test_broadcasts_of_the_time_between(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    news = Exchange('news', type='fanout')
    inbox = Inbox(connect(through_proxy=True), Queue('listener', news))
    producer = connect().Producer(exchange=news)
    producer.publish('before', serializer='json')
    inbox.wait(1)
    proxy.refuse()
    wait_for(lambda: inbox.drain(0.1) or complaints(caplog), 'the consumer to notice')
    for number in range(3):
        producer.publish(number, serializer='json')
    proxy.restore()
    inbox.wait(4)
    assert inbox.bodies == ['before', 0, 1, 2]


def test_scheduled_message_that_became_due_meanwhile(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True))
    due = time.time() + 10
    publish(connect(), 'later', headers=eta(10))
    inbox.stays(0, 1)
    proxy.refuse()
    wait_for(lambda: inbox.drain(0.1) or complaints(caplog), 'the consumer to notice')
    inbox.stays(0, max(0.1, due + 1 - time.time()))
    proxy.restore()
    inbox.wait(1)


def test_publisher_retries_until_the_server_is_back(
    connect: Callable[..., Connection], proxy: Proxy, client: Client
) -> None:
    connection = connect(through_proxy=True)
    publish(connection, 'before')
    proxy.refuse()
    threading.Timer(2, proxy.restore).start()
    publish(connection, 'retried', retry=True, retry_policy={'max_retries': None, 'interval_start': 0.2})
    assert sorted(item['message']['body'] for item in items(client)) == ['"before"', '"retried"']


def test_first_publishing_tries_as_long_as_connecting_may_take(
    connect: Callable[..., Connection], proxy: Proxy, client: Client
) -> None:
    impatient, patient = connect(through_proxy=True), connect(through_proxy=True, connect_retries_timeout=PATIENCE)
    policy = {'max_retries': None, 'interval_start': 0.2}
    proxy.refuse()
    for connection in (impatient, patient):
        connection.connect_timeout = 0.5  # Celery's broker_connection_timeout
    with pytest.raises(OperationalError):
        publish(impatient, 'given up', retry=True, retry_policy=policy)
    threading.Timer(2, proxy.restore).start()
    publish(patient, 'stored', retry=True, retry_policy=policy)
    assert [item['message']['body'] for item in items(client)] == ['"stored"']


def test_publisher_whose_connection_is_lost_while_it_declares(
    connect: Callable[..., Connection], proxy: Proxy, client: Client
) -> None:
    connection = connect(through_proxy=True)
    producer = connection.Producer()
    producer.channel  # noqa: B018 - opens it, while all is well
    proxy.refuse()
    threading.Timer(2, proxy.restore).start()
    producer.publish(
        'retried',
        routing_key='q',
        serializer='json',
        declare=[Queue('q')],
        retry=True,
        retry_policy={'max_retries': None, 'interval_start': 0.2},
    )
    assert [item['message']['body'] for item in items(client)] == ['"retried"']


def test_database_that_was_deleted(
    connect: Callable[..., Connection], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = Exchange('direct')
    inbox = Inbox(connect(), Queue('q', exchange, routing_key='key'))
    publish(connect(), 'before')
    inbox.wait(1)
    client.delete()
    wait_for(lambda: inbox.drain(0.1) or complaints(caplog), 'the consumer to notice')
    wait_for(lambda: inbox.drain(0.1) or returns(caplog), 'the database to be made again')
    connect().Producer().publish('after', exchange=exchange, routing_key='key', serializer='json')
    inbox.wait(2)
    assert len(complaints(caplog)) == 1


def test_database_that_was_deleted_under_a_publisher(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    publish(connection, 'before')
    client.delete()
    publish(connection, 'after', retry=True, retry_policy={'max_retries': 5, 'interval_start': 0.1})
    assert [item['message']['body'] for item in items(client)] == ['"after"']


def test_all_consumers_work_again_after_a_silence_longer_than_their_leases(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level('WARNING')
    inboxes = [Inbox(connect(through_proxy=True, visibility_timeout=2.5, **QUICK), prefetch=1) for _ in range(2)]
    publisher = connect()
    publish_many(publisher, range(10))
    wait_for(
        lambda: (
            [inbox.drain(0.05) for inbox in inboxes]
            and {body for inbox in inboxes for body in inbox.bodies} == set(range(10))
        ),
        'the first ten',
    )
    proxy.hang()
    silent = time.monotonic() + 5.0  # longer than the leases, with the grace that is given to clocks
    wait_for(lambda: [inbox.drain(0.1) for inbox in inboxes] and time.monotonic() > silent, 'the silence to last')
    before = [len(inbox.messages) for inbox in inboxes]
    proxy.go_on()
    for number in range(10, 40):
        publish(publisher, number)
    wait_for(
        lambda: (
            [inbox.drain(0.05) for inbox in inboxes]
            and {body for inbox in inboxes for body in inbox.bodies} == set(range(40))
        ),
        'all others',
    )
    for number in range(40, 400):
        if all(len(inbox.messages) > count for inbox, count in zip(inboxes, before, strict=True)):
            break
        publish(publisher, number)
        for inbox in inboxes:
            inbox.drain(0.1)
    assert all(len(inbox.messages) > count for inbox, count in zip(inboxes, before, strict=True))
