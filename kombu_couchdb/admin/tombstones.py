"""Tombstones: what CouchDB keeps of a deleted document, until it is purged; which of them are ours, and which are old.

A tombstone tells nodes, replicas and indexes that have not heard of it that the document is gone, and those who publish once
that it was there. So it may go only when it is old. CouchDB does not say when a document was deleted, but what comes after a
point in `_changes` came later: such points are noted in a document with their time, and a tombstone before one is as old.
Whoever could write that document could have tombstones purged that are seconds old. So it is a design document, which members
cannot write.

A document that is created anew at the very moment when its tombstone is purged stays, but indexes lose its rows (measured with
CouchDB 3.5). So what lives again is written once more, as it is; if a vacuum was killed before, the next one does that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from ..couchdb.client import Client, Document, Row, chunks
from ..couchdb.shapes import items, members, number, revision, sequence, text
from ..errors import NotFound

__all__ = ['Marks', 'Tombstone', 'Tombstones', 'batches', 'is_ours']

#: Where points are noted, by administrators of the server or the database alone: CouchDB takes design documents from nobody else.
_MARKS = '_design/celery-marks'

#: Where it is noted what was being purged: a document that is never replicated and not in `_changes`. Any member may write it;
#: all that does is that documents of ours are written once more as they are.
_PURGING = '_local/celery-vacuum'

#: The ids of messages, of the broker's other documents, of parcels, and of results behind any prefix.
_OURS = re.compile(
    r'(p:)?[0-9a-f]{30}(-[0-9a-f]+)?\Z|once:|parcel:|job:|broker:|'
    r'.*(celery-task-meta-|celery-taskset-meta-|chord-unlock-)',
    re.DOTALL,
)

#: The ids of messages alone.
_MESSAGE = re.compile(r'[0-9a-f]{30}(-[0-9a-f]+)?\Z')

#: The most documents and revisions that CouchDB takes in one `_purge`, as it is installed.
_DOCUMENTS, _REVISIONS = 100, 1000

#: Changes read in one request.
_PAGE = 5000

#: What CouchDB answers; and what `Marks` notes, if nobody spoilt it.
_INFO = members(doc_del_count=number)
_CHANGES = members(results=items(members(id=text, changes=items(members(rev=revision)))), last_seq=sequence)
_PURGED = members(purged=members())
_POINTS, _IDS = items(members(seq=sequence, date=number)), items(text)


def is_ours(doc_id: str) -> bool:
    """Tell whether a document is one of the broker's or of the results', by its id."""
    return bool(_OURS.match(doc_id))


@dataclass(frozen=True)
class Tombstone:
    """A deleted document: its id and all its last revisions, deleted every one."""

    id: str
    revs: tuple[str, ...]


class Marks:
    """What is noted in one database: points of its history, the oldest first, and the ids that were being purged."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def take(self, age: float) -> None:
        """Note the point at which the database stands now, and forget those that a later one older than `age` replaces."""
        seq = self._client.sequence()
        now = self._client.clock.now()
        marks = [*self._points(), {'seq': seq, 'date': now}]
        usable = [mark for mark in marks if mark['date'] <= now - age]
        self._write(_MARKS, marks=[*usable[-1:], *marks[len(usable) :]])

    def old(self, age: float) -> Any | None:
        """Return the latest point that is at least `age` seconds old, for `_changes`, or None."""
        now = self._client.clock.now()
        return next((mark['seq'] for mark in reversed(self._points()) if mark['date'] <= now - age), None)

    def ready_in(self, age: float) -> float:
        """Return in how many seconds the oldest point will be `age` seconds old."""
        now = self._client.clock.now()
        return max(0.0, min((mark['date'] + age - now for mark in self._points()), default=age))

    def purging(self) -> list[str]:
        """Return the ids that `begin` noted."""
        found = self._read(_PURGING).get('purging')
        return [doc_id for doc_id in cast('list[str]', found) if is_ours(doc_id)] if _IDS(found) else []

    def begin(self, ids: list[str]) -> None:
        """Note the ids of what is about to be purged; of none when that is over."""
        if ids != self.purging():
            self._write(_PURGING, purging=ids)

    def _points(self) -> list[Document]:
        found = self._read(_MARKS).get('marks')
        return cast('list[Document]', found) if _POINTS(found) else []

    def _read(self, doc_id: str) -> Document:
        try:
            return self._client.get(doc_id)
        except NotFound:
            return {'_id': doc_id}

    def _write(self, doc_id: str, **members: Any) -> None:
        self._client.put({**self._read(doc_id), **members})


class Tombstones:
    """The tombstones of one database."""

    def __init__(self, client: Client, marks: Marks) -> None:
        self._client, self._marks = client, marks
        #: How many of ours were met that are not old yet.
        self.young = 0
        self._notifier = set[str]()
        self._read: Any = None  # how far the news have been read

    def count(self) -> int:
        """Return how many there are, those of other applications included."""
        return int(self._client.info(_INFO)['doc_del_count'])

    def old(self, mark: Any) -> Iterator[list[Tombstone]]:
        """Yield ours that are older than the point `mark`, in pages."""
        self._read = mark
        for rows, _ in self._pages(0):
            # Whatever happened to a document of this page before it was read is seen here.
            self._look()
            ours = [
                Tombstone(row['id'], tuple(change['rev'] for change in row['changes']))
                for row in rows
                if row.get('deleted') and is_ours(row['id'])
            ]
            old = [tombstone for tombstone in ours if tombstone.id not in self._notifier]
            self.young += len(ours) - len(old)
            yield old

    def purge(self, tombstones: list[Tombstone]) -> None:
        """Take tombstones away. A document that lives again stays as it is."""
        # A message's own id is never used again; only of the others one may live again, and be forgotten if this is killed.
        self._marks.begin([tombstone.id for tombstone in tombstones if not _MESSAGE.match(tombstone.id)])
        for batch in batches(tombstones):
            self._client.request('POST', '/_purge', body=batch, repeat=True, shape=_PURGED)
        self._look()
        self._revive([tombstone.id for tombstone in tombstones if tombstone.id in self._notifier])

    def revive(self) -> None:
        """Do what a vacuum that was killed could not do any more."""
        self._revive(self._marks.purging())
        self._marks.begin([])

    def _revive(self, ids: list[str]) -> None:
        """Write documents that live again once more, as they are: indexes may have lost them."""
        for part in chunks(ids, _DOCUMENTS):
            alive = [doc for doc in self._client.fetch(part) if doc]
            if alive:
                self._client.bulk(alive)  # one that somebody else writes just now is in conflict, and needs it no more

    def _look(self) -> None:
        """Take note of what has changed meanwhile."""
        if self._read is not None:
            for rows, last in self._pages(self._read):
                self._read = last
                self._notifier.update(row['id'] for row in rows)

    def _pages(self, since: Any) -> Iterator[tuple[list[Row], Any]]:
        """Yield what changed after `since` until now, a page at a time, each with the point at which it ends."""
        rows: list[Row] | None = None
        while rows is None or len(rows) == _PAGE:
            params = {'since': since, 'limit': _PAGE, 'style': 'all_docs'}
            page = self._client.request('GET', '/_changes', params, repeat=True, shape=_CHANGES)
            rows, since = cast('list[Row]', page['results']), page['last_seq']
            yield rows, since


def batches(tombstones: list[Tombstone]) -> Iterator[dict[str, list[str]]]:
    """Yield the bodies of `_purge` requests, each no larger than CouchDB takes."""
    batch: dict[str, list[str]] = {}
    count = 0
    for tombstone in tombstones:
        for start in range(0, len(tombstone.revs), _REVISIONS):
            revs = list(tombstone.revs[start : start + _REVISIONS])
            if batch and (len(batch) == _DOCUMENTS or count + len(revs) > _REVISIONS):
                yield batch
                batch, count = {}, 0
            batch[tombstone.id] = revs
            count += len(revs)
    if batch:
        yield batch
