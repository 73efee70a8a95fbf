"""The Parcel: a message on its way to the broker's database, in a database for publishers who have no right on that one.

::

    {"_id": "p:0000647…", "type": "Parcel",
     "task": "shop.add", "id": "…",             the name and the id of the task, for who looks at it
     "exchange": "", "routing_key": "celery",   where it is to be published
     "published": 1763709000.123456,            the order in which parcels are moved
     "message": {…}}                            as in a WorkItem, the body attached if it is large

A document that a program wrote without Celery is a parcel, too: `{"task", "args", "kwargs"}`, and if it likes `"id"`, `"queue"`,
`"date"` (when the task is due), `"expires"` (both seconds since the epoch) and `"priority"`. A parcel that was moved is deleted.
One that was refused stays, with `"status": "fail"`, `"reason"` and `"failed"` (when). Under one id one message is moved, ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from .body import attached, is_large
from .ids import PARCEL

__all__ = ['is_waiting', 'moved_id', 'new', 'refused']

Document = dict[str, Any]


def new(message: Mapping[str, Any], exchange: str, routing_key: str, now: float) -> Document:
    """Return the parcel with a message as kombu's virtual transports represent it."""
    headers = message['headers']
    doc: Document = {
        '_id': f'p:{message["properties"]["delivery_tag"]}',
        'type': 'Parcel',
        'task': headers['task'],
        'id': headers.get('id'),
        'exchange': exchange,
        'routing_key': routing_key,
        'published': now,
        'message': message,
    }
    return doc | attached(message) if is_large(message) else doc


def moved_id(parcel_id: str) -> str:
    """Return the id that the message of a parcel has in the broker's database."""
    return PARCEL + sha256(parcel_id.encode()).hexdigest()[:32]


def is_waiting(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is a parcel that was neither moved nor refused."""
    return doc.get('type') in ('Parcel', None) and not (doc.get('status') or doc.get('_deleted'))


def refused(doc: Mapping[str, Any], reason: str, now: float) -> Document:
    """Return a parcel as refused: it stays where its publisher can see it, with the reason."""
    return {**doc, 'status': 'fail', 'reason': reason, 'failed': now}
