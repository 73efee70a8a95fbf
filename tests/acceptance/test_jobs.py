"""Jobs by their task ids, with real workers: list, show, wait and remove."""

from __future__ import annotations

import json

import pytest
from celery.exceptions import TaskRevokedError

from celery_couchdb.jobs import Jobs
from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site
from .test_command import couchdb, sentence, succeeded


def revoked(site: Site) -> dict[str, list[str]]:
    """Return the ids of the tasks that each worker of the site has revoked."""
    return dict(site.app.control.inspect([site.workers[0].hostname()], timeout=PATIENCE, limit=1).revoked())


def test_jobs_are_listed_and_shown(site: Site) -> None:
    site.worker(concurrency=1, worker_prefetch_multiplier=1)
    running = site.send('late_nap', str(site.journal), 'long', None)
    wait_for(lambda: site.journalled() == ['start long'], 'the first task to start')
    waiting, later = site.send('add', 1, 2), site.send('add', 3, 4, countdown=3600)
    listed = succeeded(couchdb(site, 'jobs', 'list', COLUMNS='100')).splitlines()
    assert [line.split()[0] for line in listed] == ['ID', running.id, waiting.id, later.id]
    assert [line.split()[3] for line in listed] == ['STATE', 'running', 'pending', 'scheduled']
    [line] = succeeded(
        couchdb(site, 'jobs', 'list', '--json', '--state', 'scheduled', '--queue', 'celery')
    ).splitlines()
    job = json.loads(line)
    assert (job['id'], job['task'], job['args'], job['kwargs'], job['queue']) == (later.id, 'add', [3, 4], {}, 'celery')
    shown = succeeded(couchdb(site, 'jobs', 'show', running.id))
    assert 'state      running' in shown
    assert 'late_nap' in shown
    assert 'is not in a queue and with no worker' in sentence(couchdb(site, 'jobs', 'show', 'unknown'))


@pytest.mark.parametrize('task', ['nap', 'late_nap'], ids=['acknowledged early', 'acknowledged late'])
def test_running_job_is_terminated_on_request(site: Site, task: str) -> None:
    site.worker(pool='prefork', concurrency=1)
    result = site.send(task, str(site.journal), 'endless', 3600)
    wait_for(lambda: site.journalled() == ['start endless'], 'the task to start')
    said = succeeded(couchdb(site, 'remove', result.id, '--yes', '--terminate'))
    assert 'told to terminate it' in said
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE)
    wait_for(lambda: not items(site.client), 'the message to be deleted')
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3


def test_running_job_that_was_acknowledged_early(site: Site) -> None:
    """The message has left the queue.

    The result has the state STARTED if that is tracked, and the worker knows the task.
    """
    worker = site.worker(task_track_started=True)
    result, jobs = site.send('nap', str(site.journal), 'nap', None), Jobs(site.app)
    wait_for(lambda: site.journalled() == ['start nap'], 'the task to start')
    assert jobs.state(result.id) == 'running'
    wait_for(
        lambda: jobs.workers(result.id, timeout=2) == {worker.hostname(): 'active'}, 'the worker to report the task'
    )
    states = jobs.watch(result.id, PATIENCE)
    assert next(states) == 'running'
    site.go_on()
    assert list(states) == ['gone']
    assert site.journalled() == ['start nap', 'end nap']


def test_prefetched_job_is_revoked(site: Site) -> None:
    worker = site.worker(pool='prefork', concurrency=1, worker_prefetch_multiplier=4)
    first = site.send('nap', str(site.journal), 'first', None)
    wait_for(lambda: site.journalled(), 'the first task to start')
    second = site.send('nap', str(site.journal), 'second', 0)
    jobs = Jobs(site.app)
    assert jobs.wait(second.id, 'running', timeout=PATIENCE) == 'running'
    jobs.remove(second.id)
    wait_for(lambda: revoked(site) == {worker.hostname(): [second.id]}, 'the worker to revoke the task')
    site.go_on()
    with pytest.raises(TaskRevokedError):
        second.get(timeout=PATIENCE)
    assert first.get(timeout=PATIENCE) == 'first'
    assert site.journalled() == ['start first', 'end first']


def test_full_queue_does_not_starve_a_small_one(site: Site) -> None:
    for number in range(300):
        site.send('nap', str(site.journal), f'full {number}', None if number == 20 else 0.02, queue='full')
    site.worker('-Q', 'full,small', concurrency=1)
    wait_for(lambda: 'start full 20' in site.journalled(), 'the worker to run tasks')
    small = [site.send('nap', str(site.journal), f'small {number}', 0, queue='small') for number in range(10)]
    site.go_on()
    for result in small:
        result.get(timeout=PATIENCE)
    lines = site.journalled()
    last = max(lines.index(f'end small {number}') for number in range(10))
    ends = [line for line in lines[:last] if line.startswith('end full')]
    assert len(ends) < 250, 'the tasks of the small queue ran after those of the full one'
