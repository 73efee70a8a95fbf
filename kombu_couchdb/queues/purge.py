"""Deletion of messages without delivery: purges, expiry and limits of queues, and the counts that they need.

Methods that take `until` stop deleting at that monotonic time; the next call goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from .. import design
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import anything, exactly, members, number, revision, text
from ..design.rows import MALFORMED_DATE, ClaimCount, QueueCount, revision_in
from ..documents import workitem
from ..documents.ids import JOB
from . import waiting

__all__ = ['MAX_BATCH_DOCS', 'Purge']

#: The shapes of rows of the views, and of their reductions by queue.
_REVS = members(
    id=text, value=lambda value: revision(value[1] if isinstance(value, list) and len(value) == 2 else value)
)
_RANK = members(key=exactly(text, number), value=number)
_CLAIMED = members(key=exactly(text, text, anything), value=members(count=number))

#: The most documents that housekeeping changes or deletes in one request.
MAX_BATCH_DOCS = 500


class Purge:
    """Deletes and counts the messages of one database."""

    def __init__(self, client: Client) -> None:
        self.client = client

    # -- queues

    def size(self, queue: str) -> int:
        """Return the number of ready messages in a queue: due, and not claimed. Those that wait for a slot count."""
        name = design.key_of(queue)
        return waiting.count(
            self.client,
            [
                {'startkey': [name], 'endkey': [name, workitem.HIGHEST, {}]},
                {'startkey': [name, design.PLANNED], 'endkey': [name, design.PLANNED, self.client.clock.now()]},
                {'startkey': [name, design.PARKED], 'endkey': [name, design.PARKED, {}]},
            ],
        )

    def is_empty(self, queue: str) -> bool:
        """Tell whether a queue has no message, neither ready nor planned nor claimed. Dead letters are in no queue."""
        if self.exceeds(queue, 0):
            return False
        rows = self.client.view(
            design.NAME, 'leases', _CLAIMED, startkey=['claim'], endkey=['claim', LAST], group_level=3
        )
        return queue not in {ClaimCount.of(row).queue for row in rows}

    def purge(self, queue: str, until: float = inf) -> int:
        """Delete the ready and the planned messages of a queue, and return their number; claimed ones are kept."""
        return self._delete_rows('waiting', lambda doc: True, until, **design.rows_of(queue))

    # -- limits

    def drop_expired(self, until: float = inf) -> int:
        """Delete the expired messages that no consumer has claimed, and the completed ones that were kept long enough.

        Return their number.
        """
        now = self.client.clock.now()
        return self._delete_rows('expiring', lambda doc: workitem.has_expired(doc, now), until, endkey=now)

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
            for row in map(QueueCount.of, rows)
        )

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
        changes += [workitem.dropped(doc, now) for doc in jobs if doc and workitem.is_waiting(doc) and unwanted(doc)]
        return self._write(changes)

    def _write(self, docs: Sequence[Mapping[str, Any]]) -> int:
        """Write documents, and return how many were stored; note those that CouchDB always refuses as unusable."""
        results = self.client.bulk(docs)
        for doc, result in zip(docs, results, strict=True):
            if result.is_permanent:
                self.client.unusable.note(doc['_id'], doc.get('_rev'), result.reason)
        return sum(result.is_stored for result in results)
