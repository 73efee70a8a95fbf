"""Parcels: list those that wait or were refused, and receipts; move refused ones again, or delete any of them.

The same functions serve the database of parcels and that of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ..couchdb.client import Client, Document, chunks
from ..couchdb.conflicts import delete_leaves
from ..errors import DatabaseMissing
from . import parcel
from .parcel import is_open

#: The states of parcels: those that were moved are receipts.
STATES = ('waiting', 'refused', 'moved', 'done')

#: The documents that one request reads or writes, and the ids.
_BATCH_DOCS, _BATCH_IDS = 100, 1000

#: Mango selectors of the documents in each state. A program need not give its parcels a type. (CouchDB 3.5 fails with a
#: null in a selector.)
_PARCEL = {'$or': [{'type': 'Parcel'}, {'type': {'$exists': False}}]}
_SELECTORS: dict[str, Document] = {
    'waiting': {**_PARCEL, 'status': {'$exists': False}},
    'refused': {**_PARCEL, 'status': {'$exists': True}},
    'moved': {'type': 'Receipt', 'done': {'$exists': False}},
    'done': {'type': 'Receipt', 'done': {'$exists': True}},
}


class Parcels:
    """The parcels in the database of `client`. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def ids(self, *states: str) -> Iterator[str]:
        """Yield the ids of the documents in these states: by state, in the order of `STATES`, and sorted.

        For each state CouchDB reads all documents.
        """
        for state in (state for state in STATES if state in states):
            after = ''
            while found := self.client.select(_SELECTORS[state], limit=_BATCH_IDS, after=after, fields=[]):
                yield from (doc['_id'] for doc in found)
                after = found[-1]['_id']

    def read(self, ids: Iterable[str]) -> Iterator[Document]:
        """Yield the documents with these ids, without those that were deleted."""
        left = iter(ids)
        while part := list(islice(left, _BATCH_DOCS)):
            yield from (doc for doc in self.client.fetch(part) if doc)

    def listing(self, *states: str) -> Iterator[Document]:
        """Yield the documents in these states, see `ids`. You may change or delete documents while you iterate."""
        return self.read(self.ids(*states))

    def count(self, state: str) -> int:
        """Return the number of documents in a state."""
        return sum(1 for _ in self.ids(state))

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


def moving(sources: Iterable[Client]) -> set[str]:
    """Return the ids that the messages of all parcels and receipts in these databases have in the broker's database.

    A worker that was killed may have published a message and not deleted its parcel. The next one publishes it again,
    unless the broker's database knows that the message existed. The same is so if a device that was offline writes a
    parcel anew that has become a receipt.
    """
    return {parcel.moved_id(client.address.database, doc_id) for client in sources for doc_id in _all_ids(client)}


def _all_ids(client: Client) -> Iterator[str]:
    """Yield the ids of all documents in a database; none if it does not exist."""
    after = None
    try:
        while rows := client.id_range('', limit=_BATCH_IDS, after=after):
            yield from (row['id'] for row in rows)
            after = rows[-1]['id']
    except DatabaseMissing:
        return


def state_of(doc: Document) -> str:
    """Return the state of a parcel or receipt, one of `STATES`."""
    if doc.get('type') == 'Receipt':
        return 'moved' if is_open(doc) else 'done'
    return 'refused' if doc.get('status') else 'waiting'
