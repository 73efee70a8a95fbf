"""Consumers and publishers of a service that limits requests (`kombu_couchdb.couchdb.pacing`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kombu import Connection

from examples.managed.service import Service
from kombu_couchdb.couchdb import pacing
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.pacing import Pace, RequestKind, Turn
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.leases.lease import Lease
from kombu_couchdb.leases.sweeper import Sweeper
from kombu_couchdb.queues import waiting
from kombu_couchdb.queues.store import Store
from kombu_couchdb.queues.topology import Topology
from tests.conftest import wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, eta, items, publish, publish_many


@pytest.fixture
def slowed(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client that knows that queries are limited, to many a second."""
    monkeypatch.setattr(pacing, '_MIN_RATE', 1000.0)
    pace = Pace(client.address.server)
    pace.refused(Turn(RequestKind.QUERY), 0.0)
    monkeypatch.setattr(client.server, 'pace', pace)
    return client


@pytest.fixture
def service(client: Client, url: str) -> Iterator[str]:
    """The URL of the test's database in a service with limits."""
    server = url.replace('couchdb', 'http', 1).rpartition('/')[0]
    with Service(server, {RequestKind.READ: 40, RequestKind.WRITE: 20, RequestKind.QUERY: 10}) as service:
        yield f'{service.url.replace("http", "couchdb", 1)}/{client.address.database}'


def test_queue_is_read_the_same_way_with_few_queries(connection: Connection, slowed: Client) -> None:
    for number in range(4):
        publish(connection, number, priority=number)
    for seconds in (1, 2, 3600, 7200):
        publish(connection, seconds, headers=eta(seconds))
    until = slowed.clock.now() + 60
    slow = slowed.pace
    for limit in (1, 3, 4, 5, 6, 20):
        asks = [waiting.Ask('q', limit), waiting.Ask('other', limit)]
        for _ in range(9):
            slowed.server.pace = None
            expected = waiting.read(slowed, asks, until)
            slowed.server.pace = slow
            assert waiting.read(slowed, asks, until) == expected
            if (last := expected[0].last) is None:
                break
            asks = [waiting.Ask('q', limit, last)]
    assert slowed.fetch(['a', 'b']) == [None, None]


def test_messages_arrive_and_are_acknowledged(client: Client, service: str, caplog: pytest.LogCaptureFixture) -> None:
    with PatientConnection(service) as publisher, PatientConnection(service) as consumer:
        inbox = Inbox(consumer, prefetch=4)
        publish_many(publisher, range(100))
        with ThreadPoolExecutor(10) as threads:
            list(threads.map(lambda number: publish(publisher, number), range(100, 120)))
        inbox.wait(120)
        assert sorted(inbox.bodies) == list(range(120))
        wait_for(lambda: not items(client), 'the acknowledgements')
    assert not [record for record in caplog.records if 'trying again' in record.getMessage()]


def test_no_lease_ends_while_all_writes_are_refused(
    connection: Connection, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeats of others are refused, too."""
    connection.connect()
    lease = Lease(3.0)
    client.put(lease.heartbeat_document(client.clock.now() - 60.0, ['q'], {}))
    sweeper = Sweeper(Store(client), Topology(client), 3.0)
    refusals = []

    def bulk(docs: Sequence[Any]) -> list[WriteResult]:
        refusals.append(docs)
        error = ServerUnavailable('refused')
        error.status = 429
        raise error

    with monkeypatch.context() as refusing:
        refusing.setattr(client, 'bulk', bulk)

        def swept() -> bool:
            assert lease.id in sweeper.sweep('broker:consumer:own', set(), lambda: None)
            return bool(refusals)

        wait_for(swept, 'the lease to have expired')
    wait_for(lambda: lease.id not in sweeper.sweep('broker:consumer:own', set(), lambda: None), 'the end of the lease')
    assert client.get_or_none(lease.id) is None


def test_heartbeats_do_not_wait_for_publishers(client: Client, service: str) -> None:
    """Threads that publish without pause have their writes in a queue; the heartbeat goes before them."""
    ends = threading.Event()

    def flood() -> None:
        with PatientConnection(service) as publisher:
            while not ends.is_set():
                publish(publisher, 'x', to='elsewhere')

    with (
        PatientConnection(service, transport_options={'visibility_timeout': 9.0}) as consumer,
        ThreadPoolExecutor(8) as threads,
    ):
        publish(consumer, 'held')
        inbox = Inbox(consumer, ack=False)
        inbox.wait(1)
        [consumer_id] = [row['id'] for row in client.id_range(CONSUMER)]
        for _ in range(8):
            threads.submit(flood)
        for _ in range(3):
            before = client.get(consumer_id)
            wait_for(lambda before=before: client.get(consumer_id)['_rev'] != before['_rev'], 'a heartbeat')  # type: ignore[misc]
        ends.set()
        [held] = [item for item in items(client) if item['queue'] == 'q']
        assert held['claimed']
