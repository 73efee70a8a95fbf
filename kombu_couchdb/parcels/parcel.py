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

import base64
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Literal, TypedDict, cast, final

from ..documents import dead_letter
from ..documents.body import attached, is_large
from ..documents.types import Document, Message, Stored

#: Two headers and a property of messages, see the room `regions`: the region in which a task was first sent, and that
#: in which it is to run. Publishers of parcels can set none of them.
FROM_REGION, REGION_HEADER, REGION_PROPERTY = 'x-from-region', 'x-region', 'region'

#: The beginning of the ids of the messages that a worker moved from a database of parcels.
MESSAGE = 'parcel:'

#: The members that remain of a refused parcel, and of a receipt, that is `shortened`.
_REFUSED = ('_id', '_rev', 'status', 'failed')
_RECEIPT = ('_id', '_rev', 'type', 'id', 'moved', 'state', 'done', 'result', 'error', 'left_out', 'kept_until')

#: The maximum length of the name of a task in a document that is `shortened`.
_MAX_NAME_CHARACTERS = 255


class _ParcelOptions(TypedDict, total=False):
    #: True if the message was lent to the region. This member and the two below are of parcels between regions only.
    lent: bool
    #: The region in which the task runs if the parcel is still there at the time `fallback_at`.
    fallback: str
    fallback_at: float
    status: Literal['fail']
    reason: str
    failed: float


@final
class Parcel(_ParcelOptions, Stored):
    """A message on its way to the broker's database, in a database of parcels."""

    _id: str
    type: Literal['Parcel']
    #: The name and the id of the task.
    task: str
    id: str | None
    #: Where the message is to be published; '' is the default exchange.
    exchange: str
    routing_key: str
    #: Parcels are moved in this order.
    published: float
    message: Message


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


def with_body(message: Message, body: bytes | None) -> Message:
    """Return a message with its body, which was an attachment, as the publisher's channel has encoded it.

    *Raises* `ValueError` if the body is not text although the message says so.
    """
    if body is None:
        return message
    is_base64 = message['properties'].get('body_encoding') == 'base64'
    return {**message, 'body': base64.b64encode(body).decode('ascii') if is_base64 else body.decode('utf-8')}


def moved_id(parcel_id: str) -> str:
    """Return the id of a parcel's message in the broker's database.

    It is made of the parcel's id alone, so that a message is stored once if two workers move the same parcel.
    """
    return MESSAGE + sha256(parcel_id.encode()).hexdigest()[:32]


def is_waiting(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is a parcel that was neither moved nor refused."""
    return doc.get('type') in ('Parcel', None) and not (doc.get('status') or doc.get('_deleted'))


def refused(doc: Mapping[str, Any], reason: str, now: float) -> Document:
    """Return a parcel as refused: it stays where its publisher can see it, with the reason."""
    return {**doc, **dead_letter.members(reason, now)}


def shortened(doc: Mapping[str, Any]) -> Document:
    """Return a refused parcel or a receipt without what its publisher wrote: CouchDB refuses it for its size."""
    if doc.get('type') != 'Receipt':
        reason = f'{doc["reason"]}; the rest of the document was removed, because with the reason it was too large'
        return {**{name: doc[name] for name in _REFUSED if name in doc}, 'reason': reason}
    task = doc.get('task')
    is_name = isinstance(task, str) and task.isprintable() and len(task) <= _MAX_NAME_CHARACTERS
    return {**{name: doc[name] for name in _RECEIPT if name in doc}, 'task': task if is_name else None}


def replayed(doc: Mapping[str, Any]) -> Document:
    """Return a refused parcel as one that waits."""
    return {name: value for name, value in doc.items() if name not in ('status', 'reason', 'failed')}
