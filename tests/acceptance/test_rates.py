"""Rates with real workers: at most so many tasks of a key start in a period, over all workers, also after a kill."""

from __future__ import annotations

from typing import Any

import pytest

from celery_couchdb.limits import LimitedTask
from kombu_couchdb.errors import ConfigurationError
from tests.conftest import SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

TASKS, RATE = 40, 10


def task_of(site: Site, **options: Any) -> Any:
    """Return the workers' task `limited`, which writes its key and the time of its start to the journal."""

    @site.app.task(shared=False, **{'name': 'limited', 'base': LimitedTask, 'rate': f'{RATE}/s', **options})
    def limited(journal: str, key: str, name: str, seconds: float | None) -> None: ...

    return limited


def starts(site: Site) -> list[float]:
    """Return the times at which tasks started, sorted."""
    return sorted(float(line.split()[4]) for line in site.journalled() if line.startswith('start'))


def test_two_workers_keep_the_rate_and_one_is_killed(site: Site) -> None:
    limited = task_of(site)
    settings = {'broker_transport_options': SHORT_LEASE}
    workers = [site.worker(concurrency=8, **settings) for _ in range(2)]
    for number in range(TASKS):
        limited.delay(str(site.journal), 'k', str(number), 0.0)
    wait_for(lambda: len(starts(site)) >= TASKS // 3, 'a third of the tasks to start')
    workers[0].kill()

    def done() -> set[str]:
        return {line.split()[2] for line in site.journalled() if line.startswith('end')}

    wait_for(lambda: len(done()) == TASKS, 'all tasks to run')
    wait_for(lambda: not items(site.client), 'the messages to be acknowledged')
    found = starts(site)
    spans = [late - early for early, late in zip(found, found[RATE:], strict=False)]
    taken = site.client.get('rate:limited')['next'] - found[0]
    print(f'{len(found)} starts in {found[-1] - found[0]:.2f} s; any {RATE + 1} in {min(spans):.2f} s or more')
    # A worker starts a task a while after it has taken the start. If it is slower for the first of some tasks than for
    # the last, they are closer together than their starts were taken: on a busy machine by tenths of a second.
    assert min(spans) > 0.5
    # What does not depend on that: how many starts were taken since the first task began, which was after its start.
    assert taken >= (len(found) - 1) * (1.1 / RATE) - 1.0
    # The average of all tasks: only the first and the last of them can be late or early.
    assert found[-1] - found[0] >= (len(found) - 1) * (1 / RATE) - 1.0


def test_options_of_the_task(site: Site) -> None:
    arguments = (str(site.journal), 'key', 'name', 0)
    with pytest.raises(ConfigurationError, match='must be a rate from one a day to 1,000 a second'):
        task_of(site, name='one', rate='10 per minute').apply_async(arguments)
    with pytest.raises(ConfigurationError, match='has a rate_key and needs a rate'):
        task_of(site, name='two', rate=None).apply_async(arguments, rate_key='k')
    with pytest.raises(ConfigurationError, match='rate_key must be text'):
        task_of(site, name='three', rate_key=lambda *args: 7).apply_async(arguments)
    task_of(site, name='four', rate=None).apply_async(arguments)
    task_of(site, name='five', acks_late=False).apply_async(arguments)
    task_of(site, name='six').apply_async(arguments, rate=0.5, rate_key='given')
    task_of(site, name='seven', rate_key=lambda journal, key, *args: f'for {key}').apply_async(arguments)
    task_of(site, name='eight', concurrency_key='c', concurrency_limit=2).apply_async(arguments)
    headers = [doc['message']['headers'] for doc in sorted(items(site.client), key=lambda doc: doc['published'])]
    assert [(each.get('rate_key'), each.get('rate')) for each in headers] == [
        (None, None),
        ('five', '10/s'),
        ('given', 0.5),
        ('for key', '10/s'),
        ('c', '10/s'),
    ]
