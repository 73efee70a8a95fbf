"""`inspect stats` of workers (`celery_couchdb.worker.control`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.worker.control import Panel

from celery_couchdb.worker import control
from kombu_couchdb.couchdb.http import Latency


def test_stats_have_the_requests_of_workers_that_use_couchdb(monkeypatch: pytest.MonkeyPatch) -> None:
    latency = Latency()
    monkeypatch.setattr(control, 'LATENCY', latency)
    state = SimpleNamespace(consumer=SimpleNamespace(controller=SimpleNamespace(stats=lambda: {'pid': 5})))
    assert Panel.data['stats'] is control.stats
    assert control.stats(state) == {'pid': 5}
    latency.note_failure()
    assert control.stats(state) == {'pid': 5, 'couchdb': {'requests': latency.snapshot()}}
