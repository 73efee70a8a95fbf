"""Tasks of processes that are killed or stopped: the table in `docs/explanation/lost.rst`."""

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

#: The tasks that write their process ids to the journal, and how they are acknowledged.
TASKS = ('process', 'late_process', 'safe_process')


def start(site: Site) -> Any:
    """Start a worker with a process for each task."""
    return site.worker(
        pool='prefork', concurrency=3, worker_prefetch_multiplier=1, broker_transport_options=SHORT_LEASE
    )


def begin(site: Site) -> tuple[dict[str, Any], dict[str, int]]:
    """Start a worker and the tasks, and return their results and their processes by name."""
    start(site)
    results = {name: site.send(name, str(site.journal)) for name in TASKS}
    wait_for(lambda: len(site.journalled()) == 3, 'the tasks to start')
    wait_for(lambda: len(items(site.client)) == 2, 'the early ack')
    return results, {name: int(process) for name, process in map(str.split, site.journalled())}


def runs(site: Site) -> Counter[str]:
    """Return how often each task has started."""
    return Counter(line.split()[0] for line in site.journalled() if line != 'end')


def test_worker_killed(site: Site) -> None:
    """Where the pool ends with the main process, that alone is killed: no task runs twice at the same time."""
    results, processes = begin(site)
    waiting = site.send('add', 1, 2)
    if sys.platform == 'linux':
        os.kill(site.workers[0].container.pid, signal.SIGKILL)
        wait_for(lambda: not any(Path('/proc', str(process)).exists() for process in processes.values()), 'the end')
    else:
        site.workers[0].kill()
    start(site)
    assert waiting.get(timeout=PATIENCE) == 3  # tasks that had not started run in any case
    wait_for(lambda: len(site.journalled()) == 5, 'the second runs')
    site.go_on()
    assert [results[name].get(timeout=PATIENCE) for name in TASKS[1:]] == ['done', 'done']
    wait_for(lambda: not items(site.client), 'the acks')
    assert runs(site) == {'process': 1, 'late_process': 2, 'safe_process': 2}
    assert results['process'].state == 'PENDING'


def test_pool_processes_killed(site: Site) -> None:
    results, processes = begin(site)
    for process in processes.values():
        os.kill(process, signal.SIGKILL)
    for name in TASKS[:2]:
        with pytest.raises(WorkerLostError):
            results[name].get(timeout=PATIENCE)
    wait_for(lambda: len(site.journalled()) == 4, 'the second run')
    site.go_on()
    assert results['safe_process'].get(timeout=PATIENCE) == 'done'
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    wait_for(lambda: sorted(doc.get('status', '') for doc in items(site.client)) == ['fail', 'fail'], 'the acks')
    assert runs(site) == {'process': 1, 'late_process': 1, 'safe_process': 2}
