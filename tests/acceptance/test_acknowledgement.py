"""Tasks of killed processes, with early and late acknowledgement: the table in `docs/start/tutorial.rst`."""

from __future__ import annotations

import os
import signal
import sys
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
