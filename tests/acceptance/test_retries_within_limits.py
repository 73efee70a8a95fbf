"""Retries of tasks with limits: a retry needs a slot or a start like any other task, and holds none before."""

from __future__ import annotations

from typing import Any

import pytest

from celery_couchdb.jobs import Jobs
from celery_couchdb.limits import LimitedTask
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site


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
