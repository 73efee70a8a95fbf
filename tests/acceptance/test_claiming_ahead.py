"""A worker that claims ahead: every task runs once, and what it claimed too early runs elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site


@pytest.mark.parametrize('pool', ['prefork', 'threads'])
def test_tasks_behind_quick_ones_are_given_back_when_the_worker_is_busy(site: Site, pool: str) -> None:
    quick = [site.send('nap', str(site.journal), f'quick {number}', 0) for number in range(150)]
    slow = [site.send('late_nap', str(site.journal), f'slow {number}', None) for number in range(2)]
    behind = [site.send('nap', str(site.journal), f'behind {number}', 0) for number in range(10)]
    site.worker(pool=pool, concurrency=2, worker_prefetch_multiplier=1)
    assert [result.get(timeout=PATIENCE) for result in quick] == [f'quick {number}' for number in range(150)]
    # Both processes are busy. Whatever the worker had claimed ahead returns to the queue, without an attempt.
    wait_for(lambda: sum(line.startswith('start slow') for line in site.journalled()) == 2, 'the slow tasks to start')
    wait_for(
        lambda: [item['attempts'] for item in items(site.client) if not item['claimed']] == [0] * 10,
        'the tasks behind them to wait in the queue',
    )
    site.worker(pool=pool)
    assert [result.get(timeout=PATIENCE) for result in behind] == [f'behind {number}' for number in range(10)]
    site.go_on()
    assert [result.get(timeout=PATIENCE) for result in slow] == ['slow 0', 'slow 1']
    assert set(Counter(site.journalled()).values()) == {1}
