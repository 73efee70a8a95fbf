"""Tombstones: what CouchDB keeps of a deleted document, until it is purged; which of them are ours, and which are old.

A tombstone tells nodes, replicas and indexes that have not heard of it that the document is gone, and those who publish once
that it was there. So it may go only when it is old. CouchDB does not say when a document was deleted, but what comes after a
point in `_changes` came later: such points are noted in a document with their time, and a tombstone before one is as old.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from ..client import Client, Document, Row
from ..errors import NotFound

__all__ = ['Marks', 'Tombstone', 'Tombstones', 'batches', 'is_ours']

#: A document that is never replicated and not in `_changes`.
_MARKS = '_local/celery-vacuum'

#: The ids of messages, of the broker's other documents, and of results behind any prefix.
_OURS = re.compile(r'[0-9a-f]{30}(-\d+)?\Z|job:|broker:|.*(celery-task-meta-|celery-taskset-meta-|chord-unlock-)', re.DOTALL)

#: Messages that were published once: CouchDB's own ids for documents without one look the same.
_FIXED = re.compile(r'[0-9a-f]{32}(-\d+)?\Z')

#: The most documents and revisions that CouchDB takes in one `_purge`, as it is installed.
_DOCUMENTS, _REVISIONS = 100, 1000

#: Changes read in one request.
_PAGE = 5000


def is_ours(doc_id: str, *, alone: bool) -> bool:
    """Tell whether a document is one of the broker's or of the results'; `alone`, if no other application is known here."""
    return bool(_OURS.match(doc_id) or (alone and _FIXED.match(doc_id)))


@dataclass(frozen=True)
class Tombstone:
    """A deleted document: its id and all its last revisions, deleted every one."""

    id: str
    revs: tuple[str, ...]


class Marks:
    """The noted points of one database's history, the oldest first."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def take(self, age: float) -> None:
        """Note the point at which the database stands now, and forget those that a later one older than `age` replaces."""
        seq = self._client.sequence()
        now = self._client.clock.now()
        marks = [*self._read(), {'seq': seq, 'date': now}]
        usable = [mark for mark in marks if mark['date'] <= now - age]
        try:
            rev = {'_rev': self._client.get(_MARKS)['_rev']}
        except NotFound:
            rev = {}
        self._client.put({'_id': _MARKS, **rev, 'marks': [*usable[-1:], *marks[len(usable):]]})

    def old(self, age: float) -> Any | None:
        """Return the latest point that is at least `age` seconds old, for `_changes`, or None."""
        now = self._client.clock.now()
        return next((mark['seq'] for mark in reversed(self._read()) if mark['date'] <= now - age), None)

    def ready_in(self, age: float) -> float:
        """Return in how many seconds the oldest point will be `age` seconds old."""
        now = self._client.clock.now()
        return max(0.0, min((mark['date'] + age - now for mark in self._read()), default=age))

    def _read(self) -> list[Document]:
        try:
            return cast('list[Document]', self._client.get(_MARKS)['marks'])
        except NotFound:
            return []


class Tombstones:
    """The tombstones of one database."""

    def __init__(self, client: Client) -> None:
        self._client = client
        #: How many of ours were met that are not old yet.
        self.young = 0

    def count(self) -> int:
        """Return how many there are, those of other applications included."""
        return int(self._client.request('GET', '', repeat=True)['doc_del_count'])

    def old(self, mark: Any, *, alone: bool) -> Iterator[list[Tombstone]]:
        """Yield ours that are older than the point `mark`, in pages."""
        changed, read = set[str](), mark
        for rows, _ in self._pages(0):
            # Whatever happened to a document of this page before it was read is seen here.
            for news, last in self._pages(read):
                read = last
                changed.update(row['id'] for row in news)
            ours = [Tombstone(row['id'], tuple(change['rev'] for change in row['changes']))
                    for row in rows if row.get('deleted') and is_ours(row['id'], alone=alone)]
            old = [tombstone for tombstone in ours if tombstone.id not in changed]
            self.young += len(ours) - len(old)
            yield old

    def purge(self, tombstones: list[Tombstone]) -> None:
        """Take tombstones away. A document that lives again stays as it is: its last revision is another one."""
        for batch in batches(tombstones):
            self._client.request('POST', '/_purge', body=batch, repeat=True)

    def _pages(self, since: Any) -> Iterator[tuple[list[Row], Any]]:
        """Yield what changed after `since` until now, a page at a time, each with the point at which it ends."""
        rows: list[Row] | None = None
        while rows is None or len(rows) == _PAGE:
            params = {'since': since, 'limit': _PAGE, 'style': 'all_docs'}
            page = self._client.request('GET', '/_changes', params, repeat=True)
            rows, since = cast('list[Row]', page['results']), page['last_seq']
            yield rows, since


def batches(tombstones: list[Tombstone]) -> Iterator[dict[str, list[str]]]:
    """Yield the bodies of `_purge` requests, each no larger than CouchDB takes."""
    batch: dict[str, list[str]] = {}
    count = 0
    for tombstone in tombstones:
        for start in range(0, len(tombstone.revs), _REVISIONS):
            revs = list(tombstone.revs[start:start + _REVISIONS])
            if batch and (len(batch) == _DOCUMENTS or count + len(revs) > _REVISIONS):
                yield batch
                batch, count = {}, 0
            batch[tombstone.id] = revs
            count += len(revs)
    if batch:
        yield batch
