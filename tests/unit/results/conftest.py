"""Fixtures of the tests of results that are handed over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_couchdb.results.outbox import Outbox

from .recording import Recorder, outbox_of


@pytest.fixture
def recorder() -> Recorder:
    """What takes the place of the writer of `outbox`."""
    return Recorder()


@pytest.fixture
def outbox(recorder: Recorder) -> Iterator[Outbox]:
    """An outbox that is not open."""
    outbox = outbox_of(recorder)
    yield outbox
    recorder.gate.set()
    recorder.outages = 0
    outbox.close()
