"""Hostile documents in a database of regions: each is refused with a reason or ignored, and the others arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_couchdb.regions.region_mover import RegionMover
from celery_couchdb.testing import Server
from tests.conftest import wait_for
from tests.parcels import movers, store_nested
from tests.regions import Regions, regions_on
from tests.support import items

from .parcels import GOOD, MESSAGE, check_refusals, store


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us', 'asia', lend_after=0.1) as regions:
        yield regions


@pytest.fixture
def ferry(regions: Regions) -> Iterator[RegionMover]:
    with movers(RegionMover) as make:
        yield make(regions['eu'].app)


def test_hostile_parcels_are_refused_and_the_others_arrive(regions: Regions, ferry: RegionMover) -> None:
    eu = regions['eu']
    check_refusals(eu.regions, 'p:eu:us:', ferry.step)
    assert len(items(eu.broker)) == 3


def test_foreign_ids_are_left_alone(regions: Regions, ferry: RegionMover) -> None:
    eu = regions['eu']
    foreign = ['p:us:eu:1', 'p:eu', 'p:eu:us', 'p:', 'p:eus:us:1', 'q:eu:us:1', 'region:us', 'p:EU:us:1', 'p;eu;us;1']
    store(eu.regions, [{**GOOD, '_id': doc_id} for doc_id in foreign])
    before = eu.regions.fetch(foreign)
    ferry.step()
    assert eu.regions.fetch(foreign) == before
    assert items(eu.broker) == []


def test_documents_of_a_forged_sender_do_not_travel(regions: Regions) -> None:
    us, others = regions['us'], (regions['eu'].regions, regions['asia'].regions)
    forged = ('p:eu:asia:1', 'p:asia:eu:1', 'region:eu', 'region:asia')
    store(us.regions, [{**GOOD, '_id': doc_id} for doc_id in (*forged, 'p:eu:us:1')])
    regions.replicate()
    assert [[row['id'] for row in client.id_range('p:', to='region:~')] for client in others] == [['p:eu:us:1'], []]


def test_sender_cannot_set_what_belongs_to_the_transport(regions: Regions, ferry: RegionMover) -> None:
    eu = regions['eu']
    info = {'exchange': 'celery.pidbox', 'claimed': {'by': 'broker:consumer:x'}}
    forged = {'delivery_tag': 'broker:consumer:x', 'delivery_info': info, 'priority': 99}
    store(
        eu.regions,
        [{**GOOD, '_id': 'p:eu:us:1', 'message': {**MESSAGE, 'properties': {**MESSAGE['properties'], **forged}}}],
    )
    ferry.step()
    [item] = items(eu.broker)
    assert item['_id'].startswith('parcel:')
    assert item['message']['properties']['delivery_info'] == {'exchange': '', 'routing_key': 'celery'}
    assert item['priority'] == 9


def test_malformed_fallback_stops_nobody(regions: Regions, ferry: RegionMover) -> None:
    """Another region can change the parcels to it in the databases of their senders."""
    eu = regions['eu']
    doc: dict[str, Any] = {**GOOD, 'fallback': 'asia', 'fallback_at': 1}
    for missing in ('exchange', 'routing_key', 'published', 'task', 'type', 'fallback_at'):
        rest = {name: value for name, value in doc.items() if name != missing}
        store(eu.regions, [{**rest, '_id': f'p:us:eu:no-{missing}'}])
        store(eu.regions, [{**rest, '_id': f'p:us:eu:wrong-{missing}', missing: ['x']}])
    store(eu.regions, [{**GOOD, '_id': 'p:us:eu:last', 'fallback': 'eu', 'fallback_at': 2}])
    ferry._changed = True  # the feed would say so
    wait_for(lambda: ferry.step() or items(eu.broker), 'the good fallback')
    assert len(items(eu.broker)) == 1


def test_unreadable_fallbacks_stop_nobody(regions: Regions, ferry: RegionMover, apache_couchdb: bool) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server refuses such documents')
    eu = regions['eu']
    for number in range(25):  # more than are withdrawn together
        store_nested(eu.regions, f'p:us:eu:{number}', 1_500, '"fallback":"eu","fallback_at":1')
    store(eu.regions, [{**GOOD, '_id': 'p:us:eu:last', 'fallback': 'eu', 'fallback_at': 2}])
    ferry._changed = True  # the feed would say so

    wait_for(lambda: ferry.step() or items(eu.broker), 'the fallback')


def test_hostile_wants_are_ignored(regions: Regions, ferry: RegionMover) -> None:
    eu = regions['eu']
    eu.app.send_task('add', (1, 2), region='any')
    hostile: list[Any] = [
        *(None, [], 'celery', {'celery': '5'}, {'celery': -1}, {'celery': [1]}),
        *({'q' * 100_000: 1, '': 1, '\0': 1}, {str(number): 1 for number in range(10_000)}),
    ]
    rev: dict[str, str] = {}
    for want in hostile:
        doc = {**GOOD, '_id': 'region:us', 'type': 'Region', 'date': 'never', 'want': want, **rev}
        [result] = eu.regions.bulk([doc])
        rev = {'_rev': result.rev}
        ferry._changed = True  # the feed would say so
        ferry.step()
        assert len(items(eu.broker)) == 1
    store(eu.regions, [{'_id': 'region:us', 'type': 'Region', 'want': {'celery': 10**15}, **rev}])
    ferry._changed = True

    wait_for(lambda: ferry.step() or not items(eu.broker), 'the task is lent')
