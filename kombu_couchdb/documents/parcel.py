"""The Parcel: a message in a database of parcels, for publishers without rights on the broker's database.

A worker moves it into the broker's database.

::

    {"_id": "p:0000647…", "type": "Parcel",
     "task": "shop.add", "id": "…",             the name and the id of the task, for people that read the document
     "exchange": "", "routing_key": "celery",   where it is to be published
     "published": 1763709000.123456,            the order in which parcels are moved
     "message": {…}}                            as in a WorkItem; a large body is an attachment

A program without Celery may write parcels, too: `{"task", "args", "kwargs"}`, and optionally `"id"`, `"queue"`,
`"date"` (when the task is due), `"expires"` (both in seconds since the epoch) and `"priority"`. A parcel is deleted
after it was moved, or becomes a receipt (see `receipt`) if a program without Celery wrote it. A refused parcel stays,
with `"status": "fail"`, `"reason"` and `"failed"` (when). For each id only one parcel is moved: see `moved_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, cast

from . import dead_letter
from .body import attached, is_large
from .ids import PARCEL
from .types import Document, Message, Parcel

__all__ = ['is_waiting', 'moved_id', 'new', 'refused', 'replayed']


def new(message: Mapping[str, Any], exchange: str, routing_key: str, now: float) -> Parcel:
    """Return the parcel for a message as kombu's virtual transports represent it."""
    headers = message['headers']
    doc: Parcel = {
        '_id': f'p:{message["properties"]["delivery_tag"]}',
        'type': 'Parcel',
        'task': headers['task'],
        'id': headers.get('id'),
        'exchange': exchange,
        'routing_key': routing_key,
        'published': now,
        'message': cast(Message, message),
    }
    if is_large(message):
        doc['message'], doc['_attachments'] = attached(doc['message'])
    return doc


def moved_id(parcel_id: str) -> str:
    """Return the id of a parcel's message in the broker's database.

    It is made of the parcel's id alone, so that a message is stored once if two workers move the same parcel.
    """
    return PARCEL + sha256(parcel_id.encode()).hexdigest()[:32]


def is_waiting(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is a parcel that was neither moved nor refused."""
    return doc.get('type') in ('Parcel', None) and not (doc.get('status') or doc.get('_deleted'))


def refused(doc: Mapping[str, Any], reason: str, now: float) -> Document:
    """Return a parcel as refused: it stays where its publisher can see it, with the reason."""
    return {**doc, **dead_letter.members(reason, now)}


def replayed(doc: Mapping[str, Any]) -> Document:
    """Return a refused parcel as one that waits."""
    return {name: value for name, value in doc.items() if name not in ('status', 'reason', 'failed')}
