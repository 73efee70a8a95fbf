"""Network failures: a consumer logs the failure once, retries by itself, and resumes soon after the network works."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError

from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.changes import open_feed
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, items, publish, record_requests


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if 'trying again' in record.message]


def returns(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if 'responds again' in record.message]


def test_consumer_logs_once_and_resumes_after_refused_connections(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True))
    publish(connect(), 'before')
    inbox.wait(1)
    proxy.refuse()
    inbox.drain_until(lambda: complaints(caplog), 'the consumer to notice the failure')
    publish(connect(), 'meanwhile')
    inbox.stays(1, 4)
    proxy.restore()
    inbox.wait(2)
    wait_for(lambda: returns(caplog), 'the log line about the return')
    assert len(complaints(caplog)) == 1
    assert len(returns(caplog)) == 1
    assert all(
        record.levelno <= logging.WARNING for record in caplog.records if record.name.startswith('kombu_couchdb')
    )
    publish(connect(), 'after')
    inbox.wait(3)


def test_retries_are_spread_over_time(
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
    inbox.drain_until(lambda: complaints(caplog), 'the consumer to notice the failure')
    tried = record_requests(monkeypatch, database)
    inbox.drain_until(lambda: tried and tried[-1].at - tried[0].at > 8, 'eight seconds of retries')
    # The pauses between retries grow from 0.1 to 2 seconds, and one retry may be several requests.
    assert len(tried) < 60 * (tried[-1].at - tried[0].at) / 8


def test_consumer_survives_cut_connections(connect: Callable[..., Connection], proxy: Proxy, client: Client) -> None:
    inbox = Inbox(connect(through_proxy=True))
    for number in range(20):
        publish(connect(), number)
        if number % 3 == 0:
            proxy.cut()
        inbox.drain(0.1)
    inbox.wait(20)
    assert sorted(set(inbox.bodies)) == list(range(20))
    wait_for(lambda: not items(client), 'all messages to be acknowledged')


def test_acks_made_while_disconnected_are_written_later(
    connect: Callable[..., Connection], proxy: Proxy, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True), ack=False)
    for number in range(3):
        publish(connect(), number)
    inbox.wait(3)
    proxy.refuse()
    for message in inbox.messages:
        message.ack()
    wait_for(lambda: complaints(caplog), 'the consumer to notice the failure')
    assert len(items(client)) == 3
    proxy.restore()
    wait_for(lambda: not items(client), 'the acks to be written')
    inbox.stays(3, 1)


def test_disconnected_consumer_loses_its_lease_to_another(
    connect: Callable[..., Connection], proxy: Proxy, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(connect(through_proxy=True, visibility_timeout=2.0), ack=False)
    publish(connect(), 'hello')
    inbox.wait(1)
    proxy.refuse()
    other = Inbox(connect(), ack=False)  # its default lease is longer: it keeps this lease and sweeps the other
    assert other.wait(1) == ['hello']
    inbox.messages[0].ack()
    proxy.restore()
    inbox.drain_until(lambda: 'lost its lease' in caplog.text, 'the consumer to notice the lost lease')
    [item] = items(client)
    assert item['claimed']['by'] == other.connection.transport.consumer.id
    other.messages[0].ack()
    wait_for(lambda: not items(client), 'the ack of the new holder')


def test_broadcasts_sent_while_disconnected_are_delivered(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    news = Exchange('news', type='fanout')
    inbox = Inbox(connect(through_proxy=True), Queue('listener', news))
    producer = connect().Producer(exchange=news)
    producer.publish('before', serializer='json')
    inbox.wait(1)
    proxy.refuse()
    inbox.drain_until(lambda: complaints(caplog), 'the consumer to notice the failure')
    for number in range(3):
        producer.publish(number, serializer='json')
    proxy.restore()
    inbox.wait(4)
    assert inbox.bodies == ['before', 0, 1, 2]


@pytest.mark.parametrize('declare', [[], [Queue('q')]], ids=['storing', 'declaring'])
def test_publisher_retries_until_the_server_is_back(
    connect: Callable[..., Connection], proxy: Proxy, client: Client, declare: list[Queue]
) -> None:
    connection = connect(through_proxy=True)
    producer = connection.Producer()
    producer.channel  # noqa: B018 - opens the channel before the failure
    proxy.refuse()
    threading.Timer(2, proxy.restore).start()
    policy = {'max_retries': None, 'interval_start': 0.2}
    producer.publish('retried', routing_key='q', serializer='json', declare=declare, retry=True, retry_policy=policy)
    assert [item['message']['body'] for item in items(client)] == ['"retried"']


def test_first_publish_retries_for_connect_retries_timeout(
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


def test_consumer_recreates_a_deleted_database(
    connect: Callable[..., Connection], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = Exchange('direct')
    inbox = Inbox(connect(), Queue('q', exchange, routing_key='key'))
    publish(connect(), 'before')
    inbox.wait(1)
    client.delete()
    inbox.drain_until(lambda: complaints(caplog), 'the consumer to notice the failure')
    inbox.drain_until(lambda: returns(caplog), 'the database to be created again')
    connect().Producer().publish('after', exchange=exchange, routing_key='key', serializer='json')
    inbox.wait(2)
    assert len(complaints(caplog)) == 1
    assert 'the database was deleted and created again' in caplog.text
    assert 'was silent for longer' not in caplog.text


def test_publisher_recreates_a_deleted_database(connect: Callable[..., Connection], client: Client) -> None:
    connection = connect()
    publish(connection, 'before')
    client.delete()
    publish(connection, 'after', retry=True, retry_policy={'max_retries': 5, 'interval_start': 0.1})
    assert [item['message']['body'] for item in items(client)] == ['"after"']


def test_consumer_that_closes_during_an_outage_does_not_say_that_the_server_responds(
    connect: Callable[..., Connection], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(through_proxy=True)
    inbox = Inbox(connection, ack=False)
    publish(connect(), 'held')
    inbox.wait(1)
    proxy.refuse()
    wait_for(lambda: complaints(caplog), 'the consumer to notice the failure')
    connection.close()
    assert 'other workers receive the messages of this one when its lease expires' in caplog.text
    assert not returns(caplog)


def test_idle_connections_that_a_network_has_forgotten_delay_one_request_only(proxy: Proxy, client: Client) -> None:
    address = replace(client.address, host='127.0.0.1', port=proxy.port)
    through = Client(address, HTTPOptions(1.0, 1.0))
    proxy.delay = 0.2
    readers = [threading.Thread(target=through.info) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert proxy.accepted > 1
    proxy.delay = 0.0
    proxy.hang()
    proxy.forget()
    with pytest.raises(ServerUnavailable):
        through.info()
    feed = open_feed(through, 'now', {}, 1, 60.0)  # it takes the connection that replaces the broken one
    assert through.info()['doc_count'] == client.info()['doc_count']
    feed.close()
    through.close()
