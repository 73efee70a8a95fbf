"""The resource of stored parcels: parcels, receipts, and records of tasks in other regions."""

from __future__ import annotations

from functools import partial

from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.parcels.stored_parcels import StoredParcels

from ..resources.columns import Cell, Column, Tone, format_ago
from ..resources.resource import Resource

#: The maximum length of a note in a table, in characters.
_MAX_NOTE_CHARACTERS = 200

TONES: dict[str, Tone] = {
    **dict.fromkeys(('waiting', 'sent', 'delayed', 'withdrawn'), 'warning'),
    **dict.fromkeys(('moved', 'there'), 'info'),
    'refused': 'bad',
    'done': 'good',
}


def parcel_resource(stored: StoredParcels) -> Resource[Document]:
    """Return the resource of stored parcels."""
    columns = [
        Column('ID', 'id', min_width=12),
        Column('TASK', 'task', min_width=10),
        *(Column(name.upper(), name, min_width=6) for name in stored.columns),
        Column('STATE', 'state', lambda state: Cell(state, TONES[state])),
        Column('SINCE', 'since', partial(format_ago, now=stored.client.clock.now()), right=True),
        Column('', 'note', lambda text: text[:_MAX_NOTE_CHARACTERS], min_width=20),
    ]
    return Resource(
        lambda docs: [stored.describe(doc) for doc in docs],
        columns,
        details=lambda row: {f'state of the {stored.noun}': row['state'], **row['document']},
    )
