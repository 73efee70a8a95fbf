"""Tasks of processes that are killed or stopped: the table in `docs/start/tutorial.rst`."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError

from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

EARLY: dict[str, Any] = {}
LATE = {'task_acks_late': True}
SAFE = {'task_acks_late': True, 'task_reject_on_worker_lost': True}


def start(site: Site, settings: dict[str, Any]) -> Any:
    return site.worker(
        pool='prefork', concurrency=1, worker_prefetch_multiplier=1, broker_transport_options=SHORT_LEASE, **settings
    )


def begin(site: Site, settings: dict[str, Any]) -> tuple[Any, Any, int, int]:
    """Start a worker and a task; return worker, result, and the ids of the task's process and its parent."""
    worker = start(site, settings)
    result = site.send('process', str(site.journal))
    [line] = wait_for(site.journalled, 'the task to start')
    if not settings:
        wait_for(lambda: not items(site.client), 'the ack')
    process, parent = map(int, line.split())
    return worker, result, process, parent


@pytest.mark.parametrize(
    ('settings', 'again'), [(EARLY, False), (LATE, True), (SAFE, True)], ids=['early', 'late', 'safe']
)
def test_whole_worker_killed(site: Site, settings: dict[str, Any], again: bool) -> None:
    worker, result, *_ = begin(site, settings)
    waiting = site.send('add', 1, 2)
    worker.kill()
    start(site, settings)
    assert waiting.get(timeout=PATIENCE) == 3  # tasks that had not started run in any case
    if again:
        wait_for(lambda: len(site.journalled()) == 2, 'the second run')
        site.go_on()
        assert result.get(timeout=PATIENCE) == 'done'
    else:
        wait_for(lambda: not items(site.client), 'the ack')
        assert (len(site.journalled()), result.state) == (1, 'PENDING')


@pytest.mark.skipif(sys.platform != 'linux', reason='only on Linux do children end with their parent')
def test_main_process_killed(site: Site) -> None:
    """The pool processes end with the main process, so that the task does not run twice at the same time."""
    _, result, process, parent = begin(site, SAFE)
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: not Path('/proc', str(process)).exists(), 'the pool process to end')
    start(site, SAFE)
    wait_for(lambda: len(site.journalled()) == 2, 'the second run')
    site.go_on()
    assert result.get(timeout=PATIENCE) == 'done'
    assert site.journalled()[2:] == ['end']


@pytest.mark.parametrize(
    ('settings', 'again'), [(EARLY, False), (LATE, False), (SAFE, True)], ids=['early', 'late', 'safe']
)
def test_pool_process_killed(site: Site, settings: dict[str, Any], again: bool) -> None:
    _, result, process, _ = begin(site, settings)
    os.kill(process, signal.SIGKILL)
    if again:
        wait_for(lambda: len(site.journalled()) == 2, 'the second run')
        site.go_on()
        assert result.get(timeout=PATIENCE) == 'done'
    else:
        with pytest.raises(WorkerLostError):
            result.get(timeout=PATIENCE)
        assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
        wait_for(lambda: not items(site.client), 'the ack')
        assert len(site.journalled()) == 1


@pytest.mark.parametrize('pool', ['prefork', 'threads', 'solo'])
def test_warm_shutdown_releases_tasks_that_have_not_started(site: Site, pool: str) -> None:
    first = site.worker(pool=pool, concurrency=1)
    results = [site.send('nap', str(site.journal), str(number), None if number == 0 else 0) for number in range(8)]
    wait_for(site.journalled, 'the first task to start')
    first.kill('SIGTERM')
    wait_for(lambda: 'Warm shutdown' in first.logs(), 'the worker to begin its shutdown')
    site.go_on()
    assert first.container.wait(PATIENCE) == 0
    done = sum(line.startswith('end') for line in site.journalled())
    waiting = items(site.client)
    assert len(waiting) == 8 - done
    assert 0 < done < 8
    assert not any(item['claimed'] or item['attempts'] for item in waiting)
    site.worker()
    assert [result.get(timeout=PATIENCE) for result in results] == [str(number) for number in range(8)]
    assert Counter(site.journalled()) == Counter(f'{what} {number}' for what in ('start', 'end') for number in range(8))


def test_task_may_run_longer_than_the_lease(site: Site) -> None:
    for _ in range(2):
        site.start(
            broker_transport_options={'visibility_timeout': 8.0}
        )  # long enough to keep the lease on a busy machine
    result = site.send('late_nap', str(site.journal), 'long', 15)
    assert result.get(timeout=PATIENCE) == 'long'
    assert site.journalled() == ['start long', 'end long']
