"""The taker: puts tasks of another region into the queues of this one, and says there what became of them.

The records of the other region say which tasks it has given away (`kombu_couchdb.contrib.regions.region`). The message
of a record is published under an id that is derived from the record's id, if that was never stored. So it is stored
once, even if the leader is killed at any point, or two leaders work for a moment.

Whoever runs the task returns its result. The taker returns one if the message ends without a worker, or is cancelled.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from celery import states

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.parcel import FROM_REGION, GIVER
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.contrib.regions.region import Giver
from kombu_couchdb.couchdb.client import Client, Document, chunks
from kombu_couchdb.couchdb.conflicts import delete_current, delete_revisions, rivals
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.ids import JOB_KEY
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.log import get_logger

from ...backend import couchdb_backend_of
from ...results.documents import is_final
from ..parcels.look_ups import LookUps, ends_of_messages
from ..parcels.messages import ParcelMessages, Unroutable, attached_body, in_parts
from ..parcels.parcel_checks import ParcelRefused, message_of
from ..parcels.receipts import write
from .outcomes import merged_into, outcome

logger = get_logger(__name__)

#: The pause before something is tried again that is not possible yet, in seconds.
DELAY_SECONDS = 30.0

#: The most records that are told in one request that their tasks are there.
_BATCH_DOCS = 200


class _Record(NamedTuple):
    """A record whose task was taken: `region.SOURCE`, and its id; see `parcel.moved_id`."""

    source: str
    doc_id: str


class _Taken(NamedTuple):
    task: str | None
    #: The monotonic time at which the record has to say `there`; infinite if it does.
    tell_at: float


class Taker:
    """Takes the tasks that region `other` gave to region `own`. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, transport: Any, own: Client, there: Client, name: str, other: str) -> None:
        """`own` and `there` are clients for the databases of regions of this region, `name`, and of region `other`."""
        self._app, self._broker, self._own, self._there = app, transport.couchdb, own, there
        self._name, self._other = name, other
        self._messages, self._backend = ParcelMessages(transport), couchdb_backend_of(app)
        self.reset()

    def reset(self) -> None:
        """Forget which tasks were taken: all records will be read again."""
        self._taken: dict[str, _Taken] = {}
        self._look_ups = LookUps[_Record]()
        #: When records are read again whose tasks could not be taken, as monotonic times.
        self._delayed: dict[str, float] = {}

    @property
    def next_at(self) -> float:
        """The monotonic time at which `step` has something to do; infinite if it has not."""
        tells = (taken.tell_at for taken in self._taken.values())
        return min(min(tells, default=inf), self._look_ups.next_at, *self._delayed.values(), inf)

    def due(self) -> list[str]:
        """Return the ids of records that are to be taken now, because they could not be taken before."""
        now = time.monotonic()
        found = [doc_id for doc_id, at in self._delayed.items() if at <= now]
        for doc_id in found:
            del self._delayed[doc_id]
        return found

    def ended(self, doc_ids: Iterable[str]) -> None:
        """Note that records were deleted: their tasks have ended."""
        for doc_id in doc_ids:
            self._taken.pop(doc_id, None)
            self._delayed.pop(doc_id, None)

    def take(self, docs: Sequence[Document]) -> None:
        """Put the tasks of these records into their queues, unless they were."""
        docs = self._undisputed(docs)
        self._cancel([doc for doc in docs if 'cancelled' in doc and region.state_of(doc) in ('sent', 'there')])
        # A cancelled task that cannot be removed may end without a worker.
        self.ended(doc['_id'] for doc in docs if not region.is_takeable(doc) and 'cancelled' not in doc)
        new = [doc for doc in docs if region.is_takeable(doc) and doc['_id'] not in self._taken]
        for part in in_parts(new):
            self._take(part)

    def _undisputed(self, docs: Sequence[Document]) -> Sequence[Document]:
        """Return these records without those that home has withdrawn while this region took them, see `rivals`.

        If the message of the task was stored, the task stays here; otherwise home runs it.
        """
        found = rivals(self._there, list(filter(region.is_exclusive, docs)))
        withdrawn = [leaf for leaves in found.values() for leaf in leaves if region.state_of(leaf) == 'withdrawn']
        ids = {leaf['_id']: parcel.moved_id(region.SOURCE, leaf['_id']) for leaf in withdrawn}
        stored = self._broker.known([*ids.values()])
        lost = [
            (doc_id, leaf['_rev'])
            for doc_id, name in ids.items()
            for leaf in found[doc_id]
            if region.state_of(leaf) == ('withdrawn' if name in stored else 'there')
        ]
        delete_revisions(self._there, lost)  # what is left comes again
        return [doc for doc in docs if doc['_id'] not in ids]

    def _take(self, docs: Sequence[Document]) -> None:
        items, refused = self._messages.make(region.SOURCE, docs, self._publish)
        docs = self._claimed([doc for doc in docs if doc['_id'] in items]) + [d for d in docs if d['_id'] in refused]
        reasons = self._messages.store({doc['_id']: items[doc['_id']] for doc in docs if doc['_id'] in items})
        refused |= {doc_id: ParcelRefused(reason) for doc_id, reason in reasons.items()}
        self._refuse([(doc, refused[doc['_id']]) for doc in docs if doc['_id'] in refused])
        docs = [doc for doc in docs if doc['_id'] not in refused]
        at = time.monotonic() + region.THERE_SECONDS
        for doc in docs:
            is_told = region.state_of(doc) == 'there'
            self._taken[doc['_id']] = _Taken(doc['message']['headers']['task'], inf if is_told else at)
        merged = self._messages.merged.items()
        self._return([(doc_id, states.REVOKED, merged_into(task_id)) for doc_id, task_id in merged])
        # Nobody will say how these end.
        delete_current(self._there, [doc for doc in docs if self._is_silent(doc)])

    def step(self) -> None:
        """Say `there` in records whose tasks last, and return results for messages that ended without a worker."""
        now = time.monotonic()
        due = [doc_id for doc_id, taken in self._taken.items() if taken.tell_at <= now]
        for part in chunks(due, _BATCH_DOCS):
            docs = [doc for doc in self._there.find(part) if doc and region.state_of(doc) == 'sent']
            self._there.bulk([region.there(doc, self._there.clock.now()) for doc in docs])
            for doc_id in part:  # one that was changed meanwhile comes again
                self._taken[doc_id] = self._taken[doc_id]._replace(tell_at=inf)
        records = self._look_ups.take([_Record(region.SOURCE, doc_id) for doc_id in self._taken])
        self._return_stored(records)
        found = ends_of_messages(self._broker, [record for record in records if record.doc_id in self._taken])
        self._return([(record.doc_id, end.state, end.error or '') for record, end in found.items() if end])

    def _return_stored(self, records: Sequence[_Record]) -> None:
        """Return results that are stored here only, as that of a task whose code this region does not have."""
        if self._backend is None or not records:
            return
        taken = [(record.doc_id, region.task_id_of(record.doc_id)) for record in records]
        results = self._backend.store.read_many(self._backend.get_key_for_task(task_id) for _, task_id in taken)
        now, docs = self._own.clock.now(), list[Document]()
        for (doc_id, task_id), result in zip(taken, results, strict=True):
            if result and is_final(result):
                docs.append(region.returned(self._other, task_id, uuid.uuid4().hex, result, doc_id, now))
                del self._taken[doc_id]
        self._own.bulk(docs)

    def _claimed(self, docs: Sequence[Document]) -> list[Document]:
        """Return those of these records whose tasks this region may run; say `there` in the exclusive ones first."""
        exclusive = [doc for doc in docs if region.is_exclusive(doc) and region.state_of(doc) == 'sent']
        claims = [region.there(doc, self._there.clock.now()) for doc in exclusive]
        claimed = list[Document]()
        for doc, result in zip(claims, self._there.bulk(claims), strict=True):
            if result.is_proven:
                claimed.append({**doc, '_rev': result.rev})
            elif not result.is_conflict:  # with a conflict, another revision comes
                self._delayed[doc['_id']] = time.monotonic() + DELAY_SECONDS
        return [doc for doc in docs if doc not in exclusive] + claimed

    def _publish(self, doc: Document) -> None:
        message = message_of(doc, attached_body(self._there, doc))
        task_id = message['headers']['id']
        if doc['_id'] != region.record_id(self._name, task_id, doc['_id'].rpartition(':')[2]):
            raise ParcelRefused('the id of the record does not name its task')
        giver = Giver(self._name, self._own.address.database, self._other, task_id, doc['_id'])
        headers = {FROM_REGION: self._other, **message['headers'], GIVER: list(giver)}
        self._messages.publish({**message, 'headers': headers}, doc)

    def _refuse(self, refused: Sequence[tuple[Document, ParcelRefused]]) -> None:
        now = self._there.clock.now()
        delayed = [(doc, str(reason)) for doc, reason in refused if isinstance(reason, Unroutable)]
        self._delayed |= {doc['_id']: time.monotonic() + DELAY_SECONDS for doc, _ in delayed}
        delayed = [(doc, text) for doc, text in delayed if doc.get('delayed') != text]
        self._there.bulk([{**doc, 'delayed': text} for doc, text in delayed])
        final = [(doc, str(reason)) for doc, reason in refused if not isinstance(reason, Unroutable)]
        write(self._there, [parcel.refused(doc, text, now) for doc, text in final])
        for doc, text in delayed + final:
            logger.warning('task %s of region %s is not taken: %s', doc.get('id'), self._other, text)

    def _is_silent(self, doc: Document) -> bool:
        """Tell whether no result of a task returns."""
        return self._backend is None or bool(doc['message']['headers'].get('ignore_result'))

    def _cancel(self, docs: Sequence[Document]) -> None:
        """Remove the messages of cancelled tasks that no worker has claimed; tell the workers about the others."""
        ids = {parcel.moved_id(region.SOURCE, doc['_id']): doc for doc in docs}
        items = self._broker.find(list(ids)) if ids else []
        waiting = [item for item in items if item and workitem.is_waiting(item)]
        now = self._broker.clock.now()
        results = self._broker.bulk([workitem.dropped(item, now) for item in waiting])
        removed = {result.id for result in results if result.is_proven}
        known, over = self._broker.known(list(ids)), list[Document]()
        for name, doc in ids.items():
            # The message of a unique job has another id.
            is_job = JOB_KEY in headers_of(doc) and (doc['_id'] in self._taken or region.state_of(doc) == 'there')
            if name in removed or not (name in known or is_job):
                over.append(doc)
            else:
                self._app.control.revoke(region.task_id_of(doc['_id']), terminate=doc.get('terminate') is True)
                self._taken.setdefault(doc['_id'], _Taken(None, inf))
        self._return([(doc['_id'], states.REVOKED, 'it was cancelled') for doc in over])
        if self._backend is None:
            delete_current(self._there, over)

    def _return(self, ends: Sequence[tuple[str, str, str]]) -> None:
        """Return results: for each the id of the record, the state, and the reason."""
        docs, now = list[Document](), self._own.clock.now()
        for doc_id, state, reason in ends:
            task_id = region.task_id_of(doc_id)
            if self._backend is None or not task_id:
                continue
            taken = self._taken.pop(doc_id, None)
            found = outcome(self._backend, task_id, taken.task if taken else None, state, reason)
            docs.append(region.returned(self._other, task_id, uuid.uuid4().hex, found, doc_id, now))
        self._own.bulk(docs)
