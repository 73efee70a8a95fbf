"""Tasks with the region `any`: they are lent to a region that has nothing to do, and run once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.regions.region_mover import RegionMover
from celery_couchdb.testing import Server
from kombu_couchdb.documents import validation, workitem
from tests.conftest import wait_for
from tests.regions import Region, Regions, regions_on
from tests.support import items

from .test_regions import ferry, parcels, tasks

__all__ = ['ferry']

Ferries = Callable[[Celery], RegionMover]


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us', lend_after=0.2) as regions:
        yield regions


def send(home: Region, *ids: str, **options: Any) -> None:
    for task_id in ids:
        home.app.send_task('add', (1, 2), task_id=task_id, **{'region': 'any', **options})


def want(regions: Regions, count: int) -> None:
    """Let eu want tasks, and us know that."""
    eu = regions['eu'].regions
    [doc] = eu.find(['region:eu'])
    eu.bulk([{**(doc or {}), '_id': 'region:eu', 'type': 'Region', 'date': time.time(), 'want': {'celery': count}}])
    regions.replicate()


def lend(home: RegionMover, region: Region, *left: str) -> None:
    """Let the home's ferry work until these tasks are left."""

    def is_done() -> bool:
        home.step()
        return tasks(region.broker) == sorted(left)

    wait_for(is_done, f'only {left} are left')


def arrive(regions: Regions, ferry: Ferries) -> list[str]:
    """Replicate, let the parcels arrive in eu, replicate their deletion, and return the tasks in eu."""
    regions.replicate()
    ferry(regions['eu'].app).step()
    regions.replicate()
    assert parcels(regions['us'].regions) == [] == parcels(regions['eu'].regions)
    return tasks(regions['eu'].broker)


def test_idle_region_gets_as_many_as_it_wants(regions: Regions, ferry: Ferries) -> None:
    us = regions['us']
    send(us, '1', '2', '3')
    send(us, 'large', headers={'note': 'x'}, argsrepr='', kwargs={'text': 'x' * 40_000}, priority=9)
    us.app.send_task('add', (1, 2), task_id='home')
    want(regions, 2)
    home = ferry(us.app)
    lend(home, us, '3', 'home', 'large')
    want(regions, 1)
    lend(home, us, 'home', 'large')
    home.step()
    want(regions, 5)
    lend(home, us, 'home')
    assert arrive(regions, ferry) == ['1', '2', '3', 'large']
    for item in items(regions['eu'].broker):
        assert item['message']['headers']['x-from-region'] == 'us'
        assert 'region' not in item['message']['properties']
    large = next(item for item in items(regions['eu'].broker) if item['priority'] == 9)
    assert large['_attachments']['body']['length'] > 40_000


def test_what_is_not_lent(regions: Regions, ferry: Ferries) -> None:
    us = regions['us']
    send(us, 'unique', headers={'job_key': 'k'})
    send(us, 'limited', headers={'concurrency_key': 'k', 'concurrency_limit': 1})
    send(us, 'rated', headers={'rate_key': 'k', 'rate': '5/h'})
    send(us, 'planned', countdown=3600)
    send(us, 'delivered', 'claimed', 'free')
    now, found = time.time(), {doc['message']['headers']['id']: doc for doc in items(us.broker)}
    us.broker.bulk(
        [
            workitem.claim(validation.checked(found['claimed']), 'broker:consumer:x', now),
            workitem.release(workitem.claim(validation.checked(found['delivered']), 'broker:consumer:x', now)),
        ]
    )
    want(regions, 10)
    lend(ferry(us.app), us, 'unique', 'limited', 'rated', 'planned', 'delivered', 'claimed')


@pytest.fixture
def workers(regions: Regions) -> None:
    """Two workers in eu."""
    eu = regions['eu'].broker
    worker = {'type': 'Consumer', 'worker': 'w', 'queues': ['celery'], 'expires': time.time() + 3600}
    eu.bulk([{**worker, '_id': f'broker:consumer:{name}'} for name in 'ab'])


@pytest.mark.usefixtures('workers')
def test_region_asks_again_after_lent_tasks_have_arrived(regions: Regions, ferry: Ferries) -> None:
    us, eu = regions['us'], regions['eu']
    abroad, home = ferry(eu.app), ferry(us.app)
    abroad.step()
    [first] = eu.regions.find(['region:eu'])
    regions.replicate()
    send(us, '1', '2', '3')
    lend(home, us, '3')
    regions.replicate()
    abroad._stale = True  # the feed would say so
    abroad.step()
    assert tasks(eu.broker) == ['1', '2']
    eu.broker.bulk([{**doc, '_deleted': True} for doc in items(eu.broker)])
    wait_for(lambda: abroad.step() >= 0 and eu.regions.find(['region:eu']) != [first], 'eu asks again')
    regions.replicate()
    home._stale = True
    lend(home, us)


def rest(ferry: RegionMover, looks: Any) -> None:
    """Let a ferry look until it waits for activity."""

    def is_resting() -> bool:
        looks.next_at = 0.0
        ferry.step()
        return bool(looks.next_at > time.monotonic() + 30)

    wait_for(is_resting, 'the ferry to rest')


@pytest.mark.usefixtures('workers')
@pytest.mark.parametrize('change', ['messages', 'pause'])
def test_idle_region_notices_a_change_and_wants_none(regions: Regions, ferry: Ferries, change: str) -> None:
    eu = regions['eu']
    one = ferry(eu.app)

    def wants() -> Any:
        one.step()
        return eu.regions.get('region:eu')['want']

    rest(one, one._wants._looks)
    assert wants() == {'celery': 2}
    if change == 'messages':
        send(eu, '1', '2', region='eu')
    else:
        eu.broker.bulk([{'_id': 'broker:closed:celery', 'type': 'Pause', 'queue': 'celery'}])
    wait_for(lambda: wants() == {}, 'eu wants nothing')


def test_resting_home_lends_what_is_sent_then(regions: Regions, ferry: Ferries) -> None:
    us = regions['us']
    want(regions, 2)
    home = ferry(us.app)
    rest(home, home._lender._looks)
    send(us, '1', '2')
    lend(home, us)
    assert arrive(regions, ferry) == ['1', '2']
