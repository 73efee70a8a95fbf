"""Outcomes of tasks that were given away: results that return, and those of tasks that did not run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from celery import states
from celery.app.task import Context
from celery.exceptions import TaskRevokedError

from kombu_couchdb.contrib.regions import region
from kombu_couchdb.contrib.regions.region import Giver
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import delete_current
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.errors import AccessDenied, CouchDBError, ServerUnavailable, Unstorable
from kombu_couchdb.log import get_logger
from kombu_couchdb.values import is_number

from ...backend import CouchDBBackend, couchdb_backend_of
from ...results.documents import is_final, is_outdated, stamp
from ...results.queue_item import QueueItem
from ..parcels.messages import attached_body, embedded_in

logger = get_logger(__name__)

#: Errors of documents that the database may accept later.
_FOR_NOW = (AccessDenied, ServerUnavailable)


class TaskNotRun(Exception):
    """A task was given to another region and did not run there, or its message ended there as a dead letter."""


def merged_into(task_id: str | None) -> str:
    """Return why a unique job does not run: it was merged into that of another task."""
    return f'a job with its key waits already, and task {task_id} runs for both'


def outcome(backend: CouchDBBackend, task_id: str, task: str | None, state: str, reason: str) -> Document:
    """Return the result of a task that was revoked, or that has failed, with the reason."""
    error = TaskRevokedError(reason) if state == states.REVOKED else TaskNotRun(reason)
    return dict(backend.error_document(task_id, task, error, state))


class _Back(NamedTuple):
    """A result that has returned."""

    #: The id of the document in which it came, alone or with others; and what it was before it was joined with them.
    source: str
    doc: Document
    #: As it is stored at home.
    result: Document

    def ended_record(self, foreign: Collection[str]) -> str | None:
        """Return the record of the task, if it has ended and has one that is not for a region in `foreign`.

        A task that has no result has ended, too.
        """
        record = self.doc.get('record')
        if not isinstance(record, str) or not record.startswith(region.RECORD) or region.region_of(record) in foreign:
            return None
        return record if is_final(self.result) or self.result['status'] == states.IGNORED else None


class ResultsAtHome:
    """Stores the results of tasks that this region gave to other ones. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, own: Client) -> None:
        """`own` is a client for the database of regions of this region."""
        self._own, self._backend, self._content = own, couchdb_backend_of(app), app.conf.accept_content
        #: Why this region's database has refused a result for now, the last time that it has, or to delete a record.
        self.problem: CouchDBError | str = ''

    def take(self, docs: Sequence[Document], other: str, foreign: Collection[str]) -> list[Document]:
        """Store results that region `other` has returned, and delete the records of its tasks that have ended.

        It may have been renamed, so its records are those that are not for the other regions, `foreign`.
        Return the documents that are not needed any more. A result that this region's database refuses for now stays
        in the other region, and its record stays here: see `problem`. It stays, too, if its record cannot be deleted.
        """
        found, best = self._results_in(docs, other), dict[str, Document]()
        for _, _, result in found:
            doc_id, is_result = result['_id'], result['status'] != states.IGNORED
            if is_result and (doc_id not in best or not is_outdated(result, best[doc_id])):
                best[doc_id] = result
        refused = self.store(list(best.values()))
        for error in refused.values():
            self.problem = error
        kept = {back.source for back in found if back.result['_id'] in refused}
        stored = [back for back in found if back.result['_id'] not in refused]
        ends = {record: back for back in stored if (record := back.ended_record(foreign))}
        left = [*ends]
        for _ in range(2):  # the other region may say `there` meanwhile
            current = [doc for doc in self._own.find(left) if doc] if left else []
            self._tell_givers([(doc, ends[doc['_id']].doc) for doc in current])
            left = delete_current(self._own, current)
        if left:
            self.problem = f'the record {left[0]} cannot be deleted'
            kept |= {ends[record].source for record in left}
        return [doc for doc in docs if doc['_id'] not in kept]

    def _results_in(self, docs: Sequence[Document], other: str) -> list[_Back]:
        """Return the results in documents that region `other` has returned, in the order of their dates."""
        found = list[_Back]()
        for source, doc in [(joined['_id'], doc) for joined in docs for doc in region.results_in(joined)]:
            if result := self._result_in(doc):
                found.append(_Back(source, doc, result))
            else:
                logger.warning('region %s has returned no result: %.200r', other, doc)
        return sorted(found, key=lambda back: date_in(back.doc, 'date'))

    def _tell_givers(self, ended: Sequence[tuple[Document, Document]]) -> None:
        """Tell the regions that gave tasks to this one how they ended in a third one, to which a retry was routed.

        For each its record is given, and the document that ends it.
        """
        found, now = list[Document](), self._own.clock.now()
        for record, end in ended:
            giver, task_id = Giver.of(headers_of(record)), region.task_id_of(record['_id'])
            if giver and giver.task_id == task_id:
                tag = end['_id'].rpartition(':')[2]  # it is told once, if this is repeated
                found.append(region.returned(giver.region, task_id, tag, end['result'], giver.record, now))
        if found:
            self._own.create_once(found)

    def _result_in(self, doc: Mapping[str, Any]) -> Document | None:
        """Return the result of a task that a document brings back, as it is stored here; None if it brings none."""
        found = doc.get('result')
        result = {name: value for name, value in (found if isinstance(found, dict) else {}).items() if name[:1] != '_'}
        is_result = result.get('type') == 'Result' and isinstance(result.get('status'), str)
        if not is_result or not isinstance(doc_id := doc.get('_id'), str) or not region.task_id_of(doc_id):
            return None
        # Regions may have different prefixes of keys.
        key = self._backend.get_key_for_task(region.task_id_of(doc_id)) if self._backend else doc_id
        return {'_id': key, **result}

    def store_outcome(self, doc: Document, state: str, reason: str) -> bool:
        """Store the result of the task of a record, which may be malformed; return False if it is refused for now."""
        if self._backend is None:
            return True
        task_id, task = region.task_id_of(doc['_id']), doc.get('task') if isinstance(doc.get('task'), str) else None
        refused = self.store([outcome(self._backend, task_id, task, state, reason)])
        self.problem = next(iter(refused.values()), self.problem)
        return not refused

    def fail_next(self, doc: Document, reason: str) -> None:
        """Let the later steps of the chain of a task fail that has failed without running, and call its errbacks."""
        if self._backend is None:
            return
        try:
            headers, body = doc['message']['headers'], attached_body(self._own, doc)
            embedded = embedded_in(doc['message'], body, self._content)
            request = Context({**headers, **embedded}, headers=headers, delivery_info={})
            self._backend.mark_as_failure(region.task_id_of(doc['_id']), TaskNotRun(reason), request=request)
        except CouchDBError:
            raise
        except Exception as exc:  # anything may be in the record
            logger.warning('nothing that follows task %s can be told of its failure: %r', doc.get('id'), exc)

    def store(self, results: Sequence[Document]) -> dict[str, CouchDBError]:
        """Store results, as every other result: a success stays, for example.

        Return by id why the database refuses some for now: somebody may change its rights, or make it writable again.
        """
        refused = dict[str, CouchDBError]()
        if self._backend is None or not results:
            return refused
        backend, now = self._backend, self._own.clock.now()
        items = list[QueueItem]()
        for doc in results:
            try:
                items.append(QueueItem.encode(stamp(doc, now, backend.lifetime_of(doc['status']))))
            except Unstorable as exc:
                logger.warning('the result %s of another region is not stored: %s', doc['_id'], exc)
        try:
            while refusals := backend.store.write_batch(items):
                refused |= {item.id: error for item, error in refusals if isinstance(error, _FOR_NOW)}
                final = [(item, error) for item, error in refusals if item.id not in refused]
                items = [instead for item, error in final for instead in backend.handover.refused(item, error)]
        except AccessDenied as exc:
            refused |= dict.fromkeys((item.id for item in items), exc)
        return refused


def date_in(doc: Mapping[str, Any], name: str) -> float:
    """Return a date in a document; 0 without one."""
    return date if is_number(date := doc.get(name)) else 0.0
