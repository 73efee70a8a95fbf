"""Tasks with the region `any`: they are lent to a region that has nothing to do, and run once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.regions.lending import _SELECTOR
from celery_couchdb.regions.region_mover import RegionMover
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
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
def test_region_document_changes_when_the_region_becomes_busy_or_idle(regions: Regions, ferry: Ferries) -> None:
    eu = regions['eu']
    one = ferry(eu.app)
    one._wants._concurrency = 2

    def look() -> dict[str, Any]:
        one._wants._looks.next_at = 0.0
        one.step()
        [doc] = eu.regions.find(['region:eu'])
        return doc or {}

    first = look()
    assert first['want'] == {'celery': 4}
    send(eu, '1', '2', '3', region='eu')
    assert look() == first  # it is not full yet
    send(eu, '4', region='eu')
    assert look()['want'] == {}
    busy = look()
    eu.broker.bulk([{**doc, '_deleted': True} for doc in items(eu.broker)[:2]])
    assert look() == busy  # it is not half empty yet
    eu.broker.bulk([{**doc, '_deleted': True} for doc in items(eu.broker)[:1]])
    assert look()['want'] == {'celery': 3}
    eu.broker.bulk([{'_id': 'broker:closed:celery', 'type': 'Pause', 'queue': 'celery'}])
    assert look()['want'] == {}


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


def test_index_of_lendable_messages_is_not_read_while_no_region_wants_any(
    regions: Regions, ferry: Ferries, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = regions['us']
    send(us, '1')
    home = ferry(us.app)
    home.step()
    views: list[str] = []
    view = Client.view

    def noted(self: Client, design: str, name: str, *args: Any, **params: Any) -> Any:
        views.append(name)
        return view(self, design, name, *args, **params)

    monkeypatch.setattr(Client, 'view', noted)
    home._lender._looks.next_at = home._wants._looks.next_at = 0.0
    home.step()
    assert set(views) == {'waiting', 'leases'}
    assert us.regions.find(['region:us']) == [None]


def test_only_activity_ends_the_rest_of_an_idle_region(regions: Regions) -> None:
    broker = regions['eu'].broker
    worker = {'_id': 'broker:consumer:a', 'type': 'Consumer', 'worker': 'w', 'queues': ['celery'], 'beats': 0}
    pause = {'_id': 'broker:closed:celery', 'type': 'Pause', 'queue': 'celery'}
    item = {'_id': '1', 'type': 'WorkItem', 'claimed': {'by': 'broker:consumer:a', 'date': 1.0}}
    leader = {'_id': 'broker:leader:region:eu', 'type': 'Leader'}
    since = broker.sequence()

    def write(doc: dict[str, Any]) -> list[str]:
        """Write a document, and return the ids of the changes since the last call that are activity."""
        nonlocal since
        old = broker.get_or_none(doc['_id'])
        [result] = broker.bulk([{**doc, '_rev': old['_rev']} if old else doc])
        assert result.is_stored
        found = broker.changes(since, {'selector': _SELECTOR}, 10, docs=False)
        since = found['last_seq']
        return [row['id'] for row in found['results']]

    assert write(worker) == ['broker:consumer:a']
    assert write({**worker, 'beats': 1}) == []
    assert write({'_id': worker['_id'], '_deleted': True}) == ['broker:consumer:a']
    assert write(pause) == [pause['_id']]
    assert write({'_id': pause['_id'], '_deleted': True}) == [pause['_id']]
    assert write(item) == ['1']
    assert write({'_id': item['_id'], '_deleted': True}) == []
    assert write(leader) == []
    assert write({'_id': leader['_id'], '_deleted': True}) == []


def rest(ferry: RegionMover, looks: Any) -> None:
    """Let a ferry look until it waits for activity."""

    def is_resting() -> bool:
        looks.next_at = 0.0
        ferry.step()
        return bool(looks.next_at > time.monotonic() + 30)

    wait_for(is_resting, 'the ferry to rest')


@pytest.mark.usefixtures('workers')
def test_idle_region_notices_a_message_and_wants_none(regions: Regions, ferry: Ferries) -> None:
    eu = regions['eu']
    one = ferry(eu.app)
    rest(one, one._wants._looks)
    [first] = eu.regions.find(['region:eu'])
    assert first
    assert first['want'] == {'celery': 2}
    send(eu, '1', '2', region='eu')

    def wants() -> Any:
        one.step()
        [doc] = eu.regions.find(['region:eu'])
        return (doc or {}).get('want')

    wait_for(lambda: wants() == {}, 'eu wants nothing')


@pytest.mark.usefixtures('workers')
def test_region_does_not_rest_while_any_worker_has_a_message(regions: Regions, ferry: Ferries) -> None:
    eu = regions['eu']
    send(eu, '1', region='eu')
    [item] = items(eu.broker)
    eu.broker.bulk([workitem.claim(validation.checked(item), 'broker:consumer:b', time.time())])
    one = ferry(eu.app)
    for _ in range(10):
        one._wants._looks.next_at = 0.0
        one.step()
        assert one._wants.next_at < time.monotonic() + 6


def test_resting_home_lends_what_is_sent_then(regions: Regions, ferry: Ferries) -> None:
    us = regions['us']
    want(regions, 2)
    home = ferry(us.app)
    rest(home, home._lender._looks)
    send(us, '1', '2')
    lend(home, us)
    assert arrive(regions, ferry) == ['1', '2']


def test_resting_home_lends_what_another_region_asks_for_then(regions: Regions, ferry: Ferries) -> None:
    us = regions['us']
    want(regions, 2)
    home = ferry(us.app)
    rest(home, home._lender._looks)
    home._activity.pause()  # the message is not noticed
    send(us, '1', '2')
    want(regions, 3)
    home._stale = True  # the feed of the database of regions would say so
    lend(home, us)
