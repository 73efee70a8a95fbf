"""Every request about WorkItems."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

from .. import design
from ..couchdb.client import LAST, Client, Document, chunks
from ..couchdb.conflicts import write_each
from ..couchdb.group_commit import GroupCommit
from ..couchdb.shapes import anything, exactly, maybe, members, number, revision, text
from ..couchdb.uncertain import never_stored
from ..couchdb.write_result import WriteResult
from ..design.rows import MALFORMED_DATE, ClaimCount, Lease, QueueCount, WaitingRow, revision_in
from ..documents import conflict_rules, dead_letter, workitem
from ..documents.ids import CONSUMER, JOB
from ..documents.types import Parcel, Published, WorkItem
from ..errors import ServerUnavailable
from ..log import get_logger
from . import waiting
from .unique_jobs import enqueue

__all__ = ['Store']

logger = get_logger(__name__)

_Published = TypeVar('_Published', WorkItem, Parcel)

#: The rows of the views, and of their reductions by queue or kind.
_REVS = members(
    id=text, value=lambda value: revision(value[1] if isinstance(value, list) and len(value) == 2 else value)
)
_RANK = members(key=exactly(text, number), value=number)
_LEASES = members(key=exactly(text, maybe(text)), value=members(count=number, min=number, max=number))
_IDS = members(id=text)
_CLAIMED = members(key=exactly(text, text, anything), value=members(count=number))

#: Documents published in one request.
_PUBLISHED = 5000
#: Documents rewritten or deleted in one request by housekeeping, and read in its first.
_BATCH, _FIRST = 500, 16


class Store:
    """The WorkItems of one database."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._commits: GroupCommit | None = None

    def close(self) -> None:
        """Close the idle connections; the store can still be used."""
        self.client.close()
        if self._commits is not None:
            self._commits.close()

    # -- publish

    def publish(self, docs: Sequence[Published]) -> None:
        """Store new items, in one request, and one more for each unique job. Storing the same twice is storing them once.

        *Raises* `ServerUnavailable` (whether they are stored is unknown: publish the same documents again),
        `DocumentTooLarge` (of one message, nothing is stored), `AccessDenied`.
        """
        for doc in docs:
            if 'key' in doc:
                enqueue(self.client, doc)
        docs = [doc for doc in docs if 'key' not in doc]
        if self._commits is None:
            self._commits = GroupCommit.of(self.client)
        for part in chunks(docs, _PUBLISHED):
            try:
                results = self._commits.write(part)
            except ServerUnavailable as exc:
                if not (exc.was_cut or self.client.has_other_nodes):
                    raise
                # They may have been stored, and completed messages must not appear again. An error would make kombu publish
                # them again, under new ids.
                left = never_stored(self.client, part)
                results = self._commits.write(left) if left else []
            for result in results:
                # A conflict means that an earlier attempt was stored.
                if result.is_refused:
                    raise result.exception(self.client.address.url)

    def publish_once(self, docs: Sequence[WorkItem]) -> list[WriteResult]:
        """Store those of new items under whose ids there never was one; two requests, and one more for each unique job.

        Return the results of those that CouchDB refused. *Raises* `ServerUnavailable`: publish the same documents again. No
        process can store one a second time, not even one that was paused while another did the same for it: see
        `Bulk.create_once`.
        """
        docs = self.unpublished(docs)
        for doc in docs:
            if 'key' in doc:
                enqueue(self.client, doc)
        return [
            result
            for result in self.client.create_once([doc for doc in docs if 'key' not in doc])
            if not result.is_stored
        ]

    def unpublished(self, docs: Sequence[_Published]) -> list[_Published]:
        """Return those of new items under whose ids there never was one, and the unique jobs, which look for themselves."""
        missing = {doc['_id'] for doc in never_stored(self.client, docs)}
        return [doc for doc in docs if 'key' in doc or doc['_id'] in missing]

    # -- consume

    def ready(self, queue: str, limit: int) -> list[WaitingRow]:
        """Return up to `limit` items that are due, with their documents, next first: highest priority, then oldest. Two requests.

        An item may have been claimed a moment ago: its document decides.
        """
        [page] = waiting.read(self.client, [waiting.Ask(queue, limit)], self.client.clock.now())
        rows = page.rows[:limit]
        return [
            row._replace(doc=doc) for row, doc in zip(rows, self.client.fetch([row.id for row in rows]), strict=True)
        ]

    def planned(self, queues: Sequence[str], limit: int) -> list[Document]:
        """Return up to `limit` items of these queues that are planned for later, the soonest first. Two requests."""
        docs = self.client.fetch(
            [row.id for row in waiting.planned(self.client, queues, self.client.clock.now(), limit)]
        )
        return [doc for doc in docs if doc]

    # -- leases

    def leases(self) -> dict[str, dict[str, Document]]:
        """Return statistics of `expires` in five groups, by name: `consumer`, `claim` (by consumer), `queue`, `limit`, `expiry`.

        `limit` has the queues with a message TTL or a length limit, `expiry` all messages that expire, under None. The
        statistics are CouchDB's `_stats`: `sum`, `count`, `min`, `max`. One request.
        """
        leases: dict[str, dict[str, Document]] = {'consumer': {}, 'claim': {}, 'queue': {}, 'limit': {}, 'expiry': {}}
        for row in self.client.view(design.NAME, 'leases', _LEASES, group_level=2):
            lease = Lease.of(row)
            leases.setdefault(lease.kind, {})[lease.name] = lease.stats
        return leases

    def claims(self, consumer: str) -> Iterator[Document]:
        """Yield the items that a consumer has claimed; they are read some at a time, as they are asked for."""
        rows = self.client.view(
            design.NAME, 'leases', _IDS, startkey=['claim', consumer], endkey=['claim', consumer, LAST], reduce=False
        )
        ids, count = [row['id'] for row in rows], _FIRST
        while ids:
            docs = [doc for doc in self.client.fetch(ids[:count]) if doc]
            ids, largest = ids[count:], max(map(workitem.size, docs), default=0)
            count = max(1, min(2 * count, _BATCH, self.client.request_bytes // max(1, largest)))
            yield from (
                doc
                for doc in docs
                if workitem.claimant(doc) == consumer and not self.client.unusable.has(doc['_id'], doc['_rev'])
            )

    def release(self, docs: Iterable[Document]) -> int:
        """Give claimed items back to their queues and return how many; who changed one meanwhile keeps it."""
        count, size, part = 0, 0, list[Mapping[str, Any]]()
        now = self.client.clock.now()
        for doc in docs:
            if part and (len(part) >= _BATCH or size + workitem.size(doc) > self.client.request_bytes):
                count, size, part = count + self._written(part), 0, []
            size, part = size + workitem.size(doc), [*part, *dead_letter.apart(releasable(doc, now), now)]
        return count + self._written(part)

    def _written(self, docs: Sequence[Mapping[str, Any]]) -> int:
        results = self.client.bulk(docs)
        for doc, result in zip(docs, results, strict=True):
            if result.is_permanent:
                self.client.unusable.note(doc['_id'], doc.get('_rev'), result.reason)
        return sum(result.is_stored for result in results)

    def settle_unproven(self, doc_id: str, rev: str, living: set[str]) -> bool:
        """Do what is to be done about a claim that a cluster did not prove; tell whether that was all."""
        leaves = self.client.leaves(doc_id)
        seen = self.client.fetch([doc_id])[0]
        changes = conflict_rules.decide(
            leaves, str(seen['_rev']) if seen else None, rev, self._claimants(leaves, living), self.client.clock.now()
        )
        return changes is not None and write_each(self.client, changes)

    def heal(self, leaves: list[Document], living: Collection[str]) -> list[Mapping[str, Any]] | None:
        """Return what is to be written about an item with these leaves; see `conflict_rules.resolve`."""
        return conflict_rules.resolve(leaves, self._claimants(leaves, living), self.client.clock.now())

    def _claimants(self, leaves: list[Document], living: Collection[str]) -> set[str]:
        """Return those of the claimants that live: the view which said so may have lagged behind."""
        names = {by for leaf in leaves if (by := workitem.claimant(leaf))}
        return (names & set(living)) | self.alive(names - set(living))

    def alive(self, names: Collection[str]) -> set[str]:
        """Return those of these ids that are of consumers whose documents are there; what only calls itself one is none."""
        asked = sorted(name for name in names if name.startswith(CONSUMER))
        return {name for name, doc in zip(asked, self.client.find(asked), strict=True) if doc is not None}

    # -- queues

    def size(self, queue: str) -> int:
        """Return how many items of a queue are ready: neither claimed nor planned for later."""
        name = design.key_of(queue)
        return waiting.count(
            self.client,
            [
                {'startkey': [name], 'endkey': [name, workitem.HIGHEST, {}]},
                {'startkey': [name, design.PLANNED], 'endkey': [name, design.PLANNED, self.client.clock.now()]},
            ],
        )

    def is_empty(self, queue: str) -> bool:
        """Tell whether a queue has no item that is ready, planned for later, or claimed. Dead letters are in no queue."""
        if self.exceeds(queue, 0):
            return False
        rows = self.client.view(
            design.NAME, 'leases', _CLAIMED, startkey=['claim'], endkey=['claim', LAST], group_level=3
        )
        return queue not in {ClaimCount.of(row).queue for row in rows}

    def purge(self, queue: str, until: float = inf) -> int:
        """Delete what waits in a queue, now or for later, and return how many; claimed items are left.

        As with those below, from the monotonic time `until` on the rest is left.
        """
        return self._drop('waiting', lambda doc: True, until, **design.rows_of(queue))

    # -- limits

    def drop_expired(self, until: float = inf) -> int:
        """Delete what has expired and return how many that were."""
        now = self.client.clock.now()
        return self._drop('expiring', lambda doc: workitem.has_expired(doc, now), until, endkey=now)

    def drop_older(self, queue: str, ttl: float, until: float = inf) -> int:
        """Delete what has been ready in a queue for more than `ttl` seconds, and return how many that were."""
        name, last = design.key_of(queue), self.client.clock.now() - ttl
        rows = self.client.view(design.NAME, 'waiting', _RANK, **design.rows_of(queue), group_level=2)
        return sum(
            self._drop(
                'waiting',
                lambda doc: workitem.ready_since(doc) <= last,
                until,
                startkey=[name, row.rank, MALFORMED_DATE + 1],
                endkey=[name, row.rank, last],
            )
            for row in map(QueueCount.of, rows)
        )

    def exceeds(self, queue: str, length: int) -> bool:
        """Tell whether more than `length` items wait in a queue, those that are planned for later included."""
        return waiting.count(self.client, [design.rows_of(queue)]) > length

    def trim(self, queue: str, length: int, until: float = inf) -> int:
        """Delete those first in line of more than `length` ready items, and return how many that were; one request if none is."""
        count = 0
        while self.exceeds(queue, length) and (excess := self.size(queue) - length) > 0:
            ask = waiting.Ask(queue, min(excess, _BATCH))
            [page] = waiting.read(self.client, [ask], self.client.clock.now())
            # Counted again after they were read: others may have dropped some of them meanwhile, and none too many shall go.
            excess = self.size(queue) - length
            rows = [(row.id, row.rev) for row in page.rows if not row.is_malformed]
            deleted = self._delete(rows[: max(0, min(excess, _BATCH))], lambda doc: True)
            count += deleted
            if not deleted or time.monotonic() >= until:
                break
        return count

    def _drop(self, view: str, unwanted: Callable[[Document], bool], until: float, **where: Any) -> int:
        count = 0
        while rows := self.client.view(design.NAME, view, _REVS, limit=_BATCH, reduce=False, **where):
            deleted = self._delete([(row['id'], revision_in(row)) for row in rows], unwanted)
            count += deleted
            if not deleted or time.monotonic() >= until:
                break  # others are faster: what is left is theirs; or it is left for later
        return count

    def _delete(self, found: Sequence[tuple[str, str]], unwanted: Callable[[Document], bool]) -> int:
        """Delete items by id and revision, unread: one that was changed since the view saw it is in conflict, and stays.

        Behind a unique job others may wait, and its time is not in the view: its document is read, and is to be `unwanted`.
        """
        gone: list[Mapping[str, Any]] = [
            {'_id': doc_id, '_rev': rev, '_deleted': True} for doc_id, rev in found if not doc_id.startswith(JOB)
        ]
        jobs = self.client.fetch([doc_id for doc_id, _ in found if doc_id.startswith(JOB)])
        gone += [
            workitem.acked(doc, self.client.clock.now())
            for doc in jobs
            if doc and workitem.is_waiting(doc) and unwanted(doc)
        ]
        return self._written(gone)


def releasable(doc: Document, now: float) -> Document:
    """Return `doc` released, or buried if it is spoilt: a spoilt one can be neither counted nor delivered."""
    reason = workitem.flaw(doc)
    return dead_letter.made_of(doc, reason, now) if reason else workitem.release(doc)
