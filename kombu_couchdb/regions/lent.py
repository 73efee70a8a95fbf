"""The LentItem: a message while it is moved from its home to an idle region.

::

    {"_id": "0000647…", "type": "LentItem", "status": "lent",
     "region": "eu",                   where it will run
     "lent": 1763709001.5,             when
     …}                                the other members are those of the WorkItem that it was

It replaces a WorkItem that no consumer has claimed, by revision: CouchDB accepts this or a claim, never both. It has
another type, so that no view shows it as a message of a queue. When the parcel with the message is stored, it is
deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..documents import concurrency, rates, validation, workitem
from ..documents.body import stub
from ..documents.ids import JOB_KEY
from ..documents.types import DatedMessage, Document, Stored
from ..parcels import parcel
from ..parcels.parcel import Parcel
from . import region
from .region import ANY


class LentItem(DatedMessage, Stored):
    """A message that is moved to another region."""

    _id: str
    type: Literal['LentItem']
    status: Literal['lent']
    queue: str
    attempts: int
    claimed: None
    #: The region to which it is moved, and when that began.
    region: str
    lent: float


def may_be_lent(headers: Mapping[str, Any]) -> bool:
    """Tell whether a message with these headers may run in another region: keys of jobs, limits and rates may not."""
    return not {JOB_KEY, concurrency.CONCURRENCY_KEY, rates.RATE_KEY} & {
        name for name, value in headers.items() if value is not None
    }


def is_lendable(doc: Mapping[str, Any], before: float) -> bool:
    """Tell whether an item may be lent: it may run in any region, and is ready since the time `before` at least.

    An item that was delivered before stays at home, where its deliveries are counted.
    """
    return (
        doc.get('type') == 'WorkItem'
        and validation.flaw(doc) is None
        and workitem.is_waiting(doc)
        and not doc.get('parked')
        and not doc['attempts']
        and 'key' not in doc
        and doc['message']['properties'].get('region') == ANY
        and workitem.ready_since(doc) <= before
    )


def made_of(doc: Mapping[str, Any], to: str, now: float) -> Document:
    """Return the document that replaces an item that is lent to the region `to`."""
    return {**doc, 'type': 'LentItem', 'status': 'lent', 'region': to, 'lent': now}


def returned(doc: Mapping[str, Any]) -> Document:
    """Return the WorkItem that a LentItem was. Its message names no region any more, so no leader lends it again."""
    message = region.route(doc['message'])[1]
    kept = {name: value for name, value in doc.items() if name not in ('status', 'region', 'lent')}
    return {**kept, 'type': 'WorkItem', 'message': message}


def parcel_of(doc: Mapping[str, Any], own: str, to: str, body: bytes | None, now: float) -> Parcel:
    """Return the parcel from region `own` to region `to` with the message of an item.

    `body` is the attached body, or None. *Raises* `ValueError` if the body is not text although the message says so.
    """
    message: Any = region.route(doc['message'])[1]
    message['headers'].setdefault(parcel.FROM_REGION, own)
    if isinstance(expires := doc.get('expires'), (int, float)):
        message['properties']['expiration'] = str(max(0, int((expires - now) * 1000)))
    found = parcel.with_body(message, body) if stub(doc) else message
    return {
        **parcel.new(found, '', doc['queue'], doc['published']),
        '_id': region.parcel_id(to, own, doc['_id']),
        'lent': True,
    }
