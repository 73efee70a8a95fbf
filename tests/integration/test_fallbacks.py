"""Parcels that their region has not taken in time run in another region."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.regions.region_mover import RegionMover
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.clock import ServerClock
from kombu_couchdb.errors import ConfigurationError, ServerUnavailable
from tests.conftest import wait_for
from tests.regions import Regions, await_death, regions_on
from tests.support import items

from .test_regions import ferry, parcels, tasks

__all__ = ['ferry']

Ferries = Callable[[Celery], RegionMover]


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us', 'asia') as regions:
        yield regions


def send(regions: Regions, task_id: str, *args: Any, **options: Any) -> None:
    regions['us'].app.send_task('add', args, task_id=task_id, **{'region': 'eu', **options})


def test_silent_region_is_replaced(regions: Regions, ferry: Ferries) -> None:
    us = regions['us']
    sender = ferry(us.app)
    sender.step()
    send(regions, 'home', fallback='us', fallback_after=0.3)
    send(regions, 'asia', 'x' * 40_000, fallback='asia', fallback_after=0.3)
    send(regions, 'later', fallback='us')
    send(regions, 'never')
    sender._stale = True  # the feed would say so

    def home() -> bool:
        sender.step()
        left = sorted(doc['_id'].split(':')[1] for doc in parcels(us.regions))
        return tasks(us.broker) == ['home'] and left == ['asia', 'eu', 'eu']

    wait_for(home, 'the fallbacks')
    regions.replicate()
    asia, eu = regions['asia'], regions['eu']
    for region in (asia, eu):
        ferry(region.app).step()
    assert (tasks(asia.broker), tasks(eu.broker)) == (['asia'], ['later', 'never'])
    [item] = items(asia.broker)
    assert item['message']['headers']['x-from-region'] == 'us'
    assert item['_attachments']['body']['length'] > 40_000
    assert not {'region', 'fallback', 'fallback_after'} & {*item['message']['properties']}
    regions.replicate()
    assert parcels(us.regions) == parcels(eu.regions) == parcels(asia.regions) == []


def test_region_that_takes_the_parcel_in_time_runs_it_alone(
    regions: Regions, ferry: Ferries, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu = regions['us'], regions['eu']
    sender = ferry(us.app)
    send(regions, 'one', fallback='us', fallback_after=600)
    assert sender.step() <= 600
    regions.replicate()
    ferry(eu.app).step()
    regions.replicate()
    monkeypatch.setattr(ServerClock, 'now', lambda clock: time.time() + 3600)
    sender._stale = True
    sender.step()
    assert (tasks(eu.broker), tasks(us.broker)) == (['one'], [])


@pytest.mark.parametrize('fallback', ['us', 'asia'])
def test_ferry_killed_before_the_parcel_is_deleted(
    regions: Regions, ferry: Ferries, monkeypatch: pytest.MonkeyPatch, fallback: str
) -> None:
    us = regions['us']
    send(regions, 'one', fallback=fallback, fallback_after=0.1)
    first: Any = ferry(us.app)

    def killed(docs: Any) -> Any:
        if docs:
            raise ServerUnavailable('killed')
        return []

    monkeypatch.setattr(first._client, 'bulk', killed)

    await_death(first.step)
    first._leader.release()

    def finish() -> list[str]:
        """Let the other ferries work, and return the tasks that were published; each is completed at once."""
        done = []
        for name in ('us', 'asia'):
            ferry(regions[name].app).step()
            regions.replicate()
            done += tasks(regions[name].broker)
            regions[name].broker.bulk([{**doc, '_deleted': True} for doc in items(regions[name].broker)])
        return done

    assert finish() == ['one']
    monkeypatch.undo()
    first._fallbacks._due = 0.0  # the process was not killed but paused
    first._fallbacks.step()
    assert finish() == []
    assert parcels(us.regions) == []


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
    assert parcels(regions['us'].regions) == []
