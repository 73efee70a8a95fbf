"""The taker: puts tasks of another region into the queues of this one, and says there what became of them.

The records of the other region say which tasks it has given away (`kombu_couchdb.contrib.regions.region`). The taker
says `there` in a record, by revision, and then publishes its message under an id that is derived from the record's id,
if that was never stored. So it is stored once, even if the leader is killed at any point, two leaders work for a
moment, or two servers have the name of this region.

Whoever ends the task returns how it ended. The taker does if the message ends without a worker, or is cancelled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from celery import states

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.parcel import FROM_REGION, GIVER
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.contrib.regions.region import Giver
from kombu_couchdb.couchdb.client import Client, Document, chunks
from kombu_couchdb.couchdb.conflicts import delete_current, delete_docs, rivals
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.ids import JOB_KEY
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.log import get_logger

from ...backend import couchdb_backend_of
from ..parcels.inbox import DueTimes, Inbox
from ..parcels.look_ups import ends_of_messages, is_old, pause
from ..parcels.messages import ParcelMessages, Unroutable, attached_body, in_parts
from ..parcels.parcel_checks import ParcelRefused, message_of
from ..parcels.receipts import write
from ..parcels.room import PARCEL
from .outcomes import date_in, merged_into, outcome

logger = get_logger(__name__)

#: The pause before something is tried again that is not possible yet, in seconds.
DELAY_SECONDS = 30.0

#: The messages that are looked up together.
_LOOK_UP_DOCS = 200


class _Taken(NamedTuple):
    #: The queue of a task that was lent, '' for others.
    lent_to: str
    #: The monotonic time at which it was taken.
    at: float


class Taker:
    """Takes the tasks that region `other` gave to region `own`. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, transport: Any, own: Client, arriving: Inbox, name: str, other: str) -> None:
        """`own` is a client for the database of regions of this region, `name`; `arriving` has that of `other`."""
        self._app, self._broker, self._own, self._there = app, transport.couchdb, own, arriving.client
        self._arriving, self._name, self._other = arriving, name, other
        self._messages, self._backend = ParcelMessages(transport), couchdb_backend_of(app)
        self.reset()

    def reset(self) -> None:
        """Forget which tasks were taken: all records will be read again."""
        #: The tasks that were taken and have not ended, by id of the record; and when their messages are looked up.
        self._taken: dict[str, _Taken] = {}
        self._due = DueTimes()
        #: How many lent tasks have ended here since this process was started, by queue.
        self.done = Counter[str]()
        #: The records that another server with the name of this region has taken.
        self.foreign = set[str]()

    @cached_property
    def _by(self) -> str:
        return region.identity(self._broker)

    @property
    def next_at(self) -> float:
        """The monotonic time at which `look` has something to do."""
        return self._due.next_at

    @property
    def lent(self) -> Counter[str]:
        """The number of tasks that were lent to this region and have not ended, by queue."""
        return Counter(taken.lent_to for taken in self._taken.values() if taken.lent_to)

    def ended(self, doc_ids: Iterable[str]) -> None:
        """Note that records were deleted, or withdrawn: their tasks have ended, or run elsewhere."""
        for doc_id in doc_ids:
            self.foreign.discard(doc_id)
            if (taken := self._taken.pop(doc_id, None)) and taken.lent_to:
                self.done[taken.lent_to] += 1

    def take(self, docs: Sequence[Document]) -> None:
        """Put the tasks of these records into their queues, unless they were, or look how their messages have ended."""
        self._obey([doc for doc in docs if region.is_order(doc)])
        docs = self._undisputed([doc for doc in docs if not region.is_order(doc)])
        mine = [doc for doc in docs if region.is_taken_by(doc, self._by)]
        self.foreign |= {doc['_id'] for doc in docs if region.state_of(doc) == 'there'} - {doc['_id'] for doc in mine}
        self.ended(doc['_id'] for doc in docs if region.state_of(doc) in ('withdrawn', 'refused'))
        self._cancel([doc for doc in mine if 'cancelled' in doc])
        new = [doc for doc in docs if region.is_takeable(doc, self._by) and 'cancelled' not in doc]
        for part in in_parts([doc for doc in new if doc['_id'] not in self._taken]):
            self._take(part)
        self._look_up([doc for doc in mine if doc['_id'] in self._taken])

    def _undisputed(self, docs: Sequence[Document]) -> Sequence[Document]:
        """Return these records without those that home has withdrawn while this region took them, see `rivals`.

        If the message of the task was stored, the task stays here; otherwise home runs it.
        """
        found = rivals(self._there, docs)
        withdrawn = [leaf for leaves in found.values() for leaf in leaves if region.state_of(leaf) == 'withdrawn']
        ids = {leaf['_id']: parcel.moved_id(region.SOURCE, leaf['_id']) for leaf in withdrawn}
        stored = self._broker.known([*ids.values()])
        lost = [
            leaf
            for doc_id, name in ids.items()
            for leaf in found[doc_id]
            if region.state_of(leaf) == ('withdrawn' if name in stored else 'there')
        ]
        delete_docs(self._there, lost)  # what is left comes again
        return [doc for doc in docs if doc['_id'] not in ids]

    def _take(self, docs: Sequence[Document]) -> None:
        items, refused = self._messages.make(region.SOURCE, docs, self._publish)
        docs = self._claimed([doc for doc in docs if doc['_id'] in items]) + [d for d in docs if d['_id'] in refused]
        reasons = self._messages.store({doc['_id']: items[doc['_id']] for doc in docs if doc['_id'] in items})
        refused |= {doc_id: ParcelRefused(reason) for doc_id, reason in reasons.items()}
        self._refuse([(doc, refused[doc['_id']]) for doc in docs if doc['_id'] in refused])
        docs = [doc for doc in docs if doc['_id'] not in refused]
        for doc in docs:
            self._note(doc['_id'], items[doc['_id']][0]['queue'] if 'lent' in doc else '')
        merged = [(doc, self._messages.merged[doc['_id']]) for doc in docs if doc['_id'] in self._messages.merged]
        self._return([(doc, states.REVOKED, merged_into(task_id)) for doc, task_id in merged])
        if self._backend is None:  # nobody will say how these end
            delete_current(self._there, docs)

    def look(self) -> None:
        """Look up messages in the own database, and read the records of those that ended without a worker."""
        now, due = time.monotonic(), [doc_id for doc_id in self._due.take() if doc_id in self._taken]
        for doc_id in due:
            self._due.put([doc_id], pause(self._taken[doc_id].at, now))
        for part in chunks(due, _LOOK_UP_DOCS):
            found = ends_of_messages(self._broker, [(region.SOURCE, doc_id) for doc_id in part])
            self._arriving.put_back(doc_id for (_, doc_id), end in found.items() if end)

    def _note(self, doc_id: str, lent_to: str) -> None:
        now = time.monotonic()
        self._taken[doc_id] = _Taken(lent_to, now)
        self._due.put([doc_id], pause(now, now))

    def _look_up(self, docs: Sequence[Document]) -> None:
        """Return results for messages that ended without a worker."""
        now = self._there.clock.now()
        old = {(region.SOURCE, doc['_id']): doc for doc in docs if is_old(date_in(doc, 'taken'), now)}
        found = ends_of_messages(self._broker, [*old]) if old else {}
        self._return([(old[key], end.state, end.reason) for key, end in found.items() if end])

    def _claimed(self, docs: Sequence[Document]) -> list[Document]:
        """Say `there` in these records; return those whose tasks this server may run."""
        claimed = [doc for doc in docs if region.state_of(doc) == 'there']
        claims = [region.there(doc, self._by, self._there.clock.now()) for doc in docs if doc not in claimed]
        for doc, result in zip(claims, self._there.bulk(claims), strict=True):
            if result.is_proven:
                claimed.append({**doc, '_rev': result.rev})
            elif not result.is_conflict:  # with a conflict, another revision comes
                self._arriving.put_back([doc['_id']], DELAY_SECONDS)
        return claimed

    def _publish(self, doc: Document) -> None:
        message = message_of(doc, attached_body(self._there, doc))
        task_id = message['headers']['id']
        if doc['_id'] != region.record_id(self._name, task_id, doc['_id'].rpartition(':')[2]):
            raise ParcelRefused('the id of the record does not name its task')
        giver = Giver(self._name, self._own.address.database, self._other, task_id, doc['_id'])
        # The receipt of a parcel is in the other region.
        own = {name: value for name, value in message['headers'].items() if name != PARCEL}
        headers = {FROM_REGION: self._other, **own, GIVER: list(giver)}
        self._messages.publish({**message, 'headers': headers}, doc)

    def _refuse(self, refused: Sequence[tuple[Document, ParcelRefused]]) -> None:
        now = self._there.clock.now()
        delayed = [(doc, str(reason)) for doc, reason in refused if isinstance(reason, Unroutable)]
        self._arriving.put_back([doc['_id'] for doc, _ in delayed], DELAY_SECONDS)
        delayed = [(doc, text) for doc, text in delayed if doc.get('delayed') != text]
        self._there.bulk([{**doc, 'delayed': text} for doc, text in delayed])
        final = [(doc, str(reason)) for doc, reason in refused if not isinstance(reason, Unroutable)]
        written = write(self._there, [parcel.refused(doc, text, now) for doc, text in final])
        self._arriving.put_back([result.id for result in written if not result.is_stored], DELAY_SECONDS)
        for doc, text in delayed + final:
            logger.warning('task %s of region %s is not taken: %s', doc.get('id'), self._other, text)

    def _obey(self, orders: Sequence[Document]) -> None:
        """Revoke tasks that were given to this region by another one, or retry those that have failed here."""
        for doc in orders:
            if doc['_id'].endswith(':retry'):
                task_id = region.task_id_of(doc['_id'])
                failures = import_module('celery_couchdb.failures').Failures(self._app, self._broker)
                _, refused = failures.retry(failures.named([task_id])[task_id])
                for reason in refused.values():
                    logger.warning('task %s, which %s wants to be retried, is not: %s', task_id, self._other, reason)
            else:
                self._revoke(doc)
        self._arriving.put_back(delete_current(self._there, orders), DELAY_SECONDS)

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
            if name in removed or not (name in known or JOB_KEY in headers_of(doc)):
                over.append(doc)
            else:
                self._revoke(doc)
                if doc['_id'] not in self._taken:
                    self._note(doc['_id'], '')
        self._return([(doc, states.REVOKED, 'it was cancelled') for doc in over])
        if self._backend is None:
            self._arriving.put_back(delete_current(self._there, over), DELAY_SECONDS)

    def _revoke(self, doc: Document) -> None:
        self._app.control.revoke(region.task_id_of(doc['_id']), terminate=doc.get('terminate') is True)

    def _return(self, ends: Sequence[tuple[Document, str, str]]) -> None:
        """Return results: for each the record, the state, and the reason."""
        if self._backend is None or not ends:
            return
        now, docs = self._own.clock.now(), list[Document]()
        for doc, state, reason in ends:
            doc_id, task_id = doc['_id'], region.task_id_of(doc['_id'])
            task = doc.get('task') if isinstance(doc.get('task'), str) else None
            result = outcome(self._backend, task_id, task, state, reason)
            tag = doc_id.rpartition(':')[2]  # until home deletes the record, the message is looked up again
            docs.append(region.returned(self._other, task_id, tag, result, doc_id, now))
        stored = zip(docs, self._own.create_once(docs), strict=True)
        self.ended(doc['record'] for doc, result in stored if result.is_stored)
