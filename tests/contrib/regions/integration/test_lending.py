"""Tasks with the region `any`: they are lent to a region that has nothing to do, and run once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chord, group
from celery.worker import state

from celery_couchdb.contrib.regions.lending import Demand, Looks, loads_of
from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.documents import validation, workitem
from tests.conftest import wait_for
from tests.regions import LeaderAndLink, Region, Regions, killed_after, new_link, regions_on
from tests.support import items


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us', lend_after=0.2) as regions:
        yield regions


@pytest.fixture
def home(regions: Regions) -> LeaderAndLink:
    """The link of us with eu, in a process that leads us."""
    return regions.link('us', 'eu')


def send(home: Region, *ids: str, **options: Any) -> None:
    for task_id in ids:
        home.app.send_task('add', (1, 2), task_id=task_id, **{'region': 'any', **options})


def want(regions: Regions, count: Any) -> None:
    """Let eu want tasks."""
    eu = regions['eu'].regions
    [doc] = eu.find(['region:eu'])
    eu.bulk([{**(doc or {}), **demand_of(count)}])


def demand_of(count: Any, **others: int) -> dict[str, Any]:
    """Return the document of eu, which wants tasks."""
    want = {'celery': count, **others}
    return {'_id': 'region:eu', 'type': 'Region', 'date': time.time(), 'want': want, 'until': time.time() + 60}


def lend(home: LeaderAndLink, us: Region, *left: str) -> None:
    """Let the home's link work until these tasks are left."""

    def is_done() -> bool:
        home.step()
        return us.tasks() == sorted(left)

    wait_for(is_done, f'only {left} are left')


def test_idle_region_gets_as_many_as_it_wants(regions: Regions, home: LeaderAndLink) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, '1', '2', '3')
    send(us, 'large', headers={'note': 'x'}, argsrepr='', kwargs={'text': 'x' * 40_000}, priority=9)
    us.app.send_task('add', (1, 2), task_id='home')
    want(regions, 2)
    lend(home, us, '3', 'home', 'large')
    for _ in range(3):
        home.step()
    assert us.tasks() == ['3', 'home', 'large'], 'it has as many as it wants'
    want(regions, 3)
    lend(home, us, 'home', 'large')
    want(regions, 8)
    lend(home, us, 'home')
    regions.work('eu')
    assert eu.tasks() == ['1', '2', '3', 'large']
    for item in items(eu.broker):
        assert item['message']['headers']['x-from-region'] == 'us'
        assert 'region' not in item['message']['properties']
    large = next(item for item in items(eu.broker) if item['priority'] == 9)
    assert large['_attachments']['body']['length'] > 40_000
    assert {doc['state'] for doc in us.records('eu')} == {'there'}


def test_what_is_not_lent(regions: Regions, home: LeaderAndLink) -> None:
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


def test_revoked_task_is_not_lent(regions: Regions, home: LeaderAndLink) -> None:
    """Workers here were told of it, and end it when they claim it; those of the other region were not."""
    us = regions['us']
    send(us, 'revoked', 'free')
    state.revoked.add('revoked')
    try:
        want(regions, 10)
        lend(home, us, 'revoked')
    finally:
        state.revoked.discard('revoked')


def test_many_messages_that_stay_do_not_hide_the_others(regions: Regions, home: LeaderAndLink) -> None:
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
    regions: Regions, home: LeaderAndLink, serializer: str, count: int
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
    eu.bulk([demand_of(10, other=1)])

    def lent() -> list[str]:
        home.step()
        return [doc['id'] for doc in us.records('eu')]

    wait_for(lambda: 'last' in (found := lent()) and len(found) > count, 'those that may be lent')
    assert len(lent()) == count + 1


def test_messages_of_a_paused_queue_stay_until_it_is_resumed(regions: Regions, home: LeaderAndLink) -> None:
    us = regions['us']
    us.broker.bulk([{'_id': 'broker:closed:celery', 'type': 'Pause', 'queue': 'celery'}])
    send(us, 'paused')
    send(us, 'other', queue='other')
    regions['eu'].regions.bulk([demand_of(1, other=1)])
    lend(home, us, 'paused')
    us.broker.bulk([{**us.broker.get('broker:closed:celery'), '_deleted': True}])
    lend(home, us)


@pytest.mark.parametrize(
    'wrong',
    [
        {'want': 'x'},
        {'want': {'celery': 'x'}},
        {'want': None},
        {'want': {'celery': -1}},
        {'until': 'x'},
        {'until': 1.0},
    ],
)
def test_malformed_wants_stop_nothing(regions: Regions, home: LeaderAndLink, wrong: Any) -> None:
    us, eu = regions['us'], regions['eu'].regions
    send(us, 'one')
    eu.bulk([{**demand_of(1), **wrong}])
    home.step()
    assert us.tasks() == ['one']
    want(regions, 1)
    lend(home, us)


def test_task_that_is_not_taken_comes_back_and_is_not_lent_again(
    regions: Regions, home: LeaderAndLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, 'LEND_SECONDS', 0.0)
    us = regions['us']
    send(us, 'one')
    want(regions, 1)
    lend(home, us)
    lend(home, us, 'one')
    assert us.records() == []
    send(us, 'two')
    time.sleep(0.3)
    for _ in range(3):
        home.step()
    assert us.tasks() == ['one', 'two'], 'the region is silent: it gets nothing until it asks again'
    want(regions, 2)
    lend(home, us, 'one')


def test_place_of_a_task_that_has_ended_is_taken_by_the_next_one(regions: Regions, home: LeaderAndLink) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, '1', '2', '3')
    for count in (2, 1, 0):
        want(regions, 1)  # the leader of eu, where nobody works, has written that it wants nothing
        lend(home, us, *'123'[3 - count :])
        regions.work('eu')
        eu.broker.bulk([{**doc, '_deleted': True} for doc in items(eu.broker)])
        us.regions.bulk([{**doc, '_deleted': True} for doc in us.records('eu')])  # as if its result had returned


def test_lent_task_that_is_revoked_does_not_run(regions: Regions, home: LeaderAndLink) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, 'revoked')
    want(regions, 1)
    lend(home, us)
    regions.work('eu')
    assert eu.tasks() == ['revoked']
    state.revoked.add('revoked')
    try:
        wait_for(lambda: home.step() >= 0 and 'cancelled' in us.records('eu')[0], 'the cancellation')
    finally:
        state.revoked.discard('revoked')
    regions.work()
    regions.work('us')
    assert us.app.AsyncResult('revoked').state == 'REVOKED'
    assert (us.records(), eu.tasks()) == ([], [])


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
def test_malformed_lent_item_stops_nothing(regions: Regions, home: LeaderAndLink, changes: Any) -> None:
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
def demand(regions: Regions) -> Demand:
    """The demand of eu, where two workers are idle."""
    eu = regions['eu']
    worker = {'type': 'Consumer', 'worker': 'w', 'queues': ['celery'], 'expires': time.time() + 3600}
    eu.broker.bulk([{**worker, '_id': f'broker:consumer:{name}'} for name in 'ab'])
    broken: list[dict[str, Any]] = [{'queues': 5}, {'queues': [None, {}]}, {'expires': 'x'}, {'worker': None}]
    eu.broker.bulk([{**worker, '_id': f'broker:consumer:{at}', **wrong} for at, wrong in enumerate(broken)])
    return Demand(eu.regions, 'eu')


def written(demand: Demand, eu: Region, errors: dict[str, str] | None = None) -> Any:
    """Let the demand be written if that is due, and return the document without its dates."""
    demand.update(loads_of(eu.broker, 1), {}, Counter(), errors or {})
    return {name: value for name, value in eu.regions.get('region:eu').items() if name not in ('date', 'until', '_rev')}


def test_region_says_what_it_wants_and_which_regions_it_cannot_read(regions: Regions, demand: Demand) -> None:
    eu = regions['eu']
    expected = {'_id': 'region:eu', 'type': 'Region', 'want': {'celery': 2}, 'errors': {}}
    assert written(demand, eu) == expected
    before = eu.regions.get('region:eu')
    assert before['until'] > eu.regions.clock.now() + 60
    assert written(demand, eu) == expected
    assert eu.regions.get('region:eu') == before, 'it is written when something changes'
    errors = {'us': 'no server listens'}
    assert written(demand, eu, errors) == {**expected, 'errors': errors}
    demand.close({})
    assert eu.regions.get('region:eu')['want'] == {}
    assert written(demand, eu)['want'] == {'celery': 2}


def test_demand_is_renewed_in_time_and_by_a_new_leader(
    regions: Regions, demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    eu = regions['eu']
    written(demand, eu)
    first = eu.regions.get('region:eu')
    demand.reset()
    written(demand, eu)
    second = eu.regions.get('region:eu')
    assert second['until'] > first['until']
    monkeypatch.setattr(demand._regions.clock, 'now', lambda: second['until'] - 59)
    written(demand, eu)
    assert eu.regions.get('region:eu')['until'] > second['until'] + 30


@pytest.mark.parametrize('change', [None, {'want': 'x'}, {'type': 'x'}, {'_deleted': True}])
def test_document_that_somebody_changed_is_written_by_the_next_leader(
    regions: Regions, demand: Demand, change: Any
) -> None:
    eu = regions['eu']
    expected = written(demand, eu)
    if change:
        eu.regions.bulk([{**eu.regions.get('region:eu'), **change}])
    demand.reset()
    assert written(demand, eu) == expected


@pytest.mark.parametrize('change', ['messages', 'pause'])
def test_busy_or_paused_region_wants_nothing(regions: Regions, demand: Demand, change: str) -> None:
    eu = regions['eu']
    assert written(demand, eu)['want'] == {'celery': 2}
    if change == 'messages':
        send(eu, '1', '2', region='eu')
    else:
        eu.broker.bulk([{'_id': 'broker:closed:celery', 'type': 'Pause', 'queue': 'celery'}])
    assert written(demand, eu)['want'] == {}


def test_looks_rest_until_something_happens(regions: Regions) -> None:
    us, woken = regions['us'], list[bool]()
    looks = Looks(us.broker, lambda: woken.append(True))

    def is_resting() -> bool:
        looks.next_at = 0.0
        assert looks.begin(0.0)
        looks.end(0.2, found=False)
        return looks.next_at > time.monotonic() + 30

    try:
        wait_for(is_resting, 'the looks to rest')
        assert not looks.begin(0.0)
        send(us, '1', region='us')
        wait_for(lambda: looks.begin(0.0), 'the message')
        assert woken
    finally:
        looks.close()
