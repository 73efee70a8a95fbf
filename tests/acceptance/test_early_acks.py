"""Tasks that are acknowledged early, when they begin: how many run again after their worker was killed.

The bounds do not depend on speed: at most twice as many tasks as the prefetch count, here the size of the pool, have
begun before their acks are stored, and nothing begins while acks cannot be stored.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest

from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

#: How many tasks are sent, how many of them have begun when the worker is killed, and the size of its pool.
TASKS, BEGUN, POOL = 60, 12, 2


@pytest.fixture
def proxy(site: Site, proxy: Proxy) -> Proxy:
    """A proxy between the workers and the server; the test itself uses none."""
    site.reroute(proxy, *site.environment)
    return proxy


def start(site: Site, pool: str, **options: Any) -> Any:
    if pool == 'gevent' and importlib.util.find_spec(pool) is None:
        pytest.skip('gevent is not installed')
    transport_options = {**SHORT_LEASE, **options}
    return site.worker(
        pool=pool, concurrency=POOL, worker_prefetch_multiplier=1, broker_transport_options=transport_options
    )


def runs(site: Site) -> Counter[str]:
    """Return how often each task has begun."""
    return Counter(line for line in site.journalled() if line.startswith('start'))


def run_with_a_kill(site: Site, proxy: Proxy, pool: str, *, in_outage: bool, **options: Any) -> Counter[str]:
    """Kill a worker that works off a burst, let another one go on, and return how often each task has begun.

    The message of a task may be gone before the task has begun: the other worker stops when all of them have ended.
    """
    worker = start(site, pool, **options)
    for number in range(TASKS):
        site.send('nap', str(site.journal), str(number), 0.01)
    wait_for(lambda: len(runs(site)) >= BEGUN, 'the tasks to begin')
    if in_outage:
        proxy.hang()
        wait_for(lambda: 'trying again until it responds' in worker.logs(), 'the outage to be noticed')
    worker.kill()
    proxy.go_on()
    other = start(site, pool, **options)
    wait_for(lambda: not items(site.client), 'all tasks to be acknowledged')
    other.container.terminate()
    return runs(site)


@pytest.mark.parametrize('in_outage', [False, True], ids=['at work', 'in an outage'])
@pytest.mark.slow
def test_few_tasks_run_again(site: Site, proxy: Proxy, in_outage: bool) -> None:
    found = run_with_a_kill(site, proxy, 'prefork', in_outage=in_outage)
    assert len(found) == TASKS
    assert sum(found.values()) - TASKS <= 2 * POOL


@pytest.mark.parametrize(
    ('pool', 'in_outage'),
    [('prefork', False), ('prefork', True), ('threads', False), ('solo', True), ('gevent', True)],
)
@pytest.mark.slow
def test_no_task_runs_again_with_confirm_acks(site: Site, proxy: Proxy, pool: str, in_outage: bool) -> None:
    """A task whose ack was stored and that had not begun is lost."""
    found = run_with_a_kill(site, proxy, pool, in_outage=in_outage, confirm_acks=True)
    assert max(found.values()) == 1
    assert TASKS - len(found) <= POOL


@pytest.mark.parametrize(
    ('pool', 'confirm'), [('prefork', False), ('prefork', True), ('threads', False), ('solo', True), ('gevent', False)]
)
def test_task_that_waits_for_couchdb_begins_later(site: Site, proxy: Proxy, pool: str, confirm: bool) -> None:
    worker = start(site, pool, confirm_acks=confirm)
    results = [site.send('nap', str(site.journal), str(number), 0.0) for number in range(4)]
    proxy.refuse()
    wait_for(lambda: 'trying again until it responds' in worker.logs(), 'the outage to be noticed')
    proxy.restore()
    assert [result.get(timeout=PATIENCE) for result in results] == ['0', '1', '2', '3']
    wait_for(lambda: not items(site.client), 'the acks')
    assert max(runs(site).values()) == 1
