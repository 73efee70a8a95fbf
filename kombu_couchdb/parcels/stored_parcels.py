"""Parcels: list those that wait or were refused, and receipts; move refused ones again, or delete any of them.

The same functions serve a database for publishers and a database of regions: both have a view whose keys begin with 0
for parcels that wait, and with 1 for refused ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..admin.jobs import paged
from ..couchdb.client import Client, Document, chunks
from ..couchdb.conflicts import delete_leaves
from ..couchdb.shapes import exactly, items, members, number, revision
from ..errors import DatabaseMissing, NotFound
from . import parcel
from .parcel import is_open

#: The states of parcels: those that were moved are receipts.
STATES = ('waiting', 'refused', 'moved', 'done')

#: The documents that one request reads or writes.
_BATCH_DOCS = 100

#: The shapes of the rows of the views, and of a reduction.
_ROW, _COUNT = members(key=items(lambda part: True), value=exactly(revision, number)), members(value=number)

#: The keys of rows of parcels that wait, and of refused ones, begin with these numbers.
_RANKS = {'waiting': 0, 'refused': 1}


class Parcels:
    """The parcels in the database of `client`. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, client: Client, name: str = parcel.PARCELS, view: str = 'parcels') -> None:
        """Use the view `view` of the design document `name`."""
        self.client, self._name, self._view = client, name, view
        self._has_receipts = name == parcel.PARCELS

    def count(self, state: str) -> int:
        """Return the number of parcels that wait or that were refused; `state` is 'waiting' or 'refused'."""
        rank = _RANKS[state]
        rows = self.client.view(self._name, self._view, _COUNT, startkey=[rank], endkey=[rank, {}])
        return int(rows[0]['value']) if rows else 0

    def listing(self, *states: str) -> Iterator[Document]:
        """Yield the documents in these states (see `STATES`): by state, those first that were sent or refused first.

        Receipts follow, ordered by when they are deleted. You may change or delete documents while you iterate.
        """
        for state, rank in _RANKS.items():
            if state in states:
                where: dict[str, Any] = {
                    'startkey': [rank],
                    'endkey': [rank, {}],
                    'reduce': False,
                    'include_docs': True,
                }
                for row in paged(self.client, self._name, self._view, _ROW, **where):
                    if doc := row.get('doc'):
                        yield doc
        if self._has_receipts and {'moved', 'done'} & set(states):
            where = {'startkey': ['kept'], 'endkey': ['kept', {}], 'include_docs': True}
            for row in paged(self.client, parcel.RECEIPTS, 'receipts', members(), **where):
                if (doc := row.get('doc')) and state_of(doc) in states:
                    yield doc

    def waiting(self) -> Iterator[str]:
        """Yield the ids of parcels that wait; none if the database, or its view, does not exist."""
        where: dict[str, Any] = {'startkey': [_RANKS['waiting']], 'endkey': [_RANKS['waiting'], {}], 'reduce': False}
        try:
            for row in paged(self.client, self._name, self._view, _ROW, **where):
                yield row['id']
        except (DatabaseMissing, NotFound):
            return

    def find(self, name: str, limit: int = 10) -> list[Document]:
        """Return the document with this id; if there is none, up to `limit` documents whose ids begin with `name`."""
        if not name or name.startswith('_'):  # not a document of ours
            return []
        if doc := self.client.find([name])[0]:
            return [doc]
        found = self.client.fetch([row['id'] for row in self.client.id_range(name, limit=limit)])
        return [doc for doc in found if doc]

    def replay(self, docs: Sequence[Document]) -> tuple[int, dict[str, str]]:
        """Let refused parcels wait again, so that they are checked again.

        Return how many wait now, and the reasons, one sentence each, why others do not, by document id.
        """
        reasons = {doc['_id']: 'it was not refused' for doc in docs if state_of(doc) != 'refused'}
        reasons |= {doc['_id']: 'it cannot be read' for doc in docs if 'type' not in doc and 'task' not in doc}
        again = [parcel.replayed(doc) for doc in docs if doc['_id'] not in reasons]
        results = [result for part in chunks(again, _BATCH_DOCS) for result in self.client.bulk(part)]
        reasons |= {result.id: 'it was changed by somebody else just now' for result in results if not result.is_stored}
        return len(docs) - len(reasons), reasons

    def drop(self, docs: Sequence[Document]) -> int:
        """Delete documents with all their leaf revisions, and return how many were deleted."""
        return sum(delete_leaves(self.client, part) for part in chunks(docs, _BATCH_DOCS))


def moving(sources: Iterable[Parcels]) -> set[str]:
    """Return the ids that the messages of waiting parcels have, or will have, in the broker's database.

    A worker that was killed may have published a message and not deleted its parcel. The next one publishes it again,
    unless the broker's database knows that the message existed.
    """
    return {parcel.moved_id(doc_id) for source in sources for doc_id in source.waiting()}


def state_of(doc: Document) -> str:
    """Return the state of a parcel or receipt, one of `STATES`."""
    if doc.get('type') == 'Receipt':
        return 'moved' if is_open(doc) else 'done'
    return 'refused' if doc.get('status') else 'waiting'
