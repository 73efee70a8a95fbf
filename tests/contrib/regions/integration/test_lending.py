"""Tasks with the region `any`: they are lent to a region that has nothing to do, and run once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chord, group
from celery.worker import state

from celery_couchdb.contrib.regions.lending import Activity, Demand, Looks
from celery_couchdb.contrib.regions.link import Link
from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.documents import validation, workitem
from tests.conftest import wait_for
from tests.regions import Region, Regions, killed_after, new_link, regions_on
from tests.support import items


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us', lend_after=0.2) as regions:
        yield regions


@pytest.fixture
def home(regions: Regions) -> Link:
    """The link of us with eu, in a process that leads us."""
    return regions.link('us', 'eu')


def send(home: Region, *ids: str, **options: Any) -> None:
    for task_id in ids:
        home.app.send_task('add', (1, 2), task_id=task_id, **{'region': 'any', **options})


def want(regions: Regions, count: Any) -> None:
    """Let eu want tasks."""
    eu = regions['eu'].regions
    [doc] = eu.find(['region:eu'])
    eu.bulk([{**(doc or {}), '_id': 'region:eu', 'type': 'Region', 'date': time.time(), 'want': {'celery': count}}])


def lend(home: Link, us: Region, *left: str) -> None:
    """Let the home's link work until these tasks are left."""

    def is_done() -> bool:
        home.step()
        return us.tasks() == sorted(left)

    wait_for(is_done, f'only {left} are left')


def test_idle_region_gets_as_many_as_it_wants(regions: Regions, home: Link) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, '1', '2', '3')
    send(us, 'large', headers={'note': 'x'}, argsrepr='', kwargs={'text': 'x' * 40_000}, priority=9)
    us.app.send_task('add', (1, 2), task_id='home')
    want(regions, 2)
    lend(home, us, '3', 'home', 'large')
    want(regions, 1)
    lend(home, us, 'home', 'large')
    home.step()
    want(regions, 5)
    lend(home, us, 'home')
    regions.work('eu')
    assert eu.tasks() == ['1', '2', '3', 'large']
    for item in items(eu.broker):
        assert item['message']['headers']['x-from-region'] == 'us'
        assert 'region' not in item['message']['properties']
    large = next(item for item in items(eu.broker) if item['priority'] == 9)
    assert large['_attachments']['body']['length'] > 40_000
    assert {doc['state'] for doc in us.records('eu')} == {'there'}


def test_what_is_not_lent(regions: Regions, home: Link) -> None:
    us = regions['us']
    send(us, 'unique', headers={'job_key': 'k'})
    send(us, 'limited', headers={'concurrency_key': 'k', 'concurrency_limit': 1})
    send(us, 'rated', headers={'rate_key': 'k', 'rate': '5/h'})
    send(us, 'planned', countdown=3600)
    send(us, 'delivered', 'claimed', 'no task', 'no date', 'free')
    now, found = time.time(), {doc['message']['headers']['id']: doc for doc in items(us.broker)}
    us.broker.bulk(
        [
            workitem.claim(validation.checked(found['claimed']), 'broker:consumer:x', now),
            workitem.release(workitem.claim(validation.checked(found['delivered']), 'broker:consumer:x', now)),
            {name: value for name, value in found['no date'].items() if name != 'published'},
            {**found['no task'], 'message': {**found['no task']['message'], 'headers': {'id': 'no task'}}},
        ]
    )
    want(regions, 10)
    lend(home, us, 'unique', 'limited', 'rated', 'planned', 'delivered', 'claimed', 'no task', 'no date')


def test_revoked_task_is_not_lent(regions: Regions, home: Link) -> None:
    """Workers here were told of it, and end it when they claim it; those of the other region were not."""
    us = regions['us']
    send(us, 'revoked', 'free')
    state.revoked.add('revoked')
    try:
        want(regions, 10)
        lend(home, us, 'revoked')
    finally:
        state.revoked.discard('revoked')


def test_many_messages_that_stay_do_not_hide_the_others(regions: Regions, home: Link) -> None:
    us = regions['us']
    add = us.app.signature('add', (1,)).set(region='any')
    chord([add] * 20, add).apply_async()
    counted = us.tasks()
    send(us, 'free')
    want(regions, 1)
    lend(home, us, *counted)
    assert [doc['id'] for doc in us.records('eu')] == ['free']


@pytest.mark.parametrize(('serializer', 'count'), [('json', 3), ('pickle', 0)])
def test_header_of_a_chord_stays_and_what_cannot_be_read(
    regions: Regions, home: Link, serializer: str, count: int
) -> None:
    us = regions['us']
    us.app.conf.accept_content = [serializer]
    anywhere = us.app.signature('add', (1,)).set(region='any', serializer=serializer)
    chord([anywhere, anywhere | anywhere], anywhere).apply_async()
    chord([anywhere, anywhere]).apply_async(kwargs={'body': anywhere}, region='any')
    group([anywhere, anywhere]).apply_async()
    (anywhere | anywhere).apply_async()
    send(us, 'last', serializer='json', queue='other')
    us.app.conf.accept_content = [serializer, 'json']
    eu = regions['eu'].regions
    eu.bulk([{'_id': 'region:eu', 'type': 'Region', 'want': {'celery': 10, 'other': 1}}])

    def lent() -> list[str]:
        home.step()
        return [doc['id'] for doc in us.records('eu')]

    wait_for(lambda: 'last' in (found := lent()) and len(found) > count, 'those that may be lent')
    assert len(lent()) == count + 1


def test_messages_of_a_paused_queue_stay_until_it_is_resumed(regions: Regions, home: Link) -> None:
    us = regions['us']
    us.broker.bulk([{'_id': 'broker:closed:celery', 'type': 'Pause', 'queue': 'celery'}])
    send(us, 'paused')
    send(us, 'other', queue='other')
    regions['eu'].regions.bulk([{'_id': 'region:eu', 'type': 'Region', 'want': {'celery': 1, 'other': 1}}])
    lend(home, us, 'paused')
    us.broker.bulk([{**us.broker.get('broker:closed:celery'), '_deleted': True}])
    lend(home, us)


@pytest.mark.parametrize('wrong', [{'want': 'x'}, {'want': {'celery': 'x'}}, {'want': None}, {'want': {'celery': -1}}])
def test_malformed_wants_stop_nothing(regions: Regions, home: Link, wrong: Any) -> None:
    us, eu = regions['us'], regions['eu'].regions
    send(us, 'one')
    eu.bulk([{'_id': 'region:eu', **wrong}])
    home.step()
    want(regions, 1)
    lend(home, us)


def test_task_that_is_not_taken_comes_back_and_is_not_lent_again(
    regions: Regions, home: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, 'LEND_SECONDS', 0.0)
    us = regions['us']
    send(us, 'one')
    want(regions, 1)
    lend(home, us)
    lend(home, us, 'one')
    assert us.records() == []
    want(regions, 2)
    send(us, 'two')
    lend(home, us, 'one')


@pytest.mark.parametrize('writes', range(4))
def test_next_leader_finishes_what_a_killed_one_has_begun(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, '1', '2')
    want(regions, 2)
    us_app: Any = us.app
    with new_link(us_app, 'eu') as killed, killed_after(writes, monkeypatch):
        lend(killed, us)
    with new_link(us_app, 'eu') as successor:
        lend(successor, us)
        regions.work('eu')
        assert eu.tasks() == ['1', '2']
        eu.broker.bulk([{**doc, '_deleted': True} for doc in items(eu.broker)])
        successor.begin()
        successor.step()
    regions.work('eu')
    assert eu.tasks() == us.tasks() == []


@pytest.mark.parametrize('changes', [{'region': None}, {'lent': 'x'}, {'message': None}])
def test_malformed_lent_item_stops_nothing(regions: Regions, home: Link, changes: Any) -> None:
    us = regions['us']
    send(us, 'broken', 'one')
    broken = next(doc for doc in items(us.broker) if doc['message']['headers']['id'] == 'broken')
    us.broker.bulk([{**region.lent(broken, 'eu', 1.0), **changes}])
    want(regions, 1)

    def is_lent() -> bool:
        home.step()
        return [doc['id'] for doc in us.records('eu')] == ['one']

    wait_for(is_lent, 'the other task')


# -- demand


@pytest.fixture
def demand(regions: Regions) -> Iterator[Demand]:
    """The demand of eu, where two workers are idle."""
    eu = regions['eu']
    worker = {'type': 'Consumer', 'worker': 'w', 'queues': ['celery'], 'expires': time.time() + 3600}
    eu.broker.bulk([{**worker, '_id': f'broker:consumer:{name}'} for name in 'ab'])
    broken: list[dict[str, Any]] = [{'queues': 5}, {'queues': [None, {}]}, {'expires': 'x'}, {'worker': None}]
    eu.broker.bulk([{**worker, '_id': f'broker:consumer:{at}', **wrong} for at, wrong in enumerate(broken)])
    activity = Activity(eu.broker, lambda: None)
    yield Demand(eu.broker, eu.regions, 'eu', 1, Looks(activity))
    activity.close()


def written(demand: Demand, eu: Region) -> Any:
    """Let the demand be written if that is due, and return the document without its date."""
    demand.reset()
    demand.step()
    return {name: value for name, value in eu.regions.get('region:eu').items() if name not in ('date', '_rev')}


def test_region_says_what_it_wants_and_which_regions_it_cannot_read(regions: Regions, demand: Demand) -> None:
    eu = regions['eu']
    expected = {'_id': 'region:eu', 'type': 'Region', 'want': {'celery': 2}, 'errors': {}}
    assert written(demand, eu) == expected
    before = eu.regions.get('region:eu')
    assert written(demand, eu) == expected
    assert eu.regions.get('region:eu') == before, 'it is written when something changes'
    demand.note_errors({'us': 'no server listens'})
    assert written(demand, eu) == {**expected, 'errors': {'us': 'no server listens'}}
    demand.close()
    assert eu.regions.get('region:eu')['want'] == {}
    assert written(demand, eu)['want'] == {'celery': 2}


@pytest.mark.parametrize('change', [None, {'want': 'x'}, {'type': 'x'}, {'_deleted': True}])
def test_document_that_somebody_changed_is_written_again(regions: Regions, demand: Demand, change: Any) -> None:
    eu = regions['eu']
    expected = written(demand, eu)
    if change:
        eu.regions.bulk([{**eu.regions.get('region:eu'), **change}])
    assert written(demand, eu) == expected


def test_region_asks_again_after_lent_tasks_have_arrived(regions: Regions, demand: Demand) -> None:
    eu = regions['eu']
    demand.step()
    first = eu.regions.get('region:eu')
    demand.note_lent(2)

    def has_asked_again() -> bool:
        demand.step()
        return bool(eu.regions.get('region:eu') != first)

    wait_for(has_asked_again, 'eu asks again')
    assert eu.regions.get('region:eu')['want'] == {'celery': 4}, 'twice as many: the first ones are done already'


@pytest.mark.parametrize('change', ['messages', 'pause'])
def test_busy_or_paused_region_wants_nothing(regions: Regions, demand: Demand, change: str) -> None:
    eu = regions['eu']
    assert written(demand, eu)['want'] == {'celery': 2}
    if change == 'messages':
        send(eu, '1', '2', region='eu')
    else:
        eu.broker.bulk([{'_id': 'broker:closed:celery', 'type': 'Pause', 'queue': 'celery'}])
    assert written(demand, eu)['want'] == {}


def rest(looks: Looks, step: Callable[[], object]) -> None:
    """Look until the next look waits for activity."""

    def is_resting() -> bool:
        looks.next_at = 0.0
        step()
        return looks.next_at > time.monotonic() + 30

    wait_for(is_resting, 'the looks to rest')


def test_looks_rest_until_something_happens(regions: Regions) -> None:
    us = regions['us']
    activity = Activity(us.broker, lambda: None)
    looks = Looks(activity)

    def look() -> None:
        looks.begin(0.2)
        looks.end(found=False)

    try:
        rest(looks, look)
        assert not activity.take()
        send(us, '1', region='us')
        wait_for(activity.take, 'the message')
    finally:
        activity.close()
