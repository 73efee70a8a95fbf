"""Tasks that their region has not taken in time run in another region, and in one region only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_couchdb.contrib.regions.link import RegionLeader
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError
from tests.conftest import wait_for
from tests.regions import Regions, killed_after, new_link, regions_on
from tests.support import items


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us', 'asia') as regions:
        yield regions


def send(regions: Regions, task_id: str, *args: Any, **options: Any) -> Any:
    return regions['us'].app.send_task('add', args, task_id=task_id, **{'region': 'eu', **options})


def test_silent_region_is_replaced(regions: Regions) -> None:
    us, asia, eu = regions['us'], regions['asia'], regions['eu']
    send(regions, 'home', fallback='us', fallback_after=0.3)
    send(regions, 'asia', 'x' * 40_000, fallback='asia', fallback_after=0.3)
    send(regions, 'later', fallback='us')
    send(regions, 'never')

    def moved() -> bool:
        regions.work('us')
        return us.tasks() == ['home'] and [len(us.records(to)) for to in ('asia', 'eu')] == [1, 2]

    wait_for(moved, 'the fallbacks')
    regions.work()
    assert (asia.tasks(), eu.tasks()) == (['asia'], ['later', 'never'])
    [item] = items(asia.broker)
    assert item['message']['headers']['x-from-region'] == 'us'
    assert item['_attachments']['body']['length'] > 40_000
    assert not {'region', 'fallback', 'fallback_after'} & {*item['message']['properties']}
    assert us.tasks() == ['home']


def test_region_that_takes_the_task_in_time_runs_it_alone(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    send(regions, 'one', fallback='us', fallback_after=0.3)
    regions.work('eu')
    wait_for(lambda: us.broker.clock.now() > us.records()[0]['fallback_at'], 'the time of the fallback')
    regions.work()
    assert (eu.tasks(), us.tasks()) == (['one'], [])


def test_only_one_region_runs_it_if_both_decide_at_once(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback is due while the other region reads the record: who writes second has lost."""
    us, eu = regions['us'], regions['eu']
    send(regions, 'one', fallback='us', fallback_after=0.01)
    read = Client.fetch

    def falls_back() -> bool:
        regions.work('us', 'eu')
        return us.tasks() == ['one']

    def read_and_wait(self: Client, ids: Any, **params: Any) -> Any:
        found = read(self, ids, **params)
        if any(str(doc_id).startswith('p:eu:') for doc_id in ids):
            monkeypatch.setattr(Client, 'fetch', read)
            wait_for(falls_back, 'the fallback')
        return found

    monkeypatch.setattr(Client, 'fetch', read_and_wait)
    regions.work('eu', 'us')
    regions.work()
    assert (us.tasks(), eu.tasks(), us.records()) == (['one'], [], [])


@pytest.mark.parametrize('fallback', ['us', 'asia'])
def test_leader_killed_at_each_write(regions: Regions, monkeypatch: pytest.MonkeyPatch, fallback: str) -> None:
    us = regions['us']
    for kill_at in range(4):
        result = send(regions, f'task {kill_at}', fallback=fallback, fallback_after=0.01)
        wait_for(lambda: us.broker.clock.now() > max(doc.get('fallback_at', 0) for doc in us.records()), 'the fallback')
        with new_link(us.app, 'eu') as link, killed_after(kill_at, monkeypatch):
            link.step()
        regions.work('us')
        regions.work()
        found = [name for name in ('us', 'asia', 'eu') if result.id in regions[name].tasks()]
        assert found == [fallback]
    assert not us.records('eu')


def test_unknown_fallback_waits_until_the_region_is_known(regions: Regions) -> None:
    us = regions['us']
    us.app.send_task('add', (), task_id='one', region='eu', fallback='asia', fallback_after=0.01)
    known = us.options['regions']
    us.app.conf.broker_transport_options = {
        **us.options,
        'regions': {name: url for name, url in known.items() if name != 'asia'},
    }
    with new_link(us.app, 'eu') as link:

        def is_delayed() -> bool:
            link.begin()
            link.step()
            return 'delayed' in us.records()[0]

        wait_for(is_delayed, 'the delay')
    us.app.conf.broker_transport_options = us.options
    regions.work('us')
    assert [doc['id'] for doc in us.records('asia')] == ['one']


def test_region_that_was_removed_while_it_had_tasks(regions: Regions) -> None:
    us = regions['us']
    send(regions, 'one', fallback='us', fallback_after=0.01)
    send(regions, 'two')
    urls = {name: url for name, url in us.options['regions'].items() if name != 'eu'}
    us.app.conf.broker_transport_options = {**us.options, 'regions': urls}
    with us.app.connection_for_write() as connection:
        leader = RegionLeader(us.app, connection.connection, lambda: None, 1)
        leader.step()
        wait_for(lambda: us.tasks() == ['one'], 'the fallback')
        leader.close()
    assert [doc['id'] for doc in us.records('eu')] == ['two'], 'until somebody drops it, or the region is back'


WRONG: list[tuple[dict[str, Any], str]] = [
    ({'fallback': 'mars'}, "fallback must be another one of the regions, not 'mars'"),
    ({'fallback_after': 5}, 'fallback must be another one of the regions, not None'),
    ({'fallback': 'us', 'fallback_after': 0}, 'fallback_after must be a number of seconds above 0, not 0'),
    ({'region': None, 'fallback': 'us'}, 'fallback needs the name of a region in region'),
    ({'region': 'any', 'fallback': 'us'}, 'fallback needs the name of a region in region'),
]


def test_wrong_fallback_is_an_error_when_the_task_is_sent(regions: Regions) -> None:
    for options, error in WRONG:
        with pytest.raises(ConfigurationError, match=error):
            send(regions, 'one', **options)
    assert regions['us'].records() == []
