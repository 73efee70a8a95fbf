"""Home: what a region does about the records of all tasks that it gave to other ones.

The record exists until the task has ended: its end has returned, or home has decided otherwise (see `region.decide`).
Home changes a record by its revision, so that it decides nothing that the other region has decided. It makes requests
to its own region only: an outage of another one delays nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import states
from celery.worker import state

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import delete_current, rivals
from kombu_couchdb.log import get_logger

from ...backend import couchdb_backend_of
from ..parcels.inbox import Inbox
from ..parcels.messages import ParcelMessages, attached_body
from ..parcels.parcel_checks import ParcelRefused, message_of
from .outcomes import ResultsAtHome, merged_into
from .taker import DELAY_SECONDS

logger = get_logger(__name__)

#: The records that are read together.
_BATCH_DOCS = 100


class Home:
    """The records of tasks that this region gave to others, also to removed ones. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, transport: Any, own: Client, wake: Callable[[], None]) -> None:
        """`own` is a client for the database of regions of this region. Another thread calls `wake()` when it changes.

        The connected `transport` is that of the broker.
        """
        self._broker = transport.couchdb
        self._own, self._name, self._regions = own, transport.options.region, transport.options.regions
        self._messages, self._backend = ParcelMessages(transport), couchdb_backend_of(app)
        self._results = ResultsAtHome(app, own)
        self._inbox = Inbox(own, wake, region.RECORD)
        #: Since the last look of the owner: the regions that have not taken what was lent to them, and whether lent
        #: tasks have ended.
        self.silent, self.has_room = set[str](), False
        self.reset()

    def reset(self) -> None:
        """Forget the records, and follow nothing until the next call of `step`, which reads all again."""
        self._inbox.reset()
        #: The queue of each task that was lent, '' for the others; by id of the record.
        self._records: dict[str, str] = {}
        #: When results are looked for that wait in the broker's database, and the id of the last one of that look.
        self._waiting_at, self._waiting_after = 0.0, ''

    @property
    def next_at(self) -> float:
        """The monotonic time at which `step` has something to do."""
        return min(self._inbox.next_at, self._waiting_at)

    @property
    def lent(self) -> Counter[tuple[str, str]]:
        """The number of tasks that are lent, by region and queue."""
        return Counter((region.region_of(doc_id), queue) for doc_id, queue in self._records.items() if queue)

    def note_lent(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Note records that were just stored; their changes come later."""
        self._records |= {doc['_id']: doc['routing_key'] for doc in records}
        self._inbox.put_back([doc['_id'] for doc in records], region.LEND_SECONDS)  # one may be gone already

    def close(self) -> None:
        """End the thread of the changes feed."""
        self._inbox.close()

    def step(self) -> None:
        """Decide about records that are due or have changed; of many it takes some. See `next_at`."""
        try:
            # Others are somebody else's documents.
            docs = {doc_id: doc for doc_id, doc in self._inbox.take(_BATCH_DOCS).items() if region.task_id_of(doc_id)}
            for doc_id, doc in docs.items():
                self._note(doc_id, doc)
        except BaseException:
            self._inbox.repeat()
            raise
        self._move_waiting()

    def _move_waiting(self) -> None:
        """Move results for other regions that wait in the broker's database: that of regions has refused them."""
        if time.monotonic() < self._waiting_at:
            return
        self._waiting_at = time.monotonic() + DELAY_SECONDS  # also if the database refuses the whole request
        rows = self._broker.id_range(region.RETURNED, docs=True, limit=_BATCH_DOCS, after=self._waiting_after or None)
        self._waiting_after = rows[-1]['id'] if len(rows) >= _BATCH_DOCS else ''
        waiting = [row['doc'] for row in rows if row['doc'].get('type') == 'Returned']
        moved = zip(waiting, self._own.create_once(waiting) if waiting else (), strict=True)
        delete_current(self._broker, [doc for doc, result in moved if result.is_stored])
        if self._waiting_after:
            self._waiting_at = 0.0  # those that are refused again do not keep the others from being moved

    def cancel_revoked(self) -> None:
        """Cancel the lent tasks that were revoked here: the workers of other regions do not learn of it otherwise."""
        revoked = [
            doc_id for doc_id, queue in self._records.items() if queue and region.task_id_of(doc_id) in state.revoked
        ]
        docs = [doc for doc in self._own.find(revoked) if doc and 'cancelled' not in doc] if revoked else []
        self._own.bulk([{**doc, 'cancelled': self._own.clock.now()} for doc in docs])

    def _note(self, doc_id: str, doc: Document | None) -> None:
        """Note a record that has changed, None for a deleted one. Decide about it if it is due."""
        if doc is None:
            self.has_room |= bool(self._records.pop(doc_id, ''))
            return
        self._records[doc_id] = str(doc.get('routing_key') or '') if 'lent' in doc else ''
        now = self._own.clock.now()
        decision = region.decide(doc, self._name, now)
        if decision is None:
            if (due := region.due_at(doc)) is not None:
                self._inbox.put_back([doc_id], due - now)
        elif any(region.state_of(leaf) == 'there' for leaf in rivals(self._own, [doc]).get(doc_id, ())):
            self._inbox.put_back([doc_id], DELAY_SECONDS)  # the other region ends the conflict
        elif decision.what == 'run':
            self._run(doc, decision.where)
        elif not doc.get('told') and not self._end(doc, decision):
            self._inbox.put_back([doc_id], DELAY_SECONDS)

    def _run(self, doc: Document, where: str) -> None:
        """Run the task of a record in the region `where`, and delete the record. It is safe to repeat this."""
        if where not in self._regions:
            self._inbox.put_back([doc['_id']], DELAY_SECONDS)
            reason = f'{where!r:.80} is not one of the regions'
            if not doc.get('delayed'):  # the other region may have written why it has not taken it
                logger.warning('task %s cannot run in another region yet: %s', doc.get('id'), reason)
                self._own.bulk([{**doc, 'delayed': reason}])
            return
        if region.state_of(doc) != 'withdrawn':
            other = region.region_of(doc['_id'])
            logger.warning('region %s has not taken task %s: it runs in %s', other, doc.get('id'), where)
            self.silent |= {other} if 'lent' in doc else set()
            if (changed := self._withdrawn(doc, where)) is None:
                return
            doc = changed
        reason = self._publish_here(doc) if where == self._name else self._give(doc, where)
        if reason:
            self._own.bulk([parcel.refused(doc, reason, self._own.clock.now())])
        else:
            self._inbox.put_back(delete_current(self._own, [doc]), DELAY_SECONDS)

    def _withdrawn(self, doc: Document, run_in: str) -> Document | None:
        """Withdraw a record; return None if the other region was faster, or if this comes again."""
        doc = region.withdrawn(doc, run_in)
        [result] = self._own.bulk([doc])
        if result.is_refused:
            logger.error('the record %s cannot be withdrawn: %s', doc['_id'], result.reason)
            self._inbox.put_back([doc['_id']], DELAY_SECONDS)
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

    def _end(self, doc: Document, decision: region.HomeDecision) -> bool:
        """Store the result of a task that does not run; return False if it is refused for now.

        The record of a task that the other region has refused stays. If this process is killed before it has noted that
        it has told so, errbacks are called once more.
        """
        if decision.what == 'failed':
            is_stored = self._results.store_outcome(doc, states.FAILURE, decision.reason)
            if is_stored:
                self._results.fail_next(doc, decision.reason)
                self._own.bulk([{**doc, 'told': True}])
            return is_stored
        if region.state_of(doc) != 'withdrawn':
            if (changed := self._withdrawn(doc, '')) is None:
                return True
            doc = changed
        is_stored = self._results.store_outcome(doc, states.REVOKED, 'it was cancelled')
        if is_stored:
            self._inbox.put_back(delete_current(self._own, [doc]), DELAY_SECONDS)
        return is_stored
