"""Tasks for other regions: parcels leave in one region, and each is published once in the other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.regions.region_mover import RegionMover
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError, ServerUnavailable
from kombu_couchdb.queues.store import Store
from tests.conftest import wait_for
from tests.parcels import movers
from tests.regions import Regions, regions_on
from tests.support import items


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us') as regions:
        yield regions


@pytest.fixture
def ferry() -> Iterator[Callable[[Celery], RegionMover]]:
    """A function that returns ferries, each with a connection of its own."""
    with movers(RegionMover) as make:
        yield make


def parcels(client: Client) -> list[dict[str, Any]]:
    """Return the parcels in a database of regions."""
    return [row['doc'] for row in client.id_range('p:', docs=True)]


def tasks(client: Client) -> list[str]:
    return sorted(item['message']['headers']['id'] for item in items(client))


def test_task_for_another_region_is_published_there(regions: Regions, ferry: Callable[[Celery], RegionMover]) -> None:
    us, eu = regions['us'], regions['eu']
    us.app.send_task('add', (1, 2), task_id='one', region='eu')
    us.app.send_task('add', ('x' * 40_000, 'y'), task_id='two', headers={'x-region': 'eu'}, queue='large')
    us.app.send_task('add', (1, 2), task_id='three', region='us')
    assert tasks(us.broker) == ['three']
    assert [doc['_id'].split(':')[:3] for doc in parcels(us.regions)] == [['p', 'eu', 'us']] * 2
    regions.replicate()
    ferry(eu.app).step()
    assert tasks(eu.broker) == ['one', 'two']
    assert {item['queue'] for item in items(eu.broker)} == {'celery', 'large'}
    for item in items(eu.broker):
        assert item['message']['headers']['x-from-region'] == 'us'
        assert 'region' not in item['message']['properties']
        assert 'x-region' not in item['message']['headers']
    regions.replicate()
    assert parcels(us.regions) == [] == parcels(eu.regions)


def test_route_names_a_region(regions: Regions) -> None:
    app = regions['us'].app
    app.conf.task_routes = {'tasks.far': {'region': 'eu', 'queue': 'distant'}}
    app.send_task('tasks.far', ())
    [doc] = parcels(regions['us'].regions)
    assert (doc['_id'].split(':')[1], doc['routing_key']) == ('eu', 'distant')


def test_unknown_region_is_an_error_when_the_task_is_sent(regions: Regions) -> None:
    names: list[Any] = ['asia', ['eu'], {'eu': 1}, 7]
    for name in names:
        with pytest.raises(ConfigurationError, match=r'region .* is unknown; transport option regions has: eu, us'):
            regions['us'].app.send_task('add', (1, 2), region=name)
        with pytest.raises(ConfigurationError, match=r'region .* is unknown'):
            regions['us'].app.send_task('add', (1, 2), headers={'x-region': name})
    assert parcels(regions['us'].regions) == []


def test_publisher_that_retries_stores_one_parcel(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    us = regions['us']
    publish, calls = Store.publish, list[Any]()

    def lost(self: Store, docs: Any, **again: bool) -> None:
        publish(self, docs, **again)
        calls.append(docs)
        if len(calls) == 1:
            raise ServerUnavailable('the response is lost')

    monkeypatch.setattr(Store, 'publish', lost)
    us.app.send_task('add', (1, 2), region='eu')
    assert len(calls) == 2
    assert len(parcels(us.regions)) == 1


def test_malformed_parcels_are_refused_while_the_leader_waits(
    regions: Regions, ferry: Callable[[Celery], RegionMover]
) -> None:
    eu = regions['eu']
    one = ferry(eu.app)
    one.step()
    malformed: list[dict[str, Any]] = [{}, {'message': 'x'}, {'type': 'Other', 'task': 'add'}]
    eu.regions.bulk([{'_id': f'p:eu:us:{number}', **doc} for number, doc in enumerate(malformed)])

    def are_refused() -> bool:
        one.step()
        return [doc.get('status') for doc in parcels(eu.regions)] == ['fail'] * 3

    wait_for(are_refused, 'the refusal')
