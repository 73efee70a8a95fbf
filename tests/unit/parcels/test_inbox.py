"""When the leader reads an inbox again without a report of the changes feed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from celery_couchdb.parcels import mover as inbox
from celery_couchdb.parcels.mover import Batch, Inbox
from kombu_couchdb.couchdb.conflicts import SYNC

FOLLOWER = SimpleNamespace(take=lambda: None, follow=lambda since, selector: None)
LEADER = SimpleNamespace(step=lambda: 'term', term='term', next_in=5.0)


class Job(Inbox):
    """An inbox with these batches; it counts the times at which it was read, by a clock that a test sets."""

    done_by_leader = 'leads %s'

    def __init__(self, replicas: int, *batches: Batch) -> None:
        client = SimpleNamespace(url='http://host/db', replicas=replicas, sequence=lambda: 'seq')
        super().__init__(LEADER, client, {}, lambda: None)  # type: ignore[arg-type]
        self.now, self.reads, self.batches = time.monotonic(), 0, list(batches)

    def do_batch(self) -> Batch:
        self.reads += 1
        return self.batches.pop(0) if self.batches else Batch(0, 0)

    def reads_after(self, seconds: float) -> int:
        self.now += seconds
        self.step()
        return self.reads


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(replicas: int, *batches: Batch) -> Job:
        job = Job(replicas, *batches)
        monkeypatch.setattr('celery_couchdb.parcels.mover.time.monotonic', lambda: job.now)
        return job

    monkeypatch.setattr(inbox, 'Follower', lambda *args: FOLLOWER)
    return start


def test_cluster_is_read_once_more_when_its_nodes_have_synchronised(start: Any) -> None:
    """The node that answers the first read may not have the document yet."""
    job = start(3)
    assert [job.reads_after(seconds) for seconds in (0.0, 0.0, SYNC, 0.0, SYNC, 60.0)] == [1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize('replicas', [1, 3])
def test_batch_of_which_nothing_is_done_is_read_again_soon(start: Any, replicas: int) -> None:
    """The parcels behind it must not wait for the next change. The pauses become longer."""
    job = start(replicas, Batch(100, 0), Batch(100, 0), Batch(100, 100), Batch(10, 10))
    assert [job.reads_after(seconds) for seconds in (0.0, 0.0, 1.0, 1.0, 1.0)] == [1, 1, 2, 2, 5]
