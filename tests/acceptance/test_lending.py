"""Regions with real workers: lent tasks, fallbacks, tasks in every region, expired tasks, and chords."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import chord, group

from celery_couchdb.regions import everywhere
from tests.conftest import PATIENCE, wait_for
from tests.regions import Region, Regions
from tests.support import items

from .test_regions import regions, start

__all__ = ['regions', 'start']

Start = Callable[[Region], Any]


def ran_in(region: Region) -> int:
    """Return how many results of tasks are stored in a region."""
    return sum(row['doc'].get('type') == 'Result' for row in region.results.id_range('', docs=True))


def test_idle_region_runs_lent_tasks_once(regions: Regions, start: Start, tmp_path: Path) -> None:
    us, eu = regions['us'], regions['eu']
    regions.connect()
    start(us)
    start(eu)
    journal = tmp_path / 'journal'
    tasks = [us.app.signature('nap', (str(journal), str(n), 0.5)).set(region='any') for n in range(30)]
    result = group(tasks).apply_async()
    assert result.get(timeout=PATIENCE) == [str(n) for n in range(30)]
    found = Counter(journal.read_text().splitlines())
    assert found == Counter([f'{what} {n}' for what in ('start', 'end') for n in range(30)])
    assert ran_in(eu) > 0
    wait_for(lambda: not items(us.broker) and not items(eu.broker), 'the acknowledgements')
    wait_for(lambda: not list(us.regions.id_range('p:')) and not list(eu.regions.id_range('p:')), 'no parcels')


def test_fallback_runs_if_the_region_is_silent(regions: Regions, start: Start) -> None:
    us, eu = regions['us'], regions['eu']
    start(us)
    add = us.app.signature('add', (1, 2)).set(region='eu', fallback='us', fallback_after=0.5)
    assert add.apply_async().get(timeout=PATIENCE) == 3
    regions.connect()
    start(eu)
    assert us.app.send_task('add', (3, 4), region='eu').get(timeout=PATIENCE) == 7
    wait_for(lambda: items(eu.broker) == [] == items(us.broker), 'the acknowledgements')


def test_task_runs_in_every_region(regions: Regions, start: Start) -> None:
    us, eu = regions['us'], regions['eu']
    regions.connect()
    start(us)
    start(eu)
    assert everywhere(us.app.signature('flaky', (1, 0.1))).apply_async().get(timeout=PATIENCE)[0][0] == 1
    assert ran_in(eu) == 1


def test_parcel_that_arrives_after_its_expiry_is_revoked(regions: Regions, start: Start) -> None:
    us, eu = regions['us'], regions['eu']
    late = us.app.send_task('add', (1, 2), region='eu', expires=0.1)
    retried = us.app.send_task('flaky', (100, 0.2), region='eu', expires=60)
    wait_for(lambda: us.broker.clock.now() > next(iter(us.regions.id_range('p:', docs=True)))['doc']['published'] + 0.2)
    regions.connect()
    start(eu)
    start(us)
    wait_for(lambda: late.state == 'REVOKED', 'the result')
    wait_for(lambda: retried.state == 'FAILURE', 'the end of the retries')


def test_body_of_a_chord_runs_in_another_region(regions: Regions, start: Start) -> None:
    us, eu = regions['us'], regions['eu']
    regions.connect()
    start(us)
    start(eu)
    add = us.app.signature('add', (1, 2))
    total = us.app.signature('total').set(region='eu')
    assert chord([add, add.clone().set(region='any'), add], total).apply_async().get(timeout=PATIENCE) == 9
    assert ran_in(eu) == 1
