"""Workers that stop: tasks that have not begun go to other workers at once, and each task runs once."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter

import pytest

from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site


def await_received(site: Site, number: int) -> None:
    """Wait until the first worker has received so many tasks."""
    wait_for(lambda: site.workers[0].logs().count(' received\n') == number, 'the worker to receive the tasks')


def waiting(site: Site) -> list[int]:
    """Return how often the messages that nobody has claimed were delivered."""
    return [item['attempts'] for item in items(site.client) if not item['claimed']]


@pytest.mark.parametrize(('pool', 'how'), [('threads', 'SIGTERM'), ('prefork', 'remote control')])
def test_tasks_that_have_not_begun_run_elsewhere_while_a_long_task_runs(site: Site, pool: str, how: str) -> None:
    worker = site.worker(pool=pool, concurrency=1, worker_prefetch_multiplier=8)
    name, journal = worker.hostname(), str(site.journal)
    site.app.control.rate_limit('add', '1/h', destination=[name], reply=True, timeout=PATIENCE, limit=1)
    site.send('late_nap', journal, 'long', None)
    wait_for(site.journalled, 'the long task to start')
    results = [site.send(task, journal, f'{task} {number}', 0) for task in ('nap', 'late_nap') for number in range(2)]
    results += [site.send('add', number, 1) for number in range(2)]  # the second one waits for its rate
    await_received(site, 7)
    if how == 'SIGTERM':
        worker.kill('SIGTERM')
    else:
        site.app.control.shutdown([name])
    wait_for(lambda: len(waiting(site)) == 6, 'the release')
    assert waiting(site) == [0] * 6
    site.worker(concurrency=1)
    done = [result.get(timeout=PATIENCE) for result in results]
    assert done == ['nap 0', 'nap 1', 'late_nap 0', 'late_nap 1', 1, 2]
    assert 'end long' not in site.journalled()
    assert worker.container.status == 'running'
    site.go_on()
    assert worker.container.wait() == 0
    assert len(site.journalled()) == len({*site.journalled()}) == 10
    wait_for(lambda: not items(site.client), 'the acks')
    assert 'Traceback' not in worker.logs()


@pytest.mark.parametrize('pool', ['prefork', 'threads', 'solo', 'gevent'])
def test_no_task_begins_after_a_worker_was_told_to_stop(site: Site, pool: str) -> None:
    if pool == 'gevent' and importlib.util.find_spec(pool) is None:
        pytest.skip(f'{pool} is not installed')
    first = site.worker(pool=pool, concurrency=1, worker_prefetch_multiplier=8)
    results = [site.send('nap', str(site.journal), str(number), None if number == 0 else 0) for number in range(8)]
    wait_for(site.journalled, 'the first task to start')
    first.kill('SIGTERM')
    wait_for(lambda: 'Warm shutdown' in first.logs(), 'the worker to begin its shutdown')
    site.go_on()
    assert first.container.wait() == 0
    assert 'Traceback' not in first.logs()
    assert site.journalled() == ['start 0', 'end 0']
    assert waiting(site) == [0] * 7
    site.worker()
    assert [result.get(timeout=PATIENCE) for result in results] == [str(number) for number in range(8)]
    assert Counter(site.journalled()) == Counter(f'{what} {number}' for what in ('start', 'end') for number in range(8))


@pytest.mark.parametrize('size', [1, 1_000_000], ids=['complete', 'in part'])
@pytest.mark.parametrize('task', ['nap', 'late_nap'])
def test_job_that_a_busy_pool_process_has_received_runs_once(site: Site, task: str, size: int) -> None:
    worker, journal = site.worker(pool='prefork', concurrency=1), str(site.journal)
    first = site.send('process', journal)
    wait_for(site.journalled, 'the process to start')
    child = int(site.journalled()[0].split()[1])
    site.go_on()
    first.get(timeout=PATIENCE)
    inspect = site.app.control.inspect([worker.hostname()], timeout=PATIENCE, limit=1)
    wait_for(lambda: inspect.active() == {worker.hostname(): []}, 'the process to be free')
    os.kill(child, signal.SIGSTOP)
    results = [site.send(task, journal, name, 0) for name in ('x' * size, 'next')]
    await_received(site, 3)
    for _ in range(2):  # the event loop writes the job to the process before it replies for the second time
        assert site.app.control.ping([worker.hostname()], timeout=PATIENCE, limit=1)
    worker.kill('SIGTERM')
    wait_for(lambda: waiting(site) == [0], 'the release of the next task')
    os.kill(child, signal.SIGCONT)
    assert worker.container.wait() == 0
    assert 'could not ensure all messages were consumed' not in worker.logs()  # the process waits for 30 s before
    assert waiting(site) == [0]
    site.worker()
    assert [len(result.get(timeout=PATIENCE)) for result in results] == [size, 4]
    assert Counter(map(len, site.journalled()[2:])) == Counter([6 + size, 4 + size, 10, 8])  # each start and end once
    wait_for(lambda: not items(site.client), 'the acks')


@pytest.mark.parametrize('pool', ['threads', 'prefork'])
def test_worker_that_was_paused_skips_tasks_that_it_has_lost(site: Site, pool: str) -> None:
    settings = {'worker_prefetch_multiplier': 4, 'broker_transport_options': SHORT_LEASE}
    worker, journal = site.worker(pool=pool, concurrency=1, **settings), str(site.journal)
    site.send('nap', journal, 'long', None)
    wait_for(site.journalled, 'the long task to start')
    results = [site.send(task, journal, task, 0) for task in ('nap', 'late_nap')]
    await_received(site, 3)
    worker.kill('SIGSTOP')
    site.worker(**settings)
    assert [result.get(timeout=PATIENCE) for result in results] == ['nap', 'late_nap']
    worker.kill('SIGCONT')
    site.go_on()
    wait_for(lambda: worker.logs().count(' is not started here') == 2, 'the worker to skip the tasks')
    assert site.send('nap', journal, 'last', 0).get(timeout=PATIENCE) == 'last'
    assert worker.container.terminate() == 0
    assert len(site.journalled()) == len({*site.journalled()}) == 8
    assert 'Traceback' not in worker.logs()
