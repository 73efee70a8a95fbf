"""Tasks with real workers: results, errors, retries and due dates."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest
from celery import chord
from celery.exceptions import ChordError, TaskRevokedError

from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site

#: How late a task may run, in seconds. The documentation says two; the rest is for a busy machine.
LATE = PATIENCE


def test_eta_and_countdown(site: Site) -> None:
    site.worker()
    site.send('now', countdown=3600)
    eta, counted = datetime.now(timezone.utc) + timedelta(seconds=4), time.time() + 3
    dated, later, ready = site.send('now', eta=eta), site.send('now', countdown=3), site.send('now')
    ready.get(timeout=PATIENCE)  # the scheduled tasks do not delay it
    assert 0 <= dated.get(timeout=PATIENCE) - eta.timestamp() < LATE
    assert 0 <= later.get(timeout=PATIENCE) - counted < LATE


def test_task_that_expires_before_it_runs_is_revoked(site: Site) -> None:
    """It was due later, or has planned a retry for later."""
    site.worker()
    late = [site.send('now', countdown=2, expires=1), site.send('flaky', 1, 2.0, expires=1)]
    parts = [site.app.signature('add', (1, 1)), site.app.signature('now').set(countdown=2, expires=1)]
    total = chord(parts, app=site.app)(site.app.signature('total'))
    for result in (*late, total.parent.results[1]):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=PATIENCE)
        assert result.state == 'REVOKED'
    with pytest.raises(ChordError, match='TaskRevokedError'):
        site.app.AsyncResult(total.id).get(timeout=PATIENCE)
    wait_for(lambda: not items(site.client), 'the messages to be deleted')
