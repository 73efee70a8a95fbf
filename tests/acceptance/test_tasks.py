"""Tasks with real workers: results, errors, retries and due dates."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

from tests.conftest import PATIENCE

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
