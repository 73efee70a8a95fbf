"""An outbox that records what it would store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from celery_couchdb.results.batch_writer import BatchWriter, Refusal
from celery_couchdb.results.documents import ChordPart
from celery_couchdb.results.handed import Handed
from celery_couchdb.results.outbox import Outbox
from celery_couchdb.results.store import Store
from kombu_couchdb.errors import AccessDenied, CouchDBError, ServerUnavailable
from tests.conftest import PATIENCE


class Recorder:
    """Takes the place of a `BatchWriter`."""

    def __init__(self) -> None:
        #: The ids of the stored documents, in their order, and the batches that were tried.
        self.written: list[str] = []
        self.tried: list[list[str]] = []
        self.states: list[str] = []
        #: The ids that are refused, and how many writes get no response.
        self.refused: set[str] = set()
        self.outages = 0
        self.error: CouchDBError = ServerUnavailable('no response')
        #: Writes wait until it is set.
        self.gate = threading.Event()
        self.gate.set()

    def write(self, batch: Sequence[Handed], *, uncertain: bool = False) -> list[Refusal]:
        self.tried.append([each.id for each in batch])
        assert self.gate.wait(PATIENCE)
        if self.outages:
            self.outages -= 1
            raise self.error
        refusals: list[Refusal] = [(each, AccessDenied('refused')) for each in batch if each.id in self.refused]
        stored = [each for each in batch if each.id not in self.refused]
        self.written += [each.id for each in stored]
        self.states += [each.head['status'] for each in stored]
        return refusals


def outbox_of(recorder: Recorder, timeout: float = PATIENCE) -> Outbox:
    """Return an outbox that writes to `recorder`."""
    store = SimpleNamespace(client=SimpleNamespace(timeouts=(timeout / 2, timeout / 2)), before_access=None)
    outbox = Outbox(cast(Store, store))
    outbox._relay._timeout = outbox._timeout = timeout
    outbox.pipeline._writer = cast(BatchWriter, recorder)
    return outbox


def handed(doc_id: str, status: str = 'SUCCESS', value: Any = 1, part: str = '', **members: Any) -> Handed:
    """Return a result."""
    doc = {'_id': doc_id, 'type': 'Result', 'status': status, 'value': {'result': value}, **members}
    chord_part: ChordPart | None = None
    if part:
        chord_part = {'_id': part, 'type': 'Part', 'task_id': doc_id, 'index': 0, 'state': status}
    return Handed.of(doc, chord_part, 'group' if part else '', {'value': {'body': 1}} if part else None)
