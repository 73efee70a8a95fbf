"""Results that tasks hand over: stored before the acknowledgement of their message, whatever happens to a process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from typing import Any

import pytest
from celery import chord

from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

LEASE = {'broker_transport_options': SHORT_LEASE}


@pytest.fixture
def proxy(site: Site, proxy: Proxy) -> Proxy:
    """A proxy for the results of workers. The broker and the test itself do not use it."""
    site.reroute(proxy, 'RESULT_URL')
    return proxy


def ended(site: Site, count: int) -> bool:
    return sum(line.startswith('end') for line in site.journalled()) >= count


def run_to_the_end(site: Site, name: str, count: int) -> list[Any]:
    """Send `count` tasks that return their numbers, wait until they have ended, and return their results."""
    results = [site.send(name, str(site.journal), str(number), 0) for number in range(count)]
    wait_for(lambda: ended(site, count), 'the tasks to end')
    return results


@pytest.mark.parametrize('pool', ['prefork', 'threads'])
def test_acknowledgement_waits_for_the_result(site: Site, proxy: Proxy, pool: str) -> None:
    site.worker(pool=pool)
    site.send('add', 1, 1).get(timeout=PATIENCE)
    wait_for(lambda: not items(site.client), 'the first task to be acknowledged')
    proxy.hang()
    results = run_to_the_end(site, 'late_nap', 6)
    assert len(items(site.client)) == 6
    proxy.go_on()
    assert [result.get(timeout=PATIENCE) for result in results] == [str(number) for number in range(6)]
    wait_for(lambda: not items(site.client), 'the messages to be deleted')


def test_killed_worker_loses_no_result_of_a_late_acknowledged_task(site: Site, proxy: Proxy) -> None:
    first = site.worker(pool='prefork', **LEASE)
    proxy.hang()
    results = run_to_the_end(site, 'late_nap', 6)
    first.kill()
    proxy.go_on()
    site.worker(**LEASE)
    assert [result.get(timeout=PATIENCE) for result in results] == [str(number) for number in range(6)]
    wait_for(lambda: not items(site.client), 'the messages to be deleted')
    assert Counter(site.journalled())['end 0'] == 2


@pytest.mark.parametrize('pool', ['prefork', 'threads'])
def test_tasks_run_on_and_a_warm_shutdown_waits_while_results_cannot_be_stored(
    site: Site, proxy: Proxy, pool: str
) -> None:
    worker = site.worker(pool=pool)
    proxy.refuse()
    early = run_to_the_end(site, 'nap', 40)
    wait_for(lambda: 'results are not stored' in worker.logs(), 'the log line')
    late = site.send('late_nap', str(site.journal), 'late', 0)
    wait_for(lambda: ended(site, 41), 'the task to end')
    worker.kill('SIGTERM')
    wait_for(lambda: 'Warm shutdown' in worker.logs(), 'the worker to begin its shutdown')
    with pytest.raises(subprocess.TimeoutExpired):
        worker.container.wait(2.0)
    proxy.restore()
    assert worker.container.wait(PATIENCE) == 0
    assert worker.logs().count('results are not stored') == 1
    assert [result.get(timeout=PATIENCE) for result in early] == [str(number) for number in range(40)]
    assert late.get(timeout=PATIENCE) == 'late'
    assert not items(site.client)


def test_cold_shutdown_says_what_it_could_not_store(site: Site, proxy: Proxy) -> None:
    worker = site.worker(pool='prefork', **LEASE)
    proxy.refuse()
    result = site.send('late_nap', str(site.journal), 'a', 0)
    wait_for(lambda: ended(site, 1), 'the task to end')
    wait_for(lambda: 'results are not stored' in worker.logs(), 'the result to be handed over')
    worker.kill('SIGQUIT')
    worker.container.wait(PATIENCE)
    assert f'1 results could not be stored before the worker ended: celery-task-meta-{result.id}' in worker.logs()
    proxy.restore()
    site.worker(**LEASE)
    assert result.get(timeout=PATIENCE) == 'a'


def test_killed_child_loses_no_result_that_it_has_handed_over(site: Site, proxy: Proxy) -> None:
    site.worker(pool='prefork', concurrency=1)
    first = site.send('process', str(site.journal))
    wait_for(site.journalled, 'the task to start')
    child = int(site.journalled()[0].split()[1])
    proxy.hang()
    site.go_on()
    wait_for(lambda: 'end' in site.journalled(), 'the task to end')
    second = site.send('process', str(site.journal))
    site.send('process', str(site.journal))
    wait_for(lambda: len(site.journalled()) > 4, 'the child to hand over the second result, and begin another task')
    os.kill(child, signal.SIGKILL)
    proxy.go_on()
    assert first.get(timeout=PATIENCE) == 'done'
    assert second.get(timeout=PATIENCE) == 'done'


def test_tasks_read_the_state_that_they_have_stored_and_the_body_of_a_chord_knows_its_parent(site: Site) -> None:
    """The body is sent as if the last part had sent it."""
    site.worker(pool='prefork', task_track_started=True, task_inherit_parent_priority=True)
    assert site.send('own_states').get(timeout=PATIENCE) == ['STARTED', 'HALF', 'HALF']
    header = [site.app.signature('add', (number, 1), priority=7) for number in range(3)]
    body = chord(header, app=site.app)(site.app.signature('lineage'))
    parent_id, root_id, priority = body.get(timeout=PATIENCE)
    assert parent_id in [result.id for result in body.parent.results]
    assert root_id
    assert priority == 7


def test_confirmed_results_are_stored_when_a_task_ends(site: Site, proxy: Proxy) -> None:
    site.worker(pool='prefork', result_backend_transport_options={'confirm_results': True})
    proxy.hang()
    before = proxy.accepted
    results = [site.send('nap', str(site.journal), str(number), 0) for number in range(6)]
    wait_for(lambda: ended(site, 2), 'each process to run a task')
    wait_for(lambda: proxy.accepted >= before + 2, 'each process to store its result')
    assert len(site.journalled()) == 4  # nothing else has started
    proxy.go_on()
    assert [result.get(timeout=PATIENCE) for result in results] == [str(number) for number in range(6)]
