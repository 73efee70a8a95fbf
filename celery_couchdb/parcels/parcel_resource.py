"""The resource of stored parcels: parcels, receipts, and records of tasks in other regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.parcels.stored_parcels import StoredParcels

from ..resources.columns import Cell, Column, Tone, format_ago, json_line
from ..resources.resource import Resource

#: The maximum length of a note in a table, in characters.
_MAX_NOTE_CHARACTERS = 200

TONES: dict[str, Tone] = {
    **dict.fromkeys(('waiting', 'sent', 'delayed', 'withdrawn'), 'warning'),
    **dict.fromkeys(('moved', 'there'), 'info'),
    'refused': 'bad',
    'done': 'good',
}


def note(doc: Document, state: str) -> str:
    """Return why a parcel was refused, or how its task ended."""
    if state == 'done':
        result = json_line(doc['result']) if 'result' in doc else doc.get('error') or doc.get('left_out') or ''
        return f'{doc.get("state")}: {result}'
    return str(doc.get('reason', '')) if state == 'refused' else ''


def parcel_resource(
    stored: StoredParcels, others: Sequence[Column] = (), note: Callable[[Document, str], str] = note
) -> Resource[Document]:
    """Return the resource of stored parcels with `others` as additional columns; `note` returns the last column."""
    columns = [
        Column('ID', 'id', min_width=12),
        Column('TASK', 'task', min_width=10),
        *others,
        Column('STATE', 'state', lambda state: Cell(state, TONES[state])),
        Column('SINCE', 'since', partial(format_ago, now=stored.client.clock.now()), right=True),
        Column('', 'note', lambda text: text[:_MAX_NOTE_CHARACTERS], min_width=20),
    ]

    def described(doc: Document) -> dict[str, object]:
        row = stored.describe(doc)
        return {**row, 'note': note(doc, row['state']), 'document': doc}

    return Resource(
        lambda docs: [described(doc) for doc in docs],
        columns,
        details=lambda row: {f'state of the {stored.noun}': row['state'], **row['document']},
    )
