"""Housekeeping that needs no administrator: what it deletes, and what it leaves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases import janitor, watch
from kombu_couchdb.leases.janitor import Janitor
from kombu_couchdb.queues.database import ensure
from kombu_couchdb.queues.topology import Topology
from tests.support import Inbox, Request, publish

HOUR = 3600.0
NOTHING = {'bindings': 0, 'broadcasts': 0, 'consumers': 0}


@pytest.fixture
def topology(client: Client) -> Topology:
    """Queues and bindings of a database that is set up."""
    ensure(client, True)
    return Topology(client)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look proves an orphan, however soon it is."""
    monkeypatch.setattr(janitor, '_ORPHAN_SECONDS', 0.0)


def bindings(client: Client) -> list[str]:
    return [row['doc']['queue'] for row in client.id_range('broker:binding:', docs=True)]


def ids(client: Client, prefix: str) -> list[str]:
    return [row['id'].removeprefix(prefix) for row in client.id_range(prefix)]


@pytest.fixture
def seconds_ahead(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how many seconds the monotonic clock is ahead: tests append to it."""
    ahead = [0.0]
    monkeypatch.setattr(watch, 'time', SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead)))
    monkeypatch.setattr(janitor, 'time', SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead)))
    return ahead


def put_expired(client: Client, prefix: str, kind: str, **expired_since: float) -> None:
    """Store documents that expired so many seconds ago."""
    for name, seconds in expired_since.items():
        client.put({'_id': prefix + name, 'type': kind, 'expires': time.time() - seconds})


# -- bindings


@pytest.mark.usefixtures('at_once')
def test_binding_without_a_queue_goes_when_it_is_seen_again(client: Client, topology: Topology) -> None:
    topology.declare_queue('kept', {}, False)
    for queue in ('kept', 'gone', 'gone too'):
        topology.bind('x', 'key', None, queue)
    tidier = Janitor(client)
    found = [tidier.clean_up(100)['bindings'], tidier.clean_up(100)['bindings'], tidier.clean_up(100)['bindings']]
    assert (sum(found), found[-1]) == (2, 0)
    assert bindings(client) == ['kept']


def test_one_look_proves_nothing(client: Client, topology: Topology) -> None:
    topology.bind('x', 'key', None, 'q')  # another process is about to declare it
    tidier = Janitor(client)
    assert tidier.proven_in == 0
    assert [tidier.clean_up(100), tidier.clean_up(100)] == [NOTHING, NOTHING]
    assert 50 < tidier.proven_in <= 60
    assert Janitor(client).clean_up(100) == NOTHING  # nor does that of another process
    topology.declare_queue('q', {}, False)
    assert tidier.clean_up(100) == NOTHING
    assert tidier.proven_in == 0
    assert bindings(client) == ['q']


def test_binding_that_was_made_anew_is_a_young_one(client: Client, topology: Topology) -> None:
    topology.bind('x', 'key', None, 'q')
    tidier = Janitor(client)
    tidier.clean_up(100)
    topology.unbind('x', 'key', 'q')
    topology.bind('x', 'key', None, 'q')
    tidier._orphans = {doc_id: (rev, since - HOUR) for doc_id, (rev, since) in tidier._orphans.items()}
    assert tidier.clean_up(100) == NOTHING
    assert bindings(client) == ['q']


@pytest.mark.usefixtures('at_once')
def test_queue_declared_at_that_very_moment_keeps_its_binding(
    client: Client, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology.bind('x', 'key', None, 'q')
    tidier = Janitor(client)
    tidier._delete_bindings(0)
    delete = client.bulk

    def bulk(docs: Any, **kwargs: Any) -> Any:
        topology.declare_queue('q', {}, False)
        topology.bind('x', 'key', None, 'q')  # is told that it is there
        return delete(docs, **kwargs)

    monkeypatch.setattr(client, 'bulk', bulk)
    assert tidier.clean_up(100) == NOTHING
    assert bindings(client) == ['q']


@pytest.mark.usefixtures('at_once')
def test_what_is_in_use_keeps_working(connection: Connection, client: Client) -> None:
    queue = Queue('q', Exchange('x', 'topic'), routing_key='a.#')
    inbox = Inbox(connection, queue, ack=True)
    tidier = Janitor(client)
    assert [tidier.clean_up(100) for _ in range(3)] == [NOTHING] * 3
    publish(connection, 'still here', 'a.b', exchange='x')
    assert inbox.wait(1) == ['still here']


# -- broadcasts and heartbeats


def test_broadcasts_go_an_hour_after_they_expired(client: Client, topology: Topology) -> None:
    put_expired(client, 'broker:broadcast:', 'Broadcast', a=-60, b=HOUR + 100, c=HOUR - 100, d=2 * HOUR)
    client.put({'_id': 'broker:broadcast:e', 'type': 'Broadcast', 'expires': 'spoilt'})
    assert Janitor(client).clean_up(100) == {**NOTHING, 'broadcasts': 2}
    assert ids(client, 'broker:broadcast:') == ['a', 'c', 'e']


def test_heartbeats_go_an_hour_after_the_end_of_their_consumers(
    client: Client, topology: Topology, seconds_ahead: list[float]
) -> None:
    put_expired(client, 'broker:consumer:', 'Consumer', alive=-60, late=HOUR - 100, dead=HOUR + 100, holding=HOUR + 100)
    client.put(
        {'_id': 'item', 'type': 'WorkItem', 'queue': 'q', 'claimed': {'by': 'broker:consumer:holding', 'date': 1}}
    )
    tidier = Janitor(client)
    assert tidier.clean_up(100) == NOTHING  # the clock may have jumped
    assert 50 < tidier.proven_in <= 62
    seconds_ahead.append(62.0)
    assert tidier.clean_up(100) == {**NOTHING, 'consumers': 1}
    assert tidier.proven_in == 0
    assert sorted(ids(client, 'broker:consumer:')) == ['alive', 'holding', 'late']


def test_heartbeats_of_the_living_stay_though_the_clock_jumped(
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


def test_it_goes_by_the_servers_time(client: Client, topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    put_expired(client, 'broker:broadcast:', 'Broadcast', a=HOUR + 100)
    now = time.time()
    monkeypatch.setattr(client.clock, 'now', lambda: now - 1000)
    assert Janitor(client).clean_up(100) == NOTHING


def test_others_documents_are_theirs(client: Client, topology: Topology) -> None:
    put_expired(client, 'invoice:', 'Consumer2', a=2 * HOUR)
    put_expired(client, 'invoice:', 'Broadcast', b=2 * HOUR)
    assert Janitor(client).clean_up(100) == NOTHING
    assert ids(client, 'invoice:') == ['a', 'b']


# -- how much


@pytest.mark.usefixtures('at_once')
def test_no_more_than_the_limit_of_each_kind_in_a_call(
    client: Client, topology: Topology, seconds_ahead: list[float]
) -> None:
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
    assert tidier.clean_up(5) == {'bindings': 5, 'broadcasts': 5, 'consumers': 5}
    assert tidier.clean_up(550) == {'bindings': 2, 'broadcasts': 550, 'consumers': 550}
    assert tidier.clean_up(550) == {'bindings': 0, 'broadcasts': 45, 'consumers': 45}
    assert tidier.clean_up(550) == NOTHING


def test_where_there_is_nothing_it_costs_three_reads(client: Client, topology: Topology, sent: list[Request]) -> None:
    Janitor(client).clean_up(100)
    assert [request.method for request in sent] == ['GET'] * 3


def test_database_without_our_design_document(client: Client) -> None:
    assert Janitor(client).clean_up(100) == NOTHING
