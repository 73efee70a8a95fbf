"""Limits with real workers: of concurrency, of rates, and for retries, also if workers are killed."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import Any

import pytest

from celery_couchdb.jobs import Jobs
from celery_couchdb.limits import LimitedTask
from celery_couchdb.unique import UniqueTask
from kombu_couchdb.errors import ConfigurationError
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

#: How many tasks the tests send, and the limits of their keys.
TASKS, RATED_TASKS, LIMIT, RATE = 100, 40, 2, 10


def key_of(journal: str, key: str, *others: Any) -> str:
    return key


def task_of(site: Site, **options: Any) -> Any:
    """Return the workers' task `limited`, which writes its key and the time of its start to the journal."""

    @site.app.task(shared=False, **{'name': 'limited', 'base': LimitedTask, **options})
    def limited(journal: str, key: str, name: str, seconds: float | None) -> None: ...

    return limited


def concurrency_limited(site: Site, **options: Any) -> Any:
    return task_of(site, **{'concurrency_key': key_of, 'concurrency_limit': LIMIT, **options})


def rated(site: Site, **options: Any) -> Any:
    return task_of(site, **{'rate': f'{RATE}/s', **options})


def ended(site: Site) -> set[str]:
    """Return the names of the tasks that have ended."""
    return {line.split()[2] for line in site.journalled() if line.startswith('end')}


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
    limited = concurrency_limited(site)
    keys = 5
    settings = {'broker_transport_options': SHORT_LEASE, 'worker_prefetch_multiplier': 2}
    for number in range(TASKS):
        limited.apply_async((str(site.journal), f'k{number % keys}', str(number), 0.05))
    living = [site.start(pool='threads', concurrency=4, **settings) for _ in range(4)]
    killed: dict[int, float] = {}

    kills = 5
    for number in range(kills):
        wait_for(lambda number=number: len(ended(site)) >= TASKS * (number + 1) // (kills + 2), 'tasks to run')  # type: ignore[misc]
        victim = living.pop(random.randrange(len(living)))
        victim.kill()
        killed[victim.container.pid] = time.time()
        living.append(site.start(pool='threads', concurrency=4, **settings))
    wait_for(lambda: len(ended(site)) == TASKS, 'all tasks to run')
    assert ended(site) == {str(number) for number in range(TASKS)}
    wait_for(lambda: not items(site.client), 'the messages to be acknowledged')
    wait_for(lambda: not site.client.id_range('slot:'), 'the slots to be freed')
    found = most_at_once(site.journalled(), killed)
    assert found.keys() == {f'k{number}' for number in range(keys)}
    assert max(found.values()) <= LIMIT


def test_options_of_a_task_with_a_concurrency_limit(site: Site) -> None:
    arguments = (str(site.journal), 'k', 'name', 0)
    with pytest.raises(ConfigurationError, match='needs a concurrency_limit'):
        concurrency_limited(site, name='one', concurrency_limit=None).apply_async(arguments)
    with pytest.raises(ConfigurationError, match='needs acks_late=True'):
        concurrency_limited(site, name='two', acks_late=False).apply_async(arguments)
    with pytest.raises(ConfigurationError, match='must be text of 1 to 500 characters'):
        concurrency_limited(site, name='three', concurrency_key=lambda *args: 7).apply_async(arguments)
    concurrency_limited(site, name='four', concurrency_key=lambda *args: None).apply_async(arguments)
    concurrency_limited(site, name='five', concurrency_key='fixed').apply_async(arguments, concurrency_limit=5)
    concurrency_limited(site, name='six').apply_async(arguments, concurrency_key='given')

    class Both(LimitedTask, UniqueTask):
        abstract = True

    assert concurrency_limited(site, name='seven', base=Both).apply_async(arguments, job_key='j').outcome == 'enqueued'
    headers = [doc['message']['headers'] for doc in sorted(items(site.client), key=lambda doc: doc['published'])]
    assert [(each.get('concurrency_key'), each.get('concurrency_limit')) for each in headers] == [
        (None, None),
        ('fixed', 5),
        ('given', 2),
        ('k', 2),
    ]


def starts(site: Site) -> list[float]:
    """Return the times at which tasks started, sorted."""
    return sorted(float(line.split()[4]) for line in site.journalled() if line.startswith('start'))


def test_two_workers_keep_the_rate_and_one_is_killed(site: Site) -> None:
    limited = rated(site)
    settings = {'broker_transport_options': SHORT_LEASE}
    workers = [site.worker(concurrency=8, **settings) for _ in range(2)]
    for number in range(RATED_TASKS):
        limited.delay(str(site.journal), 'k', str(number), 0.0)
    wait_for(lambda: len(starts(site)) >= RATED_TASKS // 3, 'a third of the tasks to start')
    workers[0].kill()

    wait_for(lambda: len(ended(site)) == RATED_TASKS, 'all tasks to run')
    wait_for(lambda: not items(site.client), 'the messages to be acknowledged')
    found = starts(site)
    spans = [late - early for early, late in zip(found, found[RATE:], strict=False)]
    taken = site.client.get('rate:limited')['next'] - found[0]
    # A worker starts a task a while after it has taken the start. If it is slower for the first of some tasks than for
    # the last, they are closer together than their starts were taken: on a busy machine by tenths of a second.
    assert min(spans) > 0.5
    # What does not depend on that: how many starts were taken since the first task began, which was after its start.
    assert taken >= (len(found) - 1) * (1.1 / RATE) - 1.0
    # The average of all tasks: only the first and the last of them can be late or early.
    assert found[-1] - found[0] >= (len(found) - 1) * (1 / RATE) - 1.0


def test_options_of_a_task_with_a_rate(site: Site) -> None:
    arguments = (str(site.journal), 'key', 'name', 0)
    with pytest.raises(ConfigurationError, match='must be a rate from one a day to 1,000 a second'):
        rated(site, name='one', rate='10 per minute').apply_async(arguments)
    with pytest.raises(ConfigurationError, match='has a rate_key and needs a rate'):
        rated(site, name='two', rate=None).apply_async(arguments, rate_key='k')
    with pytest.raises(ConfigurationError, match='rate_key must be text'):
        rated(site, name='three', rate_key=lambda *args: 7).apply_async(arguments)
    rated(site, name='four', rate=None).apply_async(arguments)
    rated(site, name='five', acks_late=False).apply_async(arguments)
    rated(site, name='six').apply_async(arguments, rate=0.5, rate_key='given')
    rated(site, name='seven', rate_key=lambda journal, key, *args: f'for {key}').apply_async(arguments)
    rated(site, name='eight', concurrency_key='c', concurrency_limit=2).apply_async(arguments)
    headers = [doc['message']['headers'] for doc in sorted(items(site.client), key=lambda doc: doc['published'])]
    assert [(each.get('rate_key'), each.get('rate')) for each in headers] == [
        (None, None),
        ('five', '10/s'),
        ('given', 0.5),
        ('for key', '10/s'),
        ('c', '10/s'),
    ]


@pytest.fixture
def again(site: Site) -> Any:
    @site.app.task(shared=False, name='again', base=LimitedTask)
    def again(journal: str, name: str, seconds: float | None, countdown: float | None) -> None: ...

    return again


def item(site: Site, task_id: str) -> dict[str, Any]:
    """Return the message of a task: the latest, because a retry is sent before the first message is acknowledged."""
    found = [doc for doc in items(site.client) if doc['message']['headers']['id'] == task_id]
    return max(found, key=lambda doc: float(doc['published']))


def test_slot_is_free_while_a_retry_waits(site: Site, again: Any) -> None:
    """The retry waits for an hour, or until it is moved. Then it needs a slot again."""
    limit = {'concurrency_key': 'k', 'concurrency_limit': 1}
    site.worker(concurrency=4)
    first = again.apply_async((str(site.journal), 'first', 0.0, 3600.0), **limit)
    wait_for(lambda: item(site, first.id)['date'], 'the first attempt to be retried')
    wait_for(lambda: not site.client.id_range('slot:'), 'the slot to be free')
    second = again.apply_async((str(site.journal), 'second', None, None), **limit)
    wait_for(lambda: 'start second' in site.journalled(), 'the other task to get the slot')
    assert item(site, first.id)['message']['headers'].items() >= limit.items()
    Jobs(site.app).move(first.id, countdown=0)
    wait_for(lambda: item(site, first.id).get('parked', {}).get('key') == 'k', 'the retry to wait for the slot')
    assert site.journalled() == ['start first', 'start second']
    site.go_on()
    assert [first.get(timeout=PATIENCE), second.get(timeout=PATIENCE)] == ['first', 'second']
    assert site.journalled() == ['start first', 'start second', 'end second', 'start first', 'end first']
    wait_for(lambda: not items(site.client) and not site.client.id_range('slot:'))


def test_retry_takes_another_start(site: Site, again: Any) -> None:
    site.worker(broker_transport_options=SHORT_LEASE)
    result = again.apply_async((str(site.journal), 'task', 0.0, 0.0), rate='5/h', rate_key='k')
    wait_for(lambda: item(site, result.id).get('parked'), 'the retry to wait for a start')
    assert item(site, result.id)['parked']['key'] == 'rate:celery:k'
    assert site.journalled() == ['start task']
    now = site.client.clock.now()
    first = site.client.get('rate:k')
    assert 600 < first['next'] - now < 800
    site.client.put({**first, 'next': now, 'by': 'broker:consumer:other'})  # as if the time had passed
    site.worker(broker_transport_options=SHORT_LEASE)
    assert result.get(timeout=PATIENCE) == 'task'
    assert site.journalled() == ['start task', 'start task', 'end task']
    assert 600 < site.client.get('rate:k')['next'] - now < 800
    wait_for(lambda: not items(site.client))
