"""Concurrency limits with real workers: never more tasks of a key at the same time than its limit, whoever is killed.

`CONCURRENCY_TASKS` sets how many tasks the test with kills sends.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from functools import partial
from typing import Any

import pytest

from celery_couchdb.limits import LimitedTask
from celery_couchdb.unique import UniqueTask
from kombu_couchdb.errors import ConfigurationError
from tests.conftest import SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

TASKS = int(os.environ.get('CONCURRENCY_TASKS', '100'))
LIMIT = 2


def key_of(journal: str, key: str, *others: Any) -> str:
    return key


def task_of(site: Site, **options: Any) -> Any:
    options = {'name': 'limited', 'base': LimitedTask, 'concurrency_key': key_of, 'concurrency_limit': LIMIT, **options}

    @site.app.task(shared=False, **options)
    def limited(journal: str, key: str, name: str, seconds: float | None) -> None: ...

    return limited


def most_at_once(lines: list[str], killed: dict[int, float]) -> dict[str, int]:
    """Return for each key how many runs overlapped at most. A run without an end ended when its process was killed."""
    runs: dict[str, list[tuple[float, int]]] = defaultdict(list)
    begun: dict[tuple[str, str, int], float] = {}
    for what, key, name, process, time_ in map(str.split, lines):
        run, at = (key, name, int(process)), float(time_)
        if what == 'start':
            assert run not in begun
            begun[run] = at
        else:
            runs[key] += [(begun.pop(run), 1), (at, -1)]
    for (key, _, pid), at in begun.items():
        runs[key] += [(at, 1), (killed[pid], -1)]
    found = {}
    for key, changes in runs.items():
        running = found[key] = 0
        for _, change in sorted(changes):
            running += change
            found[key] = max(found[key], running)
    return found


def test_no_key_exceeds_its_limit_while_workers_are_killed(site: Site) -> None:
    limited = task_of(site)
    keys = max(2, TASKS // 20)
    settings = {'broker_transport_options': SHORT_LEASE, 'worker_prefetch_multiplier': 2}
    for number in range(TASKS):
        limited.apply_async((str(site.journal), f'k{number % keys}', str(number), 0.05))
    living = [site.start(pool='threads', concurrency=4, **settings) for _ in range(4)]
    killed: dict[int, float] = {}

    def done() -> set[str]:
        return {line.split()[2] for line in site.journalled() if line.startswith('end')}

    def has_done(count: int) -> bool:
        return len(done()) >= count

    kills = 5
    for number in range(kills):
        wait_for(partial(has_done, TASKS * (number + 1) // (kills + 2)), 'tasks to run')
        victim = living.pop(random.randrange(len(living)))
        victim.kill()
        killed[victim.container.pid] = time.time()
        living.append(site.start(pool='threads', concurrency=4, **settings))
    names = wait_for(lambda: len(done()) == TASKS and done(), 'all tasks to run')
    assert names == {str(number) for number in range(TASKS)}
    wait_for(lambda: not items(site.client), 'the messages to be acknowledged')
    wait_for(lambda: not site.client.id_range('slot:'), 'the slots to be freed')
    found = most_at_once(site.journalled(), killed)
    print(f'{TASKS} tasks of {keys} keys, {kills} kills: at most {max(found.values())} at once')
    assert found.keys() == {f'k{number}' for number in range(keys)}
    assert max(found.values()) <= LIMIT


@pytest.mark.parametrize('how', ['warm', 'cold'])
def test_shutdown(site: Site, how: str) -> None:
    """At a warm shutdown the slots are free at once; at a cold one when the lease of the worker has ended."""
    limited = task_of(site)
    options = {'broker_transport_options': SHORT_LEASE}
    worker = site.worker('--prefetch-multiplier', '4', pool='prefork', concurrency=2, **options)
    for number in range(6):
        limited.delay(str(site.journal), 'k', str(number), None)
    wait_for(lambda: len(site.journalled()) == 2, 'two tasks to start')
    pids = {int(line.split()[3]) for line in site.journalled()}
    worker.kill('SIGTERM' if how == 'warm' else 'SIGQUIT')
    if how == 'warm':
        site.go_on()
    worker.container.wait()
    killed = dict.fromkeys(pids, time.time())
    site.go_on()
    site.worker(concurrency=4, **options)
    wait_for(lambda: not items(site.client), 'all tasks to run')
    wait_for(lambda: not site.client.id_range('slot:'), 'the slots to be freed')
    assert most_at_once(site.journalled(), killed)['k'] == LIMIT


def test_options_of_the_task(site: Site) -> None:
    arguments = (str(site.journal), 'k', 'name', 0)
    with pytest.raises(ConfigurationError, match='needs a concurrency_limit'):
        task_of(site, name='one', concurrency_limit=None).apply_async(arguments)
    with pytest.raises(ConfigurationError, match='needs acks_late=True'):
        task_of(site, name='two', acks_late=False).apply_async(arguments)
    with pytest.raises(ConfigurationError, match='must be text of 1 to 500 characters'):
        task_of(site, name='three', concurrency_key=lambda *args: 7).apply_async(arguments)
    task_of(site, name='four', concurrency_key=lambda *args: None).apply_async(arguments)
    task_of(site, name='five', concurrency_key='fixed').apply_async(arguments, concurrency_limit=5)
    task_of(site, name='six').apply_async(arguments, concurrency_key='given')

    class Both(LimitedTask, UniqueTask):
        abstract = True

    assert task_of(site, name='seven', base=Both).apply_async(arguments, job_key='j').outcome == 'enqueued'
    headers = [doc['message']['headers'] for doc in sorted(items(site.client), key=lambda doc: doc['published'])]
    assert [(each.get('concurrency_key'), each.get('concurrency_limit')) for each in headers] == [
        (None, None),
        ('fixed', 5),
        ('given', 2),
        ('k', 2),
    ]
