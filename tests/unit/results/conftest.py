"""Fixtures of the tests of the result queue: one that records what it would store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_couchdb.results.documents import ChordPart
from celery_couchdb.results.other_databases import OtherDatabases
from celery_couchdb.results.queue_item import QueueItem, Refusal
from celery_couchdb.results.result_queue import Done, ResultQueue
from celery_couchdb.results.result_store import ResultStore
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.errors import AccessDenied, CouchDBError
from tests.conftest import PATIENCE


class Recorder:
    """Takes the place of the store of a result queue, and of what counts parts of chords and replaces results."""

    def __init__(self) -> None:
        #: The stored results, the ids of their documents, in their order, and the batches that were tried.
        self.stored: list[QueueItem] = []
        self.written: list[str] = []
        self.tried: list[list[str]] = []
        self.refused: set[str] = set()
        #: Writes wait until it is set.
        self.gate = threading.Event()
        self.gate.set()
        self.on_stored: Callable[[Sequence[QueueItem], Done], None] = lambda results, done: done(results)
        self.on_refused: Callable[[QueueItem, CouchDBError], Sequence[QueueItem]] = lambda result, error: ()

    def write(self, batch: Sequence[QueueItem], *, uncertain: bool = False) -> list[Refusal]:
        self.tried.append([each.id for each in batch])
        assert self.gate.wait(PATIENCE)
        refusals: list[Refusal] = [(each, AccessDenied('refused')) for each in batch if each.id in self.refused]
        self.stored += [each for each in batch if each.id not in self.refused]
        self.written = [each.id for each in self.stored]
        return refusals

    def queue(self, timeout: float = PATIENCE) -> ResultQueue:
        """Return a queue that writes to this recorder, and is not open; children wait for `timeout` seconds."""
        store = SimpleNamespace(
            client=SimpleNamespace(options=HTTPOptions(timeout / 2, timeout / 2)),
            before_access=[],
            write_batch=lambda batch, **how: self.write(batch, **how),
        )
        queue = ResultQueue(
            cast(ResultStore, store),
            lambda results, done: self.on_stored(results, done),
            lambda result, error: self.on_refused(result, error),
            OtherDatabases(None),
        )
        queue._relay._timeout = queue.timeout = timeout
        return queue


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def queue(recorder: Recorder) -> Iterator[ResultQueue]:
    """A queue that is not open."""
    queue = recorder.queue()
    yield queue
    recorder.gate.set()
    queue.close()


def item(doc_id: str, value: Any = 1, part: str = '', **members: Any) -> QueueItem:
    """Return a result."""
    doc = {'_id': doc_id, 'type': 'Result', 'status': 'SUCCESS', 'value': {'result': value}, **members}
    chord_part: ChordPart | None = None
    if part:
        chord_part = {'_id': part, 'type': 'Part', 'task_id': doc_id, 'index': 0, 'state': 'SUCCESS'}
    return QueueItem.encode(doc, chord_part, 'group' if part else '')
