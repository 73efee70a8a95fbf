"""Jobs by their task ids, with real workers: list, show, wait and remove."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError

from celery_couchdb.jobs import Jobs
from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site, couchdb, listed, sentence, succeeded


def revoked(site: Site) -> dict[str, list[str]]:
    """Return the ids of the tasks that each worker of the site has revoked."""
    return dict(site.app.control.inspect([site.workers[0].hostname()], timeout=PATIENCE, limit=1).revoked())


def test_jobs_are_listed_and_shown(site: Site) -> None:
    site.worker(concurrency=1, worker_prefetch_multiplier=1)
    running = site.send('late_nap', str(site.journal), 'long', None)
    wait_for(lambda: site.journalled() == ['start long'], 'the first task to start')
    waiting, later = site.send('add', 1, 2), site.send('add', 3, 4, countdown=3600)
    assert Jobs(site.app).wait(running.id, 'running', timeout=PATIENCE) == 'running'
    table = succeeded(couchdb(site, 'jobs', 'list', COLUMNS='200')).splitlines()
    assert [line.split()[0] for line in table] == ['ID', running.id, waiting.id, later.id]
    assert [line.split()[3] for line in table] == ['STATE', 'running', 'ready', 'scheduled']
    [job] = listed(site, 'jobs', 'list', '--state', 'scheduled', '--queue', 'celery')
    assert (job['id'], job['task'], job['args'], job['kwargs'], job['queue']) == (later.id, 'add', [3, 4], {}, 'celery')
    shown = succeeded(couchdb(site, 'show', running.id))
    assert 'state      running' in shown
    assert 'late_nap' in shown
    assert "nothing is known of a task 'unknown'" in sentence(couchdb(site, 'show', 'unknown'))


def test_running_jobs_are_terminated_on_request(site: Site) -> None:
    """Whether they are acknowledged early or late."""
    site.worker(pool='prefork')
    results = [site.send(task, str(site.journal), task, 3600) for task in ('nap', 'late_nap')]
    wait_for(lambda: len(site.journalled()) == 2, 'the tasks to start')
    for result in results:
        said = succeeded(couchdb(site, 'jobs', 'remove', result.id, '--yes', '--terminate'))
        assert 'told to terminate it' in said
        with pytest.raises(TaskRevokedError):
            result.get(timeout=PATIENCE)
    wait_for(lambda: not items(site.client), 'the message to be deleted')
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3


def test_jobs_of_a_worker_that_acknowledges_early(site: Site) -> None:
    """The running job has left the queue, its result is STARTED, and the worker knows it. The other one is held."""
    worker = site.worker(pool='prefork', concurrency=1, worker_prefetch_multiplier=4, task_track_started=True)
    first, jobs = site.send('nap', str(site.journal), 'first', None), Jobs(site.app)
    wait_for(site.journalled, 'the first task to start')
    wait_for(lambda: not items(site.client), 'the ack')
    assert jobs.state(first.id) == 'running'
    wait_for(
        lambda: jobs.workers(first.id, timeout=2) == {worker.hostname(): 'active'}, 'the worker to report the task'
    )
    second = site.send('nap', str(site.journal), 'second', 0)
    assert jobs.wait(second.id, 'prefetched', timeout=PATIENCE) == 'prefetched'
    jobs.remove(second.id)
    wait_for(lambda: revoked(site) == {worker.hostname(): [second.id]}, 'the worker to revoke the task')
    states = jobs.watch(first.id, PATIENCE)
    assert next(states) == 'running'
    site.go_on()
    assert list(states) == ['gone']
    assert first.get(timeout=PATIENCE) == 'first'
    with pytest.raises(TaskRevokedError):
        second.get(timeout=PATIENCE)
    assert site.journalled() == ['start first', 'end first']
