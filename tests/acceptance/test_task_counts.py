"""What workers with real pools count of their tasks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from tests.conftest import PATIENCE, wait_for

from .conftest import Site

POOLS = ['prefork', 'threads', 'gevent', 'eventlet', 'solo']


def last_counts(site: Site) -> dict[str, Any]:
    """Stop the worker, and return what the deletion of its heartbeat says."""
    consumers = [row['id'] for row in site.client.id_range('broker:consumer:')]
    assert site.workers[0].container.terminate() == 0
    found = [leaf['tasks'] for consumer in consumers for leaf in site.client.leaves(consumer) if 'tasks' in leaf]
    [tasks] = found
    return dict(tasks['counts'])


def outcomes(counts: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {
        task: {name: count for name, count in found.items() if isinstance(count, int)} for task, found in counts.items()
    }


@pytest.mark.parametrize('pool', POOLS)
def test_outcomes_of_tasks(site: Site, pool: str) -> None:
    if pool in ('gevent', 'eventlet') and importlib.util.find_spec(pool) is None:
        pytest.skip(f'{pool} is not installed')
    late = site.send('now', expires=-1, group_id='group')  # such tasks are delivered, and revoked
    results = [site.send('add', number, 1) for number in range(3)]
    results += [site.send('fail', 'text'), site.send('flaky', 2, 0.1), site.send('nap', str(site.journal), 'a', 0.2)]
    refused = site.send('refused', str(site.journal), 'b')
    site.worker(pool=pool)
    for result in [*results, refused]:
        result.get(timeout=PATIENCE, propagate=False)
    with pytest.raises(TaskRevokedError):
        late.get(timeout=PATIENCE)
    counts = last_counts(site)
    assert outcomes(counts) == {
        'add': {'succeeded': 3},
        'fail': {'failed': 1},
        'flaky': {'succeeded': 1, 'retried': 2},
        'nap': {'succeeded': 1},
        'refused': {'rejected': 1},
        'now': {'revoked': 1},
    }
    assert 0.2 <= counts['nap']['run']['sum'] < PATIENCE
    assert sum(count for bound, count in counts['flaky']['waited'].items() if bound != 'sum') == 3
    assert 'run' not in counts['now']


def test_outcomes_of_tasks_whose_process_ends(site: Site) -> None:
    """It is killed, stopped by a time limit, or terminated."""
    worker = site.worker(pool='prefork', concurrency=2)
    site.send('deadly', str(site.journal))
    limited = site.send('nap', str(site.journal), 'long', 3600, time_limit=1)
    limited.get(timeout=PATIENCE, propagate=False)
    wait_for(lambda: site.journalled().count('deadly') >= 2, 'the message to be delivered again')
    ended = site.send('late_nap', str(site.journal), 'ended', 3600)
    wait_for(lambda: 'start ended' in site.journalled(), 'the task to start')
    site.app.control.revoke(ended.id, terminate=True, destination=[worker.hostname()])
    with pytest.raises(TaskRevokedError):
        ended.get(timeout=PATIENCE)
    found = outcomes(last_counts(site))
    assert (found['nap'], found['late_nap']) == ({'failed': 1}, {'revoked': 1})
    assert found['deadly'].keys() == {'rejected'}
