"""The janitor, which deletes leftovers without needing an administrator, and keeps everything in use."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases import housekeeping, lease
from kombu_couchdb.leases.housekeeping import Janitor
from kombu_couchdb.queues.databases import ensure
from kombu_couchdb.queues.topology import Topology
from tests.support import Inbox, Request, publish

HOUR = 3600.0
NOTHING = {'bindings': 0, 'broadcasts': 0, 'consumers': 0, 'rates': 0}


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


@pytest.fixture
def seconds_ahead(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the monotonic clock is ahead; tests append to the list."""
    ahead = [0.0]
    monkeypatch.setattr(lease, 'time', SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead)))
    monkeypatch.setattr(housekeeping, 'time', SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead)))
    return ahead


def put_expired(client: Client, prefix: str, kind: str, **expired_since: float) -> None:
    """Store documents that expired the given number of seconds ago, by name."""
    for name, seconds in expired_since.items():
        client.put({'_id': prefix + name, 'type': kind, 'expires': time.time() - seconds})


# -- bindings


@pytest.mark.usefixtures('at_once')
def test_binding_without_a_queue_is_deleted_when_it_is_seen_twice(client: Client, topology: Topology) -> None:
    topology.declare_queue('kept', {}, False)
    for queue in ('kept', 'gone', 'gone too'):
        topology.bind('x', 'key', None, queue)
    tidier = Janitor(client)
    found = [tidier.clean_up(100)['bindings'], tidier.clean_up(100)['bindings'], tidier.clean_up(100)['bindings']]
    assert (sum(found), found[-1]) == (2, 0)
    assert bindings(client) == ['kept']


def test_binding_without_a_queue_is_kept_when_it_is_seen_once(client: Client, topology: Topology) -> None:
    topology.bind('x', 'key', None, 'q')  # another process is about to declare the queue
    tidier = Janitor(client)
    assert [tidier.clean_up(100), tidier.clean_up(100)] == [NOTHING, NOTHING]
    assert Janitor(client).clean_up(100) == NOTHING  # the look of another process does not count
    topology.declare_queue('q', {}, False)
    assert tidier.clean_up(100) == NOTHING
    assert bindings(client) == ['q']


def test_binding_that_was_made_again_is_kept(client: Client, topology: Topology, seconds_ahead: list[float]) -> None:
    topology.bind('x', 'key', None, 'q')
    tidier = Janitor(client)
    tidier.clean_up(100)
    topology.unbind('x', 'key', 'q')
    topology.bind('x', 'key', None, 'q')
    seconds_ahead.append(HOUR)
    assert tidier.clean_up(100) == NOTHING
    assert bindings(client) == ['q']


@pytest.mark.usefixtures('at_once')
def test_queue_declared_during_the_cleanup_keeps_its_binding(
    client: Client, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology.bind('x', 'key', None, 'q')
    tidier = Janitor(client)
    tidier._delete_bindings(0)
    delete = client.bulk

    def bulk(docs: Any, **kwargs: Any) -> Any:
        topology.declare_queue('q', {}, False)
        topology.bind('x', 'key', None, 'q')  # finds the existing binding
        return delete(docs, **kwargs)

    monkeypatch.setattr(client, 'bulk', bulk)
    assert tidier.clean_up(100) == NOTHING
    assert bindings(client) == ['q']


@pytest.mark.usefixtures('at_once')
def test_bindings_in_use_are_kept(connection: Connection, client: Client) -> None:
    queue = Queue('q', Exchange('x', 'topic'), routing_key='a.#')
    inbox = Inbox(connection, queue, ack=True)
    tidier = Janitor(client)
    assert [tidier.clean_up(100) for _ in range(3)] == [NOTHING] * 3
    publish(connection, 'still here', 'a.b', exchange='x')
    assert inbox.wait(1) == ['still here']


# -- broadcasts and heartbeats


def test_broadcasts_are_deleted_an_hour_after_their_expiry(client: Client, topology: Topology) -> None:
    put_expired(client, 'broker:broadcast:', 'Broadcast', a=-60, b=HOUR + 100, c=HOUR - 100, d=2 * HOUR)
    client.put({'_id': 'broker:broadcast:e', 'type': 'Broadcast', 'expires': 'malformed'})
    assert Janitor(client).clean_up(100) == {**NOTHING, 'broadcasts': 2}
    assert ids(client, 'broker:broadcast:') == ['a', 'c', 'e']


def test_rates_are_deleted_an_hour_after_their_next_start(client: Client, topology: Topology) -> None:
    now = time.time()
    for name, kind, next_ in (
        ('used', 'Rate', now - 60),
        ('planned', 'Rate', now + 60),
        ('unused', 'Rate', now - HOUR - 100),
        ('malformed', 'Rate', 'soon'),
        ('of somebody else', 'Other', now - 2 * HOUR),
    ):
        client.put({'_id': f'rate:{name}', 'type': kind, 'next': next_})
    assert Janitor(client).clean_up(100) == {**NOTHING, 'rates': 1}
    assert ids(client, 'rate:') == ['malformed', 'of somebody else', 'planned', 'used']


def test_rate_that_is_used_while_the_janitor_looks_is_kept(client: Client, topology: Topology) -> None:
    """The consumer takes a start between the janitor's read and its deletion."""
    unused = {'_id': 'rate:k', 'type': 'Rate', 'next': 1.0}
    rev, bulk = client.put(unused), client.bulk

    def use_first(docs: Any, **others: Any) -> Any:
        client.put({**unused, '_rev': rev, 'next': 2.0})
        return bulk(docs, **others)

    client.bulk = use_first  # type: ignore[method-assign]
    assert Janitor(client).clean_up(100) == NOTHING
    assert client.get('rate:k')['next'] == 2.0


def test_heartbeats_are_deleted_an_hour_after_their_expiry(
    client: Client, topology: Topology, seconds_ahead: list[float]
) -> None:
    put_expired(client, 'broker:consumer:', 'Consumer', alive=-60, late=HOUR - 100, dead=HOUR + 100, holding=HOUR + 100)
    client.put(
        {'_id': 'item', 'type': 'WorkItem', 'queue': 'q', 'claimed': {'by': 'broker:consumer:holding', 'date': 1}}
    )
    tidier = Janitor(client)
    assert tidier.clean_up(100) == NOTHING  # the clock may have jumped, so that one look does not suffice
    seconds_ahead.append(62.0)
    assert tidier.clean_up(100) == {**NOTHING, 'consumers': 1}
    assert sorted(ids(client, 'broker:consumer:')) == ['alive', 'holding', 'late']


def test_renewed_heartbeats_are_kept_after_a_clock_jump(
    client: Client, topology: Topology, seconds_ahead: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(client.clock, 'now', lambda: now + 2 * HOUR)
    put_expired(client, 'broker:consumer:', 'Consumer', living=-60, dead=-60)
    tidier = Janitor(client)
    assert tidier.clean_up(100) == NOTHING
    seconds_ahead.append(62.0)
    [beat] = [row['doc'] for row in client.id_range('broker:consumer:living', docs=True)]
    client.put({**beat, 'expires': beat['expires'] + 20})
    assert tidier.clean_up(100) == {**NOTHING, 'consumers': 1}
    assert ids(client, 'broker:consumer:') == ['living']


def test_heartbeat_that_is_written_while_the_janitor_looks_is_kept(
    client: Client, topology: Topology, seconds_ahead: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer was paused, and writes its heartbeat between the janitor's look and its deletion."""
    put_expired(client, 'broker:consumer:', 'Consumer', paused=2 * HOUR)
    tidier, fetch = Janitor(client), client.fetch
    tidier.clean_up(100)
    seconds_ahead.append(62.0)

    def write_first(names: Any, **others: Any) -> Any:
        monkeypatch.setattr(client, 'fetch', fetch)
        beat = client.get('broker:consumer:paused')
        client.put({**beat, 'expires': time.time() + 60})
        return fetch(names, **others)

    monkeypatch.setattr(client, 'fetch', write_first)
    assert tidier.clean_up(100) == NOTHING
    assert ids(client, 'broker:consumer:') == ['paused']


def test_janitor_uses_the_server_clock(client: Client, topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    put_expired(client, 'broker:broadcast:', 'Broadcast', a=HOUR + 100)
    now = time.time()
    monkeypatch.setattr(client.clock, 'now', lambda: now - 1000)
    assert Janitor(client).clean_up(100) == NOTHING


def test_foreign_documents_are_kept(client: Client, topology: Topology) -> None:
    put_expired(client, 'invoice:', 'Consumer2', a=2 * HOUR)
    put_expired(client, 'invoice:', 'Broadcast', b=2 * HOUR)
    assert Janitor(client).clean_up(100) == NOTHING
    assert ids(client, 'invoice:') == ['a', 'b']


# -- costs


@pytest.mark.usefixtures('at_once')
def test_limit_applies_to_each_type_of_document(client: Client, topology: Topology, seconds_ahead: list[float]) -> None:
    many = {f'a{number:04}': 2 * HOUR for number in range(600)}
    client.bulk(
        [
            {'_id': f'broker:{kind.lower()}:{name}', 'type': kind, 'expires': time.time() - seconds}
            for kind in ('Broadcast', 'Consumer')
            for name, seconds in many.items()
        ]
    )
    for number in range(7):
        topology.bind('x', str(number), None, 'gone')
    tidier = Janitor(client)
    tidier.clean_up(0)
    seconds_ahead.append(62.0)
    assert tidier.clean_up(5) == {**NOTHING, 'bindings': 5, 'broadcasts': 5, 'consumers': 5}
    assert tidier.clean_up(550) == {**NOTHING, 'bindings': 2, 'broadcasts': 550, 'consumers': 550}
    assert tidier.clean_up(550) == {**NOTHING, 'broadcasts': 45, 'consumers': 45}
    assert tidier.clean_up(550) == NOTHING


def test_cleanup_of_a_clean_database_takes_four_reads(client: Client, topology: Topology, sent: list[Request]) -> None:
    Janitor(client).clean_up(100)
    assert [request.method for request in sent] == ['GET'] * 4


def test_database_without_the_design_document(client: Client) -> None:
    assert Janitor(client).clean_up(100) == NOTHING
