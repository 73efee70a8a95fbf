"""Home: what a region does about the records of tasks that it gave to another region.

The record exists until the task has ended: its final result has returned, or home has decided otherwise (see
`region.decide`). Home changes a record by its revision, so that it decides nothing that the other region has decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from celery import states

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.client import Client, Document, chunks
from kombu_couchdb.couchdb.conflicts import delete_current, rivals
from kombu_couchdb.log import get_logger

from ...backend import couchdb_backend_of
from ...results.documents import is_final
from ..parcels.inbox import Inbox
from ..parcels.look_ups import LookUps
from ..parcels.messages import ParcelMessages, attached_body
from ..parcels.parcel_checks import ParcelRefused, message_of
from .outcomes import ResultsAtHome, date_in, merged_into
from .taker import DELAY_SECONDS

logger = get_logger(__name__)

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
        self._messages, self._backend = ParcelMessages(transport), couchdb_backend_of(app)
        self._results = ResultsAtHome(app, own, other)
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
        #: The revisions of the records whose failures are stored, by id.
        self._told: dict[str, str] = {}

    @property
    def next_at(self) -> float:
        """The monotonic time at which `step` has something to do; infinite if it has not."""
        due = min(self._due.values(), default=inf) - self._own.clock.now()
        return min(time.monotonic() + max(0.0, due), self._look_ups.next_at, self._records_there.next_at)

    def close(self) -> None:
        """End the thread of the changes feed."""
        self._records_there.close()

    # -- records

    def step(self) -> None:
        """Decide about records that are due or have changed, and look whether tasks have ended whose records remain.

        Of many that have changed it takes some. See `next_at`.
        """
        self._note(self._records_there.take(_BATCH_DOCS))
        now = self._own.clock.now()
        due = [doc_id for doc_id, at in self._due.items() if at <= now]
        for part in chunks(due, _BATCH_DOCS):
            self._note(dict(zip(part, self._own.find(part), strict=True)))
        if self._backend is not None and (due := self._look_ups.take(self._records)):
            ids = [self._backend.get_key_for_task(region.task_id_of(doc_id)) for doc_id in due]
            results = zip(due, self._backend.store.read_many(ids), strict=True)
            ends = {doc_id: date_in(doc, 'date') for doc_id, doc in results if doc and is_final(doc)}
            docs = self._own.find(list(ends)) if ends else []
            # The program may have sent another task with the same id before: that has an older result.
            ended = [doc for doc in docs if doc and ends[doc['_id']] >= date_in(doc, 'published')]
            delete_current(self._own, [doc for doc in ended if region.state_of(doc) != 'refused'])

    def _note(self, changed: Mapping[str, Document | None]) -> None:
        """Note records that have changed, by id; None for deleted ones. Decide about those that are due."""
        for doc_id, doc in changed.items():
            if not region.task_id_of(doc_id):
                continue  # somebody else's document
            self._due.pop(doc_id, None)
            if doc is None:
                self._records.discard(doc_id)
                self._told.pop(doc_id, None)
                continue
            self._records.add(doc_id)
            decision = region.decide(doc, self._name, self._own.clock.now())
            if decision is None:
                if (due := region.due_at(doc)) is not None:
                    self._due[doc_id] = due
            elif any(region.state_of(leaf) == 'there' for leaf in rivals(self._own, [doc]).get(doc_id, ())):
                self._due[doc_id] = self._own.clock.now() + DELAY_SECONDS  # the other region ends the conflict
            elif decision.what == 'run':
                self._run(doc, decision.where)
            elif doc['_rev'] != self._told.get(doc_id):
                self._end(doc, decision)

    def _run(self, doc: Document, where: str) -> None:
        """Run the task of a record in the region `where`, and delete the record. It is safe to repeat this."""
        if where not in self._regions:
            self._due[doc['_id']] = self._own.clock.now() + DELAY_SECONDS
            reason = f'{where!r:.80} is not one of the regions'
            if not doc.get('delayed'):  # the other region may have written why it has not taken it
                logger.warning('task %s cannot run in another region yet: %s', doc.get('id'), reason)
                self._own.bulk([{**doc, 'delayed': reason}])
            return
        if region.state_of(doc) != 'withdrawn':
            logger.warning('region %s has not taken task %s: it runs in %s', self._other, doc.get('id'), where)
            if (changed := self._withdrawn(doc, where)) is None:
                return
            doc = changed
        reason = self._publish_here(doc) if where == self._name else self._give(doc, where)
        if reason:
            self._own.bulk([parcel.refused(doc, reason, self._own.clock.now())])
        else:
            delete_current(self._own, [doc])

    def _withdrawn(self, doc: Document, run_in: str) -> Document | None:
        """Withdraw a record; return None if the other region was faster, or if this comes again."""
        doc = region.withdrawn(doc, run_in)
        [result] = self._own.bulk([doc])
        return {**doc, '_rev': result.rev} if result.is_proven else None

    def _publish_here(self, doc: Document) -> str:
        """Publish the message of a record in this region; return why it cannot be, or ''."""
        items, refused = self._messages.make(region.SOURCE, [doc], self._publish)
        reasons = {doc_id: str(exc) for doc_id, exc in refused.items()} | self._messages.store(items)
        if doc['_id'] in self._messages.merged:
            self._results.store_outcome(doc, states.REVOKED, merged_into(self._messages.merged[doc['_id']]))
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
        message, date = parcel.with_body(doc['message'], body), self._own.clock.now()
        made = parcel.new(message, doc.get('exchange') or '', doc.get('routing_key') or '', date)
        made['_id'] = region.record_id(where, message['headers']['id'], doc['_id'].rpartition(':')[2])
        [result] = self._own.create_once([made])
        return '' if result.is_stored else result.reason

    def _end(self, doc: Document, decision: region.Decision) -> None:
        """Store the result of a task that does not run. The record of one that was refused stays."""
        if decision.what == 'failed':
            self._results.store_outcome(doc, states.FAILURE, decision.reason)
            self._told[doc['_id']] = doc['_rev']
            return
        if region.state_of(doc) != 'withdrawn':
            if (changed := self._withdrawn(doc, '')) is None:
                return
            doc = changed
        self._results.store_outcome(doc, states.REVOKED, 'it was cancelled')
        delete_current(self._own, [doc])
