"""Which tasks run, as workers report it: in `status`, in lists of jobs, and to those who wait."""

from __future__ import annotations

import importlib.util

import pytest

from celery_couchdb.jobs import Jobs
from kombu_couchdb.admin.status import ConsumerStatus, status
from tests.conftest import PATIENCE, wait_for

from .conftest import Site, couchdb, succeeded


def consumer(site: Site) -> ConsumerStatus:
    [found] = status(site.client)['consumers']
    return found


@pytest.mark.parametrize('pool', ['prefork', 'threads', 'gevent'])
def test_running_and_prefetched_tasks(site: Site, pool: str) -> None:
    if pool == 'gevent' and importlib.util.find_spec(pool) is None:
        pytest.skip(f'{pool} is not installed')
    worker = site.worker(pool=pool, concurrency=2)
    early = site.send('nap', str(site.journal), 'early', None)
    late = site.send('late_nap', str(site.journal), 'late', None)
    wait_for(lambda: len(site.journalled()) == 2, 'the tasks to start')
    waiting = site.send('late_nap', str(site.journal), 'waiting', None)
    jobs = Jobs(site.app)
    assert jobs.wait(late.id, 'running', timeout=PATIENCE) == 'running'
    wait_for(lambda: len(consumer(site)['running']) == 2, 'both tasks to be reported')
    assert jobs.wait(waiting.id, 'prefetched', timeout=PATIENCE) == 'prefetched'
    found = status(site.client)
    assert (found['queues']['celery']['running'], found['queues']['celery']['prefetched']) == (2, 1)
    assert {(task['id'], task['task']) for task in consumer(site)['running']} == {
        (early.id, 'nap'),
        (late.id, 'late_nap'),
    }
    assert (consumer(site)['name'], consumer(site)['queues'], consumer(site)['prefetched']) == (
        worker.hostname(),
        ['celery'],
        1,
    )
    states = {line.split()[0]: line.split()[3] for line in succeeded(couchdb(site, 'jobs', 'list')).splitlines()}
    assert (states[late.id], states[waiting.id]) == ('running', 'prefetched')
    page = succeeded(couchdb(site, 'status', COLUMNS='100'))
    assert max(map(len, page.splitlines())) <= 100
    assert {early.id, late.id} < set(page.split())
    site.go_on()
    assert waiting.get(timeout=PATIENCE) == 'waiting'
    wait_for(lambda: not consumer(site)['running'], 'the end of the tasks to be reported')
