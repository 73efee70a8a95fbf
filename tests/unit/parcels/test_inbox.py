"""The inbox of the leader: what it does after a report of the changes feed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from celery_couchdb.parcels import mover as inbox
from celery_couchdb.parcels.mover import Batch, Inbox
from kombu_couchdb.couchdb.changes import Changes
from kombu_couchdb.couchdb.conflicts import SYNC


class FakeFollower:
    """A follower whose next report is set by the test."""

    def __init__(self, *_: Any) -> None:
        self.since, self.report = list[Any](), None

    def follow(self, since: Any, selector: Any) -> None:
        self.since.append(since)

    def take(self) -> Changes | None:
        report, self.report = self.report, None
        return report

    def pause(self) -> None:
        self.since.append('paused')


class Lead:
    """A leader; a test sets `next`, the term that the next step returns."""

    def __init__(self) -> None:
        self.term: object = None
        self.next: object = 'first'
        self.next_in = 5.0

    def step(self) -> object:
        self.term = self.next
        return self.term


class Job(Inbox):
    done_by_leader = 'leads %s'

    def __init__(self, replicas: int = 1) -> None:
        self.done = list[Any]()
        self.batches = list[Batch]()
        self.lead = Lead()
        client = SimpleNamespace(url='http://host/db', replicas=replicas, sequence=lambda: f'seq-{len(self.done)}')
        super().__init__(self.lead, client, {}, lambda: None)  # type: ignore[arg-type]

    def do_batch(self) -> Batch:
        self.done.append('view')
        return self.batches.pop(0) if self.batches else Batch(0, 0)

    def do_these(self, ids: Sequence[str]) -> None:
        self.done.append(list(ids))

    def report(self, *ids: str) -> None:
        self.feed.report = Changes([{'id': doc_id} for doc_id in ids], f'after {ids[-1]}')
        self.step()

    @property
    def feed(self) -> Any:
        return self._follower


@pytest.fixture(autouse=True)
def feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, 'Follower', FakeFollower)


def started(replicas: int = 1) -> Job:
    job = Job(replicas)
    job.step()
    assert (job.done, job.feed.since) == (['view'], ['seq-0'])
    return job


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr('celery_couchdb.parcels.mover.time.monotonic', lambda: self.now)


def test_cluster_is_read_once_more_when_its_nodes_have_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that answers the first read may not have the document yet."""
    clock, job = Clock(monkeypatch), started(replicas=3)
    job.report('a')
    job.step()
    assert job.done == ['view', ['a']]
    clock.now += SYNC
    job.step()
    job.step()
    assert job.done == ['view', ['a'], 'view']
    clock.now += SYNC
    job.step()
    assert job.done == ['view', ['a'], 'view']
    clock.now += 60.0
    job.step()
    assert job.done == ['view', ['a'], 'view', 'view']


@pytest.mark.parametrize('replicas', [1, 3])
def test_batch_of_which_nothing_is_done_is_read_again_soon(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    """The parcels behind it must not wait for the next change."""
    clock, job = Clock(monkeypatch), Job(replicas)
    job.batches = [Batch(100, 0), Batch(100, 0), Batch(100, 100), Batch(10, 10)]
    job.step()
    job.step()
    assert job.done == ['view']
    clock.now += 1.0
    job.step()
    assert job.done == ['view', 'view']
    clock.now += 1.0
    job.step()
    assert job.done == ['view', 'view']  # the pauses become longer
    clock.now += 1.0
    job.step()
    assert job.done == ['view'] * 5
