"""The janitor, which deletes leftovers without needing an administrator, and keeps everything in use."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.bindings import new as binding_of
from kombu_couchdb.leases import housekeeping
from kombu_couchdb.leases.housekeeping import Janitor
from kombu_couchdb.queues.databases import ensure
from kombu_couchdb.queues.topology import Topology
from tests.support import Inbox, Request, publish

HOUR = 3600.0
NOTHING = {'bindings': 0, 'broadcasts': 0, 'rates': 0}


@pytest.fixture
def topology(client: Client) -> Topology:
    """The topology of a database that is set up."""
    ensure(client, True)
    return Topology(client)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second look prove that a binding is an orphan, without a pause."""
    monkeypatch.setattr(housekeeping, '_PROVEN_SECONDS', 0.0)


def bindings(client: Client) -> list[str]:
    return [row['doc']['queue'] for row in client.id_range('broker:binding:', docs=True)]


def ids(client: Client, prefix: str) -> list[str]:
    return [row['id'].removeprefix(prefix) for row in client.id_range(prefix)]


def put_expired(client: Client, prefix: str, kind: str, **expired_since: float) -> None:
    """Store documents that expired the given number of seconds ago, by name."""
    for name, seconds in expired_since.items():
        client.put({'_id': prefix + name, 'type': kind, 'expires': time.time() - seconds})


# -- bindings


@pytest.mark.usefixtures('at_once')
def test_binding_without_a_queue_is_deleted_when_it_is_seen_twice(client: Client, topology: Topology) -> None:
    topology.declare_queue('kept', {}, False)
    for queue in ('kept', 'gone', 'gone too'):
        topology.bind(binding_of('x', 'key', queue))
    tidier = Janitor(client)
    found = [tidier.clean_up(100)['bindings'], tidier.clean_up(100)['bindings'], tidier.clean_up(100)['bindings']]
    assert (sum(found), found[-1]) == (2, 0)
    assert bindings(client) == ['kept']


def test_binding_without_a_queue_is_kept_when_it_is_seen_once(client: Client, topology: Topology) -> None:
    topology.bind(binding_of('x', 'key', 'q'))  # another process is about to declare the queue
    tidier = Janitor(client)
    assert [tidier.clean_up(100), tidier.clean_up(100)] == [NOTHING, NOTHING]
    assert Janitor(client).clean_up(100) == NOTHING  # the look of another process does not count
    topology.declare_queue('q', {}, False)
    assert tidier.clean_up(100) == NOTHING
    assert bindings(client) == ['q']


@pytest.mark.usefixtures('at_once')
def test_queue_declared_during_the_cleanup_keeps_its_binding(
    client: Client, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology.bind(binding_of('x', 'key', 'q'))
    tidier = Janitor(client)
    tidier._delete_bindings(0)
    delete = client.bulk

    def bulk(docs: Any, **kwargs: Any) -> Any:
        topology.declare_queue('q', {}, False)
        topology.bind(binding_of('x', 'key', 'q'))  # finds the existing binding
        return delete(docs, **kwargs)

    monkeypatch.setattr(client, 'bulk', bulk)
    assert tidier.clean_up(100) == NOTHING
    assert bindings(client) == ['q']


@pytest.mark.usefixtures('at_once')
def test_bindings_and_exchanges_in_use_are_kept(connection: Connection, client: Client) -> None:
    queue = Queue('q', Exchange('x', 'topic'), routing_key='a.#')
    inbox = Inbox(connection, queue, ack=True)
    Exchange('news', 'fanout')(connection.default_channel).declare()
    tidier = Janitor(client)
    assert [tidier.clean_up(100) for _ in range(3)] == [NOTHING] * 3
    publish(connection, 'still here', 'a.b', exchange='x')
    assert inbox.wait(1) == ['still here']
    connection.default_channel.exchange_declare('news', passive=True)


# -- broadcasts and rates


def test_broadcasts_and_rates_are_deleted_an_hour_after_their_end(
    client: Client, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_expired(client, 'broker:broadcast:', 'Broadcast', used=-60, old=HOUR + 100, young=HOUR - 100)
    put_expired(client, 'invoice:', 'Broadcast', of_somebody_else=2 * HOUR)
    client.put({'_id': 'broker:broadcast:malformed', 'type': 'Broadcast', 'expires': 'malformed'})
    now = client.clock.now()
    for name, end in {'used': now - 60, 'planned': now + 60, 'old': now - HOUR - 100, 'malformed': 'soon'}.items():
        client.put({'_id': f'rate:{name}', 'type': 'Rate', 'next': end})
    client.put({'_id': 'rate:of somebody else', 'type': 'Other', 'next': 1.0})
    with monkeypatch.context() as patched:
        patched.setattr(client.clock, 'now', lambda: now - 1000)  # the server's clock counts
        assert Janitor(client).clean_up(100) == NOTHING
    assert Janitor(client).clean_up(100) == {**NOTHING, 'broadcasts': 1, 'rates': 1}
    assert ids(client, 'broker:broadcast:') == ['malformed', 'used', 'young']
    assert ids(client, 'rate:') == ['malformed', 'of somebody else', 'planned', 'used']
    assert ids(client, 'invoice:') == ['of_somebody_else']


# -- costs


def test_cleanup_of_a_clean_database_takes_three_reads(client: Client, sent: list[Request]) -> None:
    """It needs no design document."""
    assert Janitor(client).clean_up(100) == NOTHING
    assert [request.method for request in sent] == ['GET'] * 3
