"""The options of limited tasks, and a limit of concurrency with a real worker and a retry."""

from __future__ import annotations

from typing import Any

import pytest

from celery_couchdb.jobs import Jobs
from celery_couchdb.limits import LimitedTask
from celery_couchdb.unique import UniqueTask
from kombu_couchdb.errors import ConfigurationError
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site


def key_of(journal: str, key: str, *others: Any) -> str:
    return key


def task_of(site: Site, **options: Any) -> Any:
    """Return a limited task of this process alone."""

    @site.app.task(shared=False, **{'base': LimitedTask, **options})
    def limited(journal: str, key: str, name: str, seconds: float | None) -> None: ...

    return limited


def concurrency_limited(site: Site, **options: Any) -> Any:
    return task_of(site, **{'concurrency_key': key_of, 'concurrency_limit': 2, **options})


def rated(site: Site, **options: Any) -> Any:
    return task_of(site, **{'rate': '10/s', **options})


def headers_of_waiting(site: Site, *names: str) -> list[tuple[Any, ...]]:
    """Return these headers of each waiting message, oldest first."""
    found = sorted(items(site.client), key=lambda doc: float(doc['published']))
    return [tuple(doc['message']['headers'].get(name) for name in names) for doc in found]


def test_options_of_a_task_with_a_concurrency_limit(site: Site) -> None:
    arguments = (str(site.journal), 'k', 'name', 0)
    for wrong, sentence in (
        ({'concurrency_limit': None}, 'needs a concurrency_limit'),
        ({'acks_late': False}, 'needs acks_late=True'),
        ({'concurrency_key': lambda *args: 7}, 'must be text of 1 to 500 characters'),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            concurrency_limited(site, name=sentence, **wrong).apply_async(arguments)
    concurrency_limited(site, name='one', concurrency_key=lambda *args: None).apply_async(arguments)
    concurrency_limited(site, name='two', concurrency_key='fixed').apply_async(arguments, concurrency_limit=5)
    concurrency_limited(site, name='three').apply_async(arguments, concurrency_key='given')

    class Both(LimitedTask, UniqueTask):
        abstract = True

    assert concurrency_limited(site, name='four', base=Both).apply_async(arguments, job_key='j').outcome == 'enqueued'
    assert headers_of_waiting(site, 'concurrency_key', 'concurrency_limit') == [
        (None, None),
        ('fixed', 5),
        ('given', 2),
        ('k', 2),
    ]


def test_options_of_a_task_with_a_rate(site: Site) -> None:
    arguments = (str(site.journal), 'key', 'name', 0)
    for wrong, given, sentence in (
        ({'rate': '10 per minute'}, {}, 'must be a rate from one a day to 1,000 a second'),
        ({'rate': None}, {'rate_key': 'k'}, 'has a rate_key and needs a rate'),
        ({'rate_key': lambda *args: 7}, {}, 'rate_key must be text'),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            rated(site, name=sentence, **wrong).apply_async(arguments, **given)
    rated(site, name='one', rate=None).apply_async(arguments)
    rated(site, name='two', acks_late=False).apply_async(arguments)
    rated(site, name='three').apply_async(arguments, rate=0.5, rate_key='given')
    rated(site, name='four', rate_key=lambda journal, key, *args: f'for {key}').apply_async(arguments)
    rated(site, name='five', concurrency_key='c', concurrency_limit=2).apply_async(arguments)
    # A retry has the headers of the first attempt, whose options were not those of the task.
    rated(site, name='six').apply_async(arguments, headers={'rate_key': 'first', 'rate': '5/h'})
    assert headers_of_waiting(site, 'rate_key', 'rate') == [
        (None, None),
        ('two', '10/s'),
        ('given', 0.5),
        ('for key', '10/s'),
        ('c', '10/s'),
        ('first', '5/h'),
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


def most_at_once(lines: list[str]) -> int:
    """Return how many runs of one key overlapped at most. Runs that begin again had ended with their worker."""
    running, most = set[str](), 0
    for number, (what, name) in enumerate(map(str.split, lines)):
        if what == 'killed':
            running -= {each for each in running if f'start {each}' in lines[number:]}
        elif what == 'start':
            assert name not in running
            running.add(name)
            most = max(most, sum(each[0] == name[0] for each in running))
        else:
            running.remove(name)
    return most


@pytest.mark.slow
def test_no_key_exceeds_its_limit_while_workers_are_killed(site: Site, again: Any) -> None:
    victim, _ = [site.worker(concurrency=4, broker_transport_options=SHORT_LEASE) for _ in range(2)]
    names = {f'{key}{number}' for number in range(15) for key in 'abc'}
    for name in names:
        again.apply_async((str(site.journal), name, 0.1, None), concurrency_key=name[0], concurrency_limit=2)
    wait_for(lambda: len(site.journalled()) > 20, 'tasks to run')
    victim.kill()
    with site.journal.open('a') as journal:
        journal.write('killed one\n')
    wait_for(lambda: {f'end {name}' for name in names} <= set(site.journalled()), 'all tasks to run')
    wait_for(lambda: not items(site.client) and not site.client.id_range('slot:'))
    assert most_at_once(site.journalled()) == 2


def test_slot_is_free_while_a_retry_waits(site: Site, again: Any) -> None:
    """The retry waits for an hour, or until it is moved. Then it needs a slot again."""
    limit = {'concurrency_key': 'k', 'concurrency_limit': 1, 'rate_key': 'r', 'rate': '100/s'}
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
