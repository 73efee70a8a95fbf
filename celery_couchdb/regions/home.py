"""Home: what a region does about the records of tasks that it gave to another region, and the results that return.

The record exists until the task has ended: its final result has returned, or home has decided otherwise (see
`region.decide`). Home changes a record by its revision, so that it decides nothing that the other region has decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from celery import states

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Document, chunks
from kombu_couchdb.couchdb.conflicts import conflicts_of, delete_revisions
from kombu_couchdb.log import get_logger
from kombu_couchdb.parcels import parcel
from kombu_couchdb.regions import region

from ..parcels.inbox import Inbox
from ..parcels.look_ups import LookUps
from ..parcels.messages import ParcelMessages, attached_body
from ..parcels.parcel_checks import ParcelRefused, message_of
from ..results.documents import is_final, is_outdated, stamp
from ..results.queue_item import QueueItem
from .outcomes import backend_of, outcome

logger = get_logger(__name__)

#: The pause before something is tried again that is not possible yet, in seconds.
_DELAY_SECONDS = 30.0

#: The records that are changed together.
_BATCH_DOCS = 100


class Home:
    """The records of tasks that this region, `name`, gave to region `other`. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, transport: Any, own: Client, other: str, wake: Callable[[], None]) -> None:
        """`own` is a client for the database of regions of this region. Another thread calls `wake()` when it changes.

        `other` may have been removed from the option `regions`.
        """
        self._own, self._other = own, other
        self._name, self._regions = transport.options.region, transport.options.regions
        self._messages, self._backend = ParcelMessages(transport), backend_of(app)
        self._records_there = Inbox(own, wake, region.records_to(other))
        self.reset()

    def reset(self) -> None:
        """Forget the records, and follow nothing until the next call of `step`, which reads all again."""
        self._records_there.reset()
        #: When home decides about records, by the server's clock.
        self._due: dict[str, float] = {}
        #: All records, whose results are looked up: a result that another region has returned, for example, ends none.
        self._records = set[str]()
        self._look_ups = LookUps[str]()
        #: The revisions of the records whose failures are stored.
        self._told = set[str]()

    @property
    def next_at(self) -> float:
        """The monotonic time at which `step` has something to do; infinite if it has not."""
        due = min(self._due.values(), default=inf) - self._own.clock.now()
        return min(time.monotonic() + max(0.0, due), self._look_ups.next_at, self._records_there.next_at)

    def close(self) -> None:
        """End the thread of the changes feed."""
        self._records_there.close()

    # -- records

    def step(self, renew: Callable[[], None]) -> None:
        """Decide about records that have changed or are due, and look whether tasks have ended whose records remain.

        It calls `renew()` now and then.
        """
        while changed := self._records_there.take(_BATCH_DOCS):
            self._note(changed)
            renew()
        now = self._own.clock.now()
        due = [doc_id for doc_id, at in self._due.items() if at <= now]
        for part in chunks(due, _BATCH_DOCS):
            self._note(dict(zip(part, self._own.find(part), strict=True)))
        if self._backend is not None and (due := self._look_ups.take(self._records)):
            ids = [self._backend.get_key_for_task(doc_id.split(':', 2)[2].rpartition(':')[0]) for doc_id in due]
            results = self._backend.store.read_many(ids)
            ended = [doc_id for doc_id, doc in zip(due, results, strict=True) if doc and is_final(doc)]
            docs = self._own.find(ended) if ended else []
            delete(self._own, [doc for doc in docs if doc and region.state_of(doc) != 'refused'])

    def _note(self, changed: Mapping[str, Document | None]) -> None:
        """Note records that have changed, by id; None for deleted ones. Decide about those that are due."""
        for doc_id, doc in changed.items():
            self._due.pop(doc_id, None)
            if doc is None:
                self._records.discard(doc_id)
                continue
            self._records.add(doc_id)
            decision = region.decide(doc, self._name, self._own.clock.now())
            if decision is None:
                if (due := region.due_at(doc)) is not None:
                    self._due[doc_id] = due
            elif decision.what == 'run':
                self._run(doc, decision.where)
            elif doc['_rev'] not in self._told:
                self._end(doc, decision)

    def _run(self, doc: Document, where: str) -> None:
        """Run the task of a record in the region `where`, and delete the record. It is safe to repeat this."""
        if where not in self._regions:
            self._due[doc['_id']] = self._own.clock.now() + _DELAY_SECONDS
            reason = f'{where!r:.80} is not one of the regions'
            if doc.get('delayed') != reason:
                logger.warning('task %s cannot run in another region yet: %s', doc.get('id'), reason)
                self._own.bulk([{**doc, 'delayed': reason}])
            return
        if region.state_of(doc) != 'withdrawn':
            logger.warning('region %s has not taken task %s: it runs in %s', self._other, doc.get('id'), where)
            doc = region.withdrawn(doc, where)
            [result] = self._own.bulk([doc])
            if not result.is_proven:
                return  # the other region was faster; or this comes again
            doc = {**doc, '_rev': result.rev}
        reason = self._publish_here(doc) if where == self._name else self._give(doc, where)
        if reason:
            final = {name: value for name, value in doc.items() if name != 'fallback'}
            self._own.bulk([parcel.refused(final, reason, self._own.clock.now())])
        else:
            delete(self._own, [doc])

    def _publish_here(self, doc: Document) -> str:
        """Publish the message of a record in this region; return why it cannot be, or ''."""
        items, refused = self._messages.make(f'region {self._name}', [doc], self._publish)
        reasons = {doc_id: str(exc) for doc_id, exc in refused.items()} | self._messages.store(items)
        return reasons.get(doc['_id'], '')

    def _publish(self, doc: Document) -> None:
        self._messages.publish(message_of(doc, attached_body(self._own, doc)), doc)

    def _give(self, doc: Document, where: str) -> str:
        """Give the task of a record to another region; return why it cannot be, or ''."""
        try:
            body = attached_body(self._own, doc)
            message_of(doc, body)
        except ParcelRefused as exc:
            return str(exc)
        message = parcel.with_body(doc['message'], body)
        made = parcel.new(message, doc.get('exchange') or '', doc.get('routing_key') or '', doc['published'])
        made['_id'] = region.record_id(where, message['headers']['id'], doc['_id'].rpartition(':')[2])
        [result] = self._own.create_once([made])
        return '' if result.is_stored else result.reason

    def _end(self, doc: Document, decision: region.Decision) -> None:
        """Store the result of a task that does not run. The record of one that was refused stays."""
        state = states.REVOKED if decision.what == 'cancelled' else states.FAILURE
        if state == states.REVOKED:
            [result] = self._own.bulk([deletion(doc)])
            if not result.is_proven:
                return
        task_id, task = doc.get('id'), doc.get('task')
        if self._backend is not None and isinstance(task_id, str) and isinstance(task, str):
            self._store([outcome(self._backend, task_id, task, state, decision.reason or 'it was cancelled')])
        self._told.add(doc['_rev'])

    # -- results that return

    def store(self, docs: Sequence[Document]) -> None:
        """Store results that have returned, and delete the records of the tasks that have ended."""
        found = [doc for joined in docs for doc in region.results_in(joined) if _is_valid(doc)]
        best = dict[str, Document]()
        for doc in sorted(found, key=lambda doc: float(doc.get('date') or 0)):
            result = doc['result']
            if result['_id'] not in best or not is_outdated(result, best[result['_id']]):
                best[result['_id']] = result
        self._store(list(best.values()))
        ended = [doc['record'] for doc in found if is_final(doc['result']) and isinstance(doc.get('record'), str)]
        ended = [doc_id for doc_id in dict.fromkeys(ended) if doc_id.startswith(region.records_to(self._other))]
        for _ in range(2):  # the other region may say `there` meanwhile; `step` finds what is left
            current = [doc for doc in self._own.find(ended) if doc] if ended else []
            ended = delete(self._own, current)

    def _store(self, results: Sequence[Document]) -> None:
        """Store results, as every other result: a success stays, for example."""
        if self._backend is None or not results:
            return
        backend, now = self._backend, self._own.clock.now()
        items = [
            QueueItem.of(
                stamp(doc, now, backend.failure_expires if doc['status'] == states.FAILURE else backend.expires)
            )
            for doc in results
        ]
        for item, error in backend.store.write_batch(items):
            backend.store.write_batch(backend.handover.refused(item, error))


def delete(client: Client, docs: Sequence[Document]) -> list[str]:
    """Delete documents, and return the ids of those that another process has changed.

    In a cluster an unproven write of another process may be a conflict, which would show when the document is deleted:
    a task would run again.
    """
    if client.is_cluster():
        delete_revisions(client, [(doc['_id'], rev) for doc in docs for rev in conflicts_of(client, doc['_id'])])
    return [result.id for result in client.bulk(list(map(deletion, docs))) if not result.is_stored]


def _is_valid(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is the result of a task, on its way back."""
    result = doc.get('result')
    return (
        isinstance(result, dict)
        and result.get('type') == 'Result'
        and isinstance(result.get('_id'), str)
        and 'celery-task-meta-' in result['_id']
        and isinstance(result.get('status'), str)
    )
