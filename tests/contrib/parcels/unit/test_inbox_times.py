"""Inbox: the times at which documents come again."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest

from celery_couchdb.contrib.parcels.inbox import DueTimes


def test_last_time_of_a_document_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr('celery_couchdb.contrib.parcels.inbox.time', SimpleNamespace(monotonic=lambda: now))
    times = DueTimes()
    assert (times.take(), times.next_at) == ([], inf)
    times.put(['early', 'late', 'gone', 'moved'], 5.0)
    times.put(['late'], 20.0)
    times.put(['moved'], 1.0)
    times.put(['moved'], 3.0)
    times.discard('gone')
    assert times.next_at == 103.0
    now = 106.0
    assert times.take() == ['moved', 'early']
    assert (times.take(), times.next_at) == ([], 120.0)
    times.put(['early'], inf)
    now = 120.0
    assert (times.take(), times.next_at) == (['late'], inf)
