"""The store: requests about the messages of one database.

Methods that take `until` stop deleting messages at that monotonic time; the next call goes on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from .. import design
from ..couchdb.bulk import BATCH_DOCS
from ..couchdb.client import LAST, Client, Document, Row, chunks
from ..couchdb.conflicts import write_each
from ..couchdb.group_commit import GroupCommit
from ..couchdb.shapes import both, exactly, maybe, members, number, revision, text
from ..couchdb.write_result import WriteResult
from ..design.rows import MALFORMED_DATE, ClaimCount, LeaseRow, QueueCount, revision_in
from ..documents import conflict_rules, dead_letter, validation, workitem
from ..documents.ids import CONSUMER, JOB, QUEUE
from ..documents.task_message import HIGHEST
from ..documents.types import WorkItem
from ..documents.unique_merge import once_id
from ..errors import DocumentTooLarge, RequestRefused, ServerUnavailable, Unstorable
from ..log import get_logger
from ..values import is_number
from . import waiting
from .unique_jobs import enqueue, keep_copies

logger = get_logger(__name__)

#: Seconds in the view `leases`, by kind and name (see `design.rows.LeaseRow`): CouchDB's `sum`, `count`, `min`, `max`.
LeaseStats = dict[str, dict[str, dict[str, float]]]

#: The shapes of rows of the views, and of their reductions by queue or kind.
_LEASES = members(key=exactly(text, maybe(text)), value=members(count=number, min=number, max=number))
_IDS = members(id=text)
_REVS = members(
    id=text, value=lambda value: revision(value[1] if isinstance(value, list) and len(value) == 2 else value)
)
_WAITING = both(_REVS, members(key=exactly(text, number, number)))
_QUEUE = members(key=exactly(lambda queue: True), value=number)  # the queue of a malformed item can be anything
_RANK = members(key=exactly(text, number), value=number)
_CLAIMED = members(key=exactly(text, text, lambda queue: True), value=members(count=number))

#: The most documents that housekeeping changes or deletes in one request.
MAX_BATCH_DOCS = 2 * BATCH_DOCS

#: The documents in the first read of a consumer's claims. Later reads are larger if the messages are small enough.
_FIRST_READ_DOCS = 16


class Store:
    """The messages of one database, which are WorkItem documents."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._commits: GroupCommit | None = None

    def close(self) -> None:
        """Close the idle connections; the store can still be used."""
        self.client.close()
        if self._commits is not None:
            self._commits.close()

    # -- publish

    def publish(self, docs: Sequence[WorkItem]) -> None:
        """Store new messages as `publish_each` does, and *raise* also the error of the first one that is refused."""
        for result in self.publish_each(docs):
            raise result.exception(self.client.address.url)

    def publish_each(self, docs: Sequence[WorkItem]) -> list[WriteResult]:
        """Store new messages, each once: one request for up to 1 MB, and more for each unique job.

        No process can store a message a second time, however late a request arrives, and even if the message was
        completed meanwhile: see `Client.create_once` and `unique_jobs`. `collect_outcomes` gets one outcome for each
        unique job that is not refused, in the order of `docs`.

        Return the results of the messages that CouchDB refuses, with their `once_id`; the others are stored. *Raises*
        `ServerUnavailable` (it is unknown which are stored: publish the same documents again), `AccessDenied`.
        """
        refused = list[WriteResult]()
        for doc in docs:
            if 'key' in doc:
                try:
                    enqueue(self.client, doc)
                except (DocumentTooLarge, RequestRefused, Unstorable) as exc:
                    refused.append(WriteResult.refused_by(once_id(doc), exc, self.client.address.url))
        if self._commits is None:
            self._commits = GroupCommit.of_new(self.client)
        if plain := [doc for doc in docs if 'key' not in doc]:
            try:
                results = self._commits.write(plain)
            except ServerUnavailable:
                if not self.client.has_other_nodes:
                    raise
                results = self._commits.write(plain)  # to another node: see `Client.has_other_nodes`
            refused += [result for result in results if not result.is_stored]
        return refused

    def delete_without_queue(self, docs: Collection[Mapping[str, Any]]) -> None:
        """Delete those of the messages `docs` that wait in a temporary queue which does not exist any more.

        Whoever has stored messages as waiting calls this: a publisher, and a consumer that has released them. Who
        deletes a queue deletes its messages after that. So whatever happens at the same time, no message is left. No
        request if no queue is temporary, else one, and two more for messages without a queue.
        """
        docs = [doc for doc in docs if doc.get('temporary') is True and isinstance(doc.get('queue'), str)]
        if not docs:
            return
        queues = sorted({doc['queue'] for doc in docs})
        found = self.client.find([QUEUE + queue for queue in queues])
        missing = {queue for queue, doc in zip(queues, found, strict=True) if doc is None}
        if ids := [doc['_id'] for doc in docs if doc['queue'] in missing]:
            now = self.client.clock.now()
            self._write(
                [workitem.dropped(doc, now) for doc in self.client.find(ids) if doc and workitem.is_waiting(doc)]
            )
            logger.debug('deleted %d messages of temporary queues that were deleted before', len(ids))

    # -- consume

    def each_ready(self, queue: str, sizes: Iterable[int]) -> Iterator[Document]:
        """Yield the documents of due messages as they are now; it reads as many as the caller needs.

        The highest priority is first, then the oldest message. A message may have been claimed since the view was read:
        check the document. `sizes` are the numbers of messages up to which it reads, one after the other, each from the
        beginning.
        """
        seen = set[str]()
        for size in sizes:
            [page] = waiting.read(self.client, [waiting.Ask(queue, size)], self.client.clock.now())
            rows = page.rows[:size]
            for part in chunks([row.id for row in rows if row.id not in seen], _FIRST_READ_DOCS):
                yield from (doc for doc in self.client.fetch(part) if doc)
            if len(rows) < size:
                return
            seen |= {row.id for row in rows}

    def planned(self, queues: Sequence[str], limit: int) -> list[Document]:
        """Return up to `limit` messages of these queues that are due later, the soonest first; two requests."""
        docs = self.client.fetch(
            [row.id for row in waiting.planned(self.client, queues, self.client.clock.now(), limit)]
        )
        return [doc for doc in docs if doc]

    # -- leases

    def leases(self) -> LeaseStats:
        """Return the statistics of the view `leases`, by kind and name; one request.

        All kinds of `design.rows.LeaseRow` are in it: `consumer`, `claim`, `slot`, `parked`, `queue`, `limit`,
        `failed` and `expiry`.
        """
        leases: LeaseStats = defaultdict(dict)
        for row in self.client.view(design.NAME, 'leases', _LEASES, group_level=2):
            lease = LeaseRow.from_row(row)
            leases[lease.kind][lease.name] = lease.stats
        return leases

    def claims(self, consumer: str) -> Iterator[Document]:
        """Yield the messages that a consumer has claimed; it reads them in batches, when the caller needs them."""
        rows = self.client.view(
            design.NAME, 'leases', _IDS, startkey=['claim', consumer], endkey=['claim', consumer, LAST], reduce=False
        )
        ids, count = [row['id'] for row in rows], _FIRST_READ_DOCS
        while ids:
            docs = [doc for doc in self.client.fetch(ids[:count]) if doc]
            ids, largest = ids[count:], max(map(workitem.size, docs), default=0)
            count = max(1, min(2 * count, MAX_BATCH_DOCS, self.client.request_size.bytes // max(1, largest)))
            yield from (
                doc
                for doc in docs
                if workitem.claimant(doc) == consumer and not self.client.unusable.has(doc['_id'], doc['_rev'])
            )

    def claim_counts(self) -> list[ClaimCount]:
        """Return how many messages each consumer has claimed, by queue; one request."""
        where = {'group_level': 3, 'startkey': ['claim'], 'endkey': ['claim', LAST]}
        return [ClaimCount.from_row(row) for row in self.client.view(design.NAME, 'leases', _CLAIMED, **where)]

    def release(self, docs: Iterable[Document]) -> int:
        """Release claimed messages and return the number of released ones.

        If another process has changed a message meanwhile, its change stays. Malformed messages become dead letters.
        """
        count, size, part = 0, 0, list[Mapping[str, Any]]()
        now = self.client.clock.now()
        for doc in docs:
            if part and (len(part) >= MAX_BATCH_DOCS or size + workitem.size(doc) > self.client.request_size.bytes):
                count, size, part = count + self._write_released(part), 0, []
            *copies, released = dead_letter.apart(_released(doc, now))
            keep_copies(self.client, copies)
            size, part = size + workitem.size(doc), [*part, released]
        return count + self._write_released(part)

    def _write_released(self, docs: Sequence[Mapping[str, Any]]) -> int:
        count = self._write(docs)
        self.delete_without_queue([doc for doc in docs if workitem.is_waiting(doc)])
        return count

    def decide_unproven(self, doc_id: str, rev: str, living: set[str], ended: Collection[str] = ()) -> bool:
        """Decide about an unproven claim of a message, and write the decision; return False if it must be tried again.

        `rev` is the revision of the claim, and `living` has the ids of living consumers. The claims of the consumers
        `ended` do not count, even if these live. See `conflict_rules.decide`.
        """
        leaves = self.client.leaves(doc_id)
        shown = self.client.fetch([doc_id])[0]
        winner, claimants = str(shown['_rev']) if shown else None, self._claimants(leaves, living).difference(ended)
        changes = conflict_rules.decide(leaves, winner, rev, claimants, self.client.clock.now())
        return changes is not None and write_each(self.client, changes)

    def resolve_conflict(
        self, leaves: list[Document], living: Collection[str], ended: Collection[str] = ()
    ) -> list[Mapping[str, Any]] | None:
        """Return the documents to write about a message with these leaves, or None to try again later.

        The claims of the consumers `ended` do not count, even if these live. See `conflict_rules.resolve_item`.
        """
        claimants = self._claimants(leaves, living).difference(ended)
        return conflict_rules.resolve_item(leaves, claimants, self.client.clock.now())

    def _claimants(self, leaves: list[Document], living: Collection[str]) -> set[str]:
        """Return the living claimants of a message; the index behind `living` may be older than their heartbeats."""
        names = {by for leaf in leaves if (by := workitem.claimant(leaf))}
        return (names & set(living)) | self.alive(names - set(living))

    def alive(self, names: Collection[str]) -> set[str]:
        """Return those names that are ids of existing Consumer documents: at most one request."""
        asked = sorted(name for name in names if name.startswith(CONSUMER))
        return {name for name, doc in zip(asked, self.client.find(asked), strict=True) if doc is not None}

    # -- queues

    def size(self, queue: str) -> int:
        """Return the number of ready messages in a queue: due, and not claimed. Those that wait for a slot count."""
        name = design.key_of(queue)
        return waiting.count(
            self.client,
            [
                {'startkey': [name], 'endkey': [name, HIGHEST, {}]},
                {'startkey': [name, design.PLANNED], 'endkey': [name, design.PLANNED, self.client.clock.now()]},
                {'startkey': [name, design.PARKED], 'endkey': [name, design.PARKED, {}]},
            ],
        )

    def is_empty(self, queue: str) -> bool:
        """Tell whether a queue has no message, neither ready nor planned nor claimed. Dead letters are in no queue."""
        if self.exceeds(queue, 0):
            return False
        return queue not in {claim.queue for claim in self.claim_counts()}

    def purge(self, queue: str, until: float = inf) -> int:
        """Delete the ready and the planned messages of a deleted queue, and return their number; keep claimed ones."""
        return self._delete_rows('waiting', lambda doc: True, until, **design.rows_of(queue))

    def purging(self, queue: str) -> Iterator[int]:
        """Delete the ready and the planned messages of a queue, part by part, and yield the number of each.

        Claimed ones are kept, and so is what is published meanwhile: it ends while publishers go on.
        """
        now, where, last = self.client.clock.now(), design.rows_of(queue), ''
        while rows := self.client.view(design.NAME, 'waiting', _WAITING, limit=MAX_BATCH_DOCS, reduce=False, **where):
            new = self._published_after(now, rows)
            old = [(row['id'], revision_in(row)) for row in rows if row['id'] not in new]
            # A unique job that was published again meanwhile stays, whatever its due date is.
            yield self._delete(old, lambda doc: workitem.ready_since({**doc, 'date': None}) <= now)
            if len(rows) < MAX_BATCH_DOCS or rows[-1]['id'] == last:
                return
            last, (name, rank, date) = rows[-1]['id'], rows[-1]['key']
            # Messages that are due at once are in the order of publishing: those after a new one are new.
            is_over = rank < design.PLANNED and date > now
            where |= {'startkey': [name, rank, {} if is_over else date], 'startkey_docid': last}

    def _published_after(self, date: float, rows: Sequence[Row]) -> set[str]:
        """Return the ids of the messages in rows of `waiting` that were published after a date; one request or none.

        Rows of messages that are due at once say when they were published. Of the others, most ids say it.
        """
        at_once = [row for row in rows if row['key'][1] < design.PLANNED]
        others = [row['id'] for row in rows[len(at_once) :]]
        derived = [doc_id for doc_id in others if ':' in doc_id and not doc_id.startswith(JOB)]
        docs = [doc for doc in self.client.fetch(derived) if doc] if derived else ()
        return {
            *(row['id'] for row in at_once if row['key'][2] > date),
            *(doc_id for doc_id in others if workitem.has_later_id(doc_id, date)),
            *(doc['_id'] for doc in docs if is_number(doc.get('published')) and doc['published'] > date),
        }

    # -- limits

    def drop_expired(self, until: float = inf) -> int:
        """Delete the expired messages that no consumer has claimed, and those that were kept long enough.

        Return their number.
        """
        now = self.client.clock.now()
        return self._delete_rows('expiring', lambda doc: workitem.has_expired(doc, now), until, endkey=now)

    def trim_failed(self, number: int) -> int:
        """Delete messages of failed tasks but the latest `number`, at most one batch; return how many were deleted."""
        where = {'startkey': ['failed', LAST], 'endkey': ['failed'], 'descending': True, 'skip': number}
        rows = self.client.view(design.NAME, 'leases', _IDS, **where, limit=MAX_BATCH_DOCS, reduce=False)
        docs = [doc for doc in self.client.fetch([row['id'] for row in rows]) if doc and workitem.is_dead(doc)]
        return self._write([workitem.deleted(doc) for doc in docs])

    def drop_older(self, queue: str, ttl: float, until: float = inf) -> int:
        """Delete messages that have been ready in a queue for more than `ttl` seconds, and return their number."""
        name, last = design.key_of(queue), self.client.clock.now() - ttl
        rows = self.client.view(design.NAME, 'waiting', _RANK, **design.rows_of(queue), group_level=2)
        return sum(
            self._delete_rows(
                'waiting',
                lambda doc: workitem.ready_since(doc) <= last,
                until,
                startkey=[name, row.rank, MALFORMED_DATE + 1],
                endkey=[name, row.rank, last],
            )
            for row in map(QueueCount.from_row, rows)
        )

    def queues_in_use(self) -> frozenset[str]:
        """Return the queues with messages that no consumer has claimed; one request."""
        rows = map(QueueCount.from_row, self.client.view(design.NAME, 'waiting', _QUEUE, group_level=1))
        return frozenset(row.queue for row in rows if row.queue is not None)

    def exceeds(self, queue: str, length: int) -> bool:
        """Tell whether a queue has more than `length` messages, ready or planned; one request."""
        return waiting.count(self.client, [design.rows_of(queue)]) > length

    def trim(self, queue: str, length: int, until: float = inf) -> int:
        """Delete the first messages of a queue, until `length` ready ones remain; return the number of deleted ones.

        One request if the queue has no more than `length` messages, ready or planned.
        """
        count = 0
        while self.exceeds(queue, length) and (excess := self.size(queue) - length) > 0:
            ask = waiting.Ask(queue, min(excess, MAX_BATCH_DOCS))
            [page] = waiting.read(self.client, [ask], self.client.clock.now())
            # Count again after the read: another process may have dropped some of these messages, and then fewer are
            # over the limit.
            excess = self.size(queue) - length
            rows = [(row.id, row.rev) for row in page.rows if not row.is_malformed]
            deleted = self._delete(rows[: max(0, min(excess, MAX_BATCH_DOCS))], lambda doc: True)
            count += deleted
            if not deleted or time.monotonic() >= until:
                break
        return count

    def _delete_rows(self, view: str, unwanted: Callable[[Document], bool], until: float, **where: Any) -> int:
        count = 0
        while rows := self.client.view(design.NAME, view, _REVS, limit=MAX_BATCH_DOCS, reduce=False, **where):
            deleted = self._delete([(row['id'], revision_in(row)) for row in rows], unwanted)
            count += deleted
            if not deleted or time.monotonic() >= until:
                break  # other processes are deleting the same messages, or the time is over
        return count

    def _delete(self, found: Sequence[tuple[str, str]], unwanted: Callable[[Document], bool]) -> int:
        """Delete messages by id and revision without reading them; return the number of deleted ones.

        If a message has changed since the view read it, its deletion is in conflict, and the message stays. A unique
        job is read first, because the row of the view is not enough: the job may have further messages in `next`, which
        take its place, and `unwanted` may need its member `sent`.
        """
        now = self.client.clock.now()
        changes = [
            workitem.dropped({'_id': doc_id, '_rev': rev}, now) for doc_id, rev in found if not doc_id.startswith(JOB)
        ]
        jobs = self.client.fetch([doc_id for doc_id, _ in found if doc_id.startswith(JOB)])
        changes += [workitem.dropped(doc, now) for doc in jobs if doc and _may_drop(doc) and unwanted(doc)]
        return self._write(changes)

    def _write(self, docs: Sequence[Mapping[str, Any]]) -> int:
        """Write documents, and return how many were stored; note those that CouchDB always refuses as unusable."""
        results = self.client.bulk(docs)
        for doc, result in zip(docs, results, strict=True):
            if result.is_permanent:
                self.client.unusable.add(doc['_id'], doc.get('_rev', ''), result.reason)
        return sum(result.is_stored for result in results)


def _may_drop(job: Document) -> bool:
    return workitem.is_waiting(job) or (workitem.is_dead(job) and bool(dead_letter.error_in(job)))


def _released(doc: Document, now: float) -> Document:
    """Return `doc` released, or as a dead letter if it is malformed: its deliveries could not be counted."""
    reason = validation.malformed_reason(doc)
    return dead_letter.made_of(doc, reason, now) if reason else workitem.release(doc)
