"""Tasks with real workers: results, errors, retries and due dates."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest

from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site

#: How late a task may run, in seconds. The documentation says two; the rest is for a busy machine.
LATE = PATIENCE


def test_tasks(site: Site) -> None:
    site.worker()
    results = [site.send('add', number, 1) for number in range(50)]
    assert [result.get(timeout=PATIENCE) for result in results] == list(range(1, 51))
    failed = site.send('fail', 'on purpose')
    with pytest.raises(ValueError, match='on purpose'):
        failed.get(timeout=PATIENCE)


def test_retry_with_countdown(site: Site) -> None:
    site.worker()
    started = time.time()
    retries, ended = site.send('flaky', 2, 1).get(timeout=PATIENCE)
    assert retries == 2
    assert 2 <= ended - started < 2 + 2 * LATE


def test_eta_and_countdown(site: Site) -> None:
    site.worker()
    site.send('now', countdown=3600)
    eta, counted = datetime.now(timezone.utc) + timedelta(seconds=4), time.time() + 3
    dated, later, ready = site.send('now', eta=eta), site.send('now', countdown=3), site.send('now')
    ready.get(timeout=PATIENCE)  # the scheduled tasks do not delay it
    assert 0 <= dated.get(timeout=PATIENCE) - eta.timestamp() < LATE
    assert 0 <= later.get(timeout=PATIENCE) - counted < LATE


def test_scheduled_tasks_stay_in_the_database(site: Site) -> None:
    worker = site.worker()
    site.send('now', countdown=3600)
    site.send('add', 1, 1).get(timeout=PATIENCE)
    assert site.app.control.inspect([worker.hostname()], timeout=PATIENCE, limit=1).reserved() == {
        worker.hostname(): []
    }
    wait_for(lambda: len(items(site.client)) == 1, 'the other message to be deleted')
    [item] = items(site.client)
    assert item['claimed'] is None


def test_expired_task_is_not_run(site: Site) -> None:
    site.send('nap', str(site.journal), 'expired', 0, expires=0.1)
    time.sleep(0.2)
    site.worker()
    assert site.send('nap', str(site.journal), 'in time', 0, expires=3600).get(timeout=PATIENCE) == 'in time'
    wait_for(lambda: not items(site.client), 'the expired message to be deleted')
    assert site.journalled() == ['start in time', 'end in time']
