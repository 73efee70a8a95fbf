"""Outcomes of tasks that were given away: results that return, and those of tasks that did not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import states
from celery.exceptions import TaskRevokedError

from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import delete_current
from kombu_couchdb.errors import Unstorable
from kombu_couchdb.log import get_logger
from kombu_couchdb.values import is_number

from ...backend import CouchDBBackend, couchdb_backend_of
from ...results.documents import is_final, is_outdated, stamp
from ...results.queue_item import QueueItem

logger = get_logger(__name__)


class TaskNotRun(Exception):
    """A task was given to another region and did not run there, or its message ended there as a dead letter."""


def merged_into(task_id: str | None) -> str:
    """Return why a unique job does not run: it was merged into that of another task."""
    return f'a job with its key waits already, and task {task_id} runs for both'


def outcome(backend: CouchDBBackend, task_id: str, task: str | None, state: str, reason: str) -> Document:
    """Return the result of a task that was revoked, or that has failed, with the reason."""
    error = TaskRevokedError(reason) if state == states.REVOKED else TaskNotRun(reason)
    return dict(backend.error_document(task_id, task, error, state))


class ResultsAtHome:
    """Stores the results of tasks that this region gave to region `other`. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, own: Client, other: str) -> None:
        """`own` is a client for the database of regions of this region."""
        self._own, self._other, self._backend = own, other, couchdb_backend_of(app)

    def take(self, docs: Sequence[Document]) -> None:
        """Store results that have returned, and delete the records of the tasks that have ended."""
        found = [doc for joined in docs for doc in region.results_in(joined)]
        best, ended = dict[str, Document](), dict[str, None]()
        for doc in sorted(found, key=lambda doc: date_in(doc, 'date')):
            if (result := _result_in(doc)) is None:
                logger.warning('region %s has returned no result: %.200r', self._other, doc)
                continue
            if result['_id'] not in best or not is_outdated(result, best[result['_id']]):
                best[result['_id']] = result
            record = doc.get('record')
            if is_final(result) and isinstance(record, str) and record.startswith(region.records_to(self._other)):
                ended[record] = None
        self.store(list(best.values()))
        left = list(ended)
        for _ in range(2):  # the other region may say `there` meanwhile; `step` finds what is left
            current = [doc for doc in self._own.find(left) if doc] if left else []
            left = delete_current(self._own, current)

    def store_outcome(self, doc: Document, state: str, reason: str) -> None:
        """Store the result of the task of a record, which may be malformed."""
        if self._backend is not None:
            task = doc.get('task') if isinstance(doc.get('task'), str) else None
            self.store([outcome(self._backend, region.task_id_of(doc['_id']), task, state, reason)])

    def store(self, results: Sequence[Document]) -> None:
        """Store results, as every other result: a success stays, for example."""
        if self._backend is None or not results:
            return
        backend, now = self._backend, self._own.clock.now()
        items = list[QueueItem]()
        for doc in results:
            try:
                items.append(QueueItem.of(stamp(doc, now, backend.lifetime_of(doc['status']))))
            except Unstorable as exc:
                logger.warning('the result %s of region %s is not stored: %s', doc['_id'], self._other, exc)
        while refusals := backend.store.write_batch(items):
            items = [instead for item, error in refusals for instead in backend.handover.refused(item, error)]


def date_in(doc: Mapping[str, Any], name: str) -> float:
    """Return a date in a document; 0 without one."""
    return date if is_number(date := doc.get(name)) else 0.0


def _result_in(doc: Mapping[str, Any]) -> Document | None:
    """Return the result of a task that a document brings back, as it may be stored; None if it brings none."""
    found = doc.get('result')
    result = {name: value for name, value in (found if isinstance(found, dict) else {}).items() if name[:1] != '_'}
    doc_id = found.get('_id') if isinstance(found, dict) else None
    is_id = isinstance(doc_id, str) and 'celery-task-meta-' in doc_id and doc_id[0] != '_'
    is_result = result.get('type') == 'Result' and isinstance(result.get('status'), str)
    return {'_id': doc_id, **result} if is_id and is_result else None
