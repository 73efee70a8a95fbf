"""Workers that stop or are killed: other workers run their remaining tasks."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

LEASE = {'broker_transport_options': SHORT_LEASE}


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
