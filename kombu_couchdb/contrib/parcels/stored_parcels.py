"""Stored parcels for operators: a list by state, a search by id, and their changes: replay and drop.

One class serves the database of parcels and those of devices, and its subclass `regions.records.Records` those of
regions: a record is a parcel that stays until its task has ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from ...couchdb.client import Client, Document, chunks
from ...couchdb.conflicts import delete_leaves
from ...values import is_number
from .parcel import is_open, moved_id

#: The documents that one request reads or writes, the ids, and those that are looked for by the beginning of an id.
_BATCH_DOCS, _BATCH_IDS, _MAX_FOUND = 100, 1000, 50

#: The most attempts to change a document. An attempt fails only if another process has changed the document.
_MAX_TRIES = 20

#: Mango selectors of the documents in each state. A program need not give its parcels a type. (CouchDB 3.5 fails with a
#: null in a selector.)
_PARCEL = {'$or': [{'type': 'Parcel'}, {'type': {'$exists': False}}]}
_SELECTORS: dict[str, Document] = {
    'waiting': {**_PARCEL, 'status': {'$exists': False}},
    'refused': {**_PARCEL, 'status': {'$exists': True}},
    'moved': {'type': 'Receipt', 'done': {'$exists': False}},
    'done': {'type': 'Receipt', 'done': {'$exists': True}},
}

#: How many documents were changed, and the reasons, one sentence each, why others were not, by document id.
Changed = tuple[int, dict[str, str]]


class Parcels:
    """The parcels in the database of `client`. *Every* method raises the errors of `kombu_couchdb.errors`."""

    #: What each of them is called, and all of them, and the sentence if one is not there.
    noun: ClassVar = 'parcel'
    plural: ClassVar = 'parcels and receipts'
    missing: ClassVar = 'there is no parcel {!r}'
    #: The states, in the order of lists, each with the member that has the date since when a document is in it. Parcels
    #: that were moved are receipts.
    states: ClassVar[Mapping[str, str]] = {
        'waiting': 'published',
        'refused': 'failed',
        'moved': 'moved',
        'done': 'done',
    }
    #: The members that a refused one loses when it waits again.
    of_refused: ClassVar = frozenset(('status', 'reason', 'failed'))
    #: What a list shows of each beside its task.
    columns: ClassVar[Sequence[str]] = ()
    #: The beginning of their ids.
    prefix = ''

    def __init__(self, client: Client) -> None:
        self.client = client

    def close(self) -> None:
        """Close the connections of the client."""
        self.client.close()

    def state_of(self, doc: Mapping[str, Any]) -> str:
        """Return the state of a document, one of `states`."""
        if doc.get('type') == 'Receipt':
            return 'moved' if is_open(doc) else 'done'
        return 'refused' if doc.get('status') else 'waiting'

    def name_of(self, doc: Mapping[str, Any]) -> str:
        """Return what operators call a document."""
        return str(doc['_id'])

    def note(self, doc: Mapping[str, Any]) -> str:
        """Return why a document is refused, or how its task ended."""
        if self.state_of(doc) == 'done':
            result = json.dumps(doc['result'], ensure_ascii=False) if 'result' in doc else None
            return f'{doc.get("state")}: {result or doc.get("error") or doc.get("left_out") or ""}'
        return str(doc.get('reason', '')) if doc.get('status') else ''

    def describe(self, doc: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a list has of a document. The date is None if the document does not say it."""
        state, task = self.state_of(doc), doc.get('task')
        date = doc.get(self.states[state])
        return {
            'id': self.name_of(doc),
            'task': task if isinstance(task, str) else None,
            'state': state,
            'since': date if is_number(date) else None,
            'note': self.note(doc),
        }

    # -- reading

    def ids(self, *states: str) -> Iterator[str]:
        """Yield the ids of the documents in these states: by state, in the order of `states`, and sorted.

        For each state CouchDB reads all documents.
        """
        for state in (state for state in self.states if state in states):
            yield from (doc['_id'] for doc in self._selected(_SELECTORS[state], ()))

    def _selected(self, selector: Document, fields: Sequence[str]) -> Iterator[Document]:
        """Yield these members of all documents that match a Mango selector."""
        after = ''
        while found := self.client.select(selector, prefix=self.prefix, limit=_BATCH_IDS, after=after, fields=fields):
            yield from found
            after = found[-1]['_id']

    def read(self, ids: Iterable[str]) -> Iterator[Document]:
        """Yield the documents with these ids, if they are ours, and without those that were deleted."""
        left = (name for name in ids if name and name.startswith(self.prefix) and not name.startswith('_'))
        while part := list(islice(left, _BATCH_DOCS)):
            yield from (doc for doc in self.client.find(part) if doc)

    def listing(self, *states: str) -> Iterator[Document]:
        """Yield the documents in these states, by default all. You may change or delete them while you iterate."""
        return self.read(self.ids(*(states or self.states)))

    def count(self, state: str) -> int:
        """Return the number of documents in a state."""
        return sum(1 for _ in self.ids(state))

    def find(self, start: str) -> list[Document]:
        """Return the documents whose names begin with `start`, up to 50."""
        return list(self.read(row['id'] for row in self.client.id_range(start, limit=_MAX_FOUND))) if start else []

    # -- changes

    def replay(self, docs: Sequence[Document]) -> Changed:
        """Let refused ones wait again, so that they are checked again."""

        def replayed(doc: Document) -> Document | str:
            if self.state_of(doc) != 'refused':
                return 'it was not refused'
            if 'type' not in doc and 'task' not in doc:
                return 'it cannot be read'
            return {name: value for name, value in doc.items() if name not in self.of_refused}

        return self.change(docs, replayed)

    def drop(self, docs: Sequence[Document]) -> Changed:
        """Delete documents with all their leaf revisions."""
        return sum(delete_leaves(self.client, part) for part in chunks(docs, _BATCH_DOCS)), {}

    def change(self, docs: Sequence[Document], edit: Callable[[Document], Document | str]) -> Changed:
        """Write what `edit` returns for each document, which is read again if somebody else has changed it.

        `edit` returns a reason in place of a document to leave it as it is.
        """
        reasons, left = dict[str, str](), list(docs)
        for _ in range(_MAX_TRIES):
            edited = {doc['_id']: edit(doc) for doc in left}
            results = self.client.bulk([doc for doc in edited.values() if not isinstance(doc, str)])
            reasons |= {doc_id: found if isinstance(found, str) else '' for doc_id, found in edited.items()}
            reasons |= {result.id: result.reason for result in results if result.is_refused}
            conflicts = [result.id for result in results if result.is_conflict]
            reasons |= dict.fromkeys(conflicts, 'it was changed or deleted by somebody else just now')
            left = list(self.read(conflicts))
            if not left:
                break
        refused = {doc_id: reason for doc_id, reason in reasons.items() if reason}
        return len(reasons) - len(refused), refused


def moving(client: Client, source: str, prefix: str = '') -> set[str]:
    """Return the ids that the messages of all these documents have, or will have, in the broker's database.

    The documents are parcels, receipts and records whose ids begin with `prefix`; for `source` see `parcel.moved_id`. A
    worker that was killed may have published a message and not deleted its parcel. The next one publishes it again,
    unless the broker's database knows that the message existed. The same is so if a device that was offline writes a
    parcel anew that has become a receipt.
    """
    found, after = set[str](), None
    while rows := client.id_range(prefix, limit=_BATCH_IDS, after=after):
        found.update(moved_id(source, row['id']) for row in rows)
        after = rows[-1]['id']
    return found
