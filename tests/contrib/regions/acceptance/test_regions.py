"""Regions with real workers: tasks for a region and their results, also of chains and chords, a cut, lent tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, group

from celery_couchdb.contrib.regions import revoke
from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions.region import region_id, wants_of
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError
from tests.acceptance.conftest import APP, Site
from tests.conftest import PATIENCE, PATIENT, wait_for
from tests.regions import Region, Regions, regions_on
from tests.support import items
from tests.worker_process import WorkerProcess

#: A function that starts a worker in a region.
Start = Callable[[Region], Any]


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us') as regions:
        yield regions


@pytest.fixture
def start(site: Site) -> Callable[..., Any]:
    """A function that starts a worker in a region, with more arguments, and waits until it is ready."""

    def start(region: Region, *arguments: str) -> Any:
        settings = {'broker_transport_options': region.options, 'result_backend_transport_options': PATIENT}
        environment = {
            'BROKER_URL': region.server.couchdb_url(region.broker.address.database),
            'RESULT_URL': region.server.couchdb_url(region.results.address.database),
            'SETTINGS': json.dumps(settings),
        }
        command = WorkerProcess.command('--pool', 'threads', '--concurrency', '2', *arguments)
        worker = site.run(command, environment, APP)
        worker.ready()
        return worker

    return start


def left(region: Region) -> list[Any]:
    """Return the records of a region, and the results that have not returned from it."""
    return region.records() + region.returning()


def test_result_returns_to_the_region_where_the_task_was_sent(regions: Regions, start: Start) -> None:
    us, eu = regions['us'], regions['eu']
    start(eu)
    start(us)
    add = us.app.signature('add')
    assert us.app.send_task('add', (1, 2), region='eu').get(timeout=PATIENCE) == 3
    assert eu.app.send_task('add', ('x' * 40_000, 'y'), region='us').get(timeout=PATIENCE) == 'x' * 40_000 + 'y'
    steps = chain(add.clone((1, 1)).set(region='eu'), add.clone((3,)), add.clone((4,)).set(region='us'))
    assert steps.apply_async().get(timeout=PATIENCE) == 9
    chord = add.clone((1, 1)).set(region='eu') | group(add.clone((n,)) for n in range(3)) | us.app.signature('total')
    assert chord.apply_async().get(timeout=PATIENCE) == 9
    both = group(add.clone((n, n)).set(region=('eu', 'us')[n % 2]) for n in range(10))
    assert both.apply_async().get(timeout=PATIENCE) == [2 * n for n in range(10)]
    wait_for(lambda: not any(left(us) + left(eu)), 'nothing is left')


def test_region_that_is_cut_off_goes_on_and_catches_up(regions: Regions, start: Start) -> None:
    us, eu = regions['us'], regions['eu']
    start(eu)
    start(us)
    regions.cut()
    away = [us.app.send_task('add', (n, 1), region='eu') for n in range(20)]
    assert us.app.send_task('add', (1, 1)).get(timeout=PATIENCE) == 2
    assert eu.app.send_task('add', (1, 1)).get(timeout=PATIENCE) == 2
    regions.restore()
    assert [result.get(timeout=PATIENCE) for result in away] == [n + 1 for n in range(20)]
    wait_for(lambda: items(eu.broker) == [] == items(us.broker), 'the acknowledgements')


def test_later_step_of_a_chain_is_cancelled_from_home(regions: Regions, start: Start, tmp_path: Path) -> None:
    us, eu = regions['us'], regions['eu']
    start(eu)
    start(us)
    nap = us.app.signature('nap', (str(tmp_path / 'journal'), 'one', None)).set(region='eu')
    last = (nap | us.app.signature('nap', (str(tmp_path / 'journal'), 'two', None), immutable=True)).apply_async()
    wait_for((tmp_path / 'journal').exists, 'the first step')
    with pytest.raises(ConfigurationError, match='asia'):
        revoke(last.id, us.app, region='asia')
    assert not revoke(last.id, us.app)
    assert revoke(last.id, us.app, region='eu')
    wait_for(lambda: [doc['id'] for doc in us.records()] == [last.parent.id], 'the other region to revoke it')
    (tmp_path / 'go on').touch()
    wait_for(lambda: last.state == 'REVOKED', 'the result')
    wait_for(lambda: not any(left(us) + left(eu)), 'nothing is left')


def writes(client: Client, *prefixes: str) -> int:
    """Return how often the documents were written whose ids begin with one of these prefixes."""
    rows = client.request('GET', '/_changes')['results']
    revisions = [row['changes'][0]['rev'] for row in rows if row['id'].startswith(prefixes)]
    return sum(int(revision.split('-')[0]) for revision in revisions)


def test_writes_of_tasks_there_and_back(regions: Regions, start: Start) -> None:
    """Seven for each task, and two for each document in which results return: those that come together share it."""
    us, eu = regions['us'], regions['eu']
    start(eu)
    start(us)
    count = 30
    sent = group(us.app.signature('add', (n, 1)).set(region='eu') for n in range(count)).apply_async()
    assert sent.get(timeout=PATIENCE) == [n + 1 for n in range(count)]
    wait_for(lambda: not any(left(us) + left(eu)) and not items(eu.broker), 'nothing is left')
    assert writes(us.regions, 'p:') == 3 * count  # sent, taken, deleted
    assert writes(eu.broker, 'parcel:') == 3 * count  # published, claimed, acknowledged
    assert writes(us.results, *(us.app.backend.get_key_for_task(result.id) for result in sent)) == count
    assert 2 <= writes(eu.regions, 'r:') <= 2 * count


@pytest.mark.slow
def test_idle_region_runs_lent_tasks_once(regions: Regions, start: Start, tmp_path: Path) -> None:
    us, eu = regions['us'], regions['eu']
    start(us)
    start(eu)
    wait_for(lambda: wants_of(eu.regions.find([region_id('eu')])[0] or {}, 0.0)[0], 'the idle region to ask for tasks')
    journal, names = tmp_path / 'journal', [str(number) for number in range(30)]
    result = group(us.app.signature('nap', (str(journal), name, 0.5)).set(region='any') for name in names)()
    assert result.get(timeout=PATIENCE) == names
    found = Counter(journal.read_text().splitlines())
    assert found == Counter(f'{what} {name}' for what in ('start', 'end') for name in names)
    wait_for(lambda: not items(us.broker) and not items(eu.broker), 'the acknowledgements')
    wait_for(lambda: not any(left(us) + left(eu)), 'nothing is left')


def test_task_that_arrives_after_its_expiry_is_revoked(regions: Regions, start: Start) -> None:
    us, eu = regions['us'], regions['eu']
    late = us.app.send_task('add', (1, 2), region='eu', expires=0.1)
    retried = us.app.send_task('flaky', (100, 0.2), region='eu', expires=60)
    wait_for(lambda: us.broker.clock.now() > next(iter(us.regions.id_range('p:', docs=True)))['doc']['published'] + 0.2)
    start(eu)
    start(us)
    wait_for(lambda: late.state == 'REVOKED', 'the result')
    wait_for(lambda: retried.state == 'FAILURE', 'the end of the retries')
