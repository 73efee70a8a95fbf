"""The documents in a database of parcels: the Parcel and the Receipt.

A *parcel* is a message from a publisher without rights on the broker's database. A worker moves it there.

::

    {"_id": "p:0000647…", "type": "Parcel",
     "task": "shop.add", "id": "…",             the name and the id of the task, for people that read the document
     "exchange": "", "routing_key": "celery",   where it is to be published
     "published": 1763709000.123456,            the order in which parcels are moved
     "message": {…}}                            as in a WorkItem; a large body is an attachment

A program without Celery may write parcels, too: `{"task", "args", "kwargs"}`, and optionally `"id"`, `"queue"`,
`"date"` (when the task is due), `"expires"` (both in seconds since the epoch) and `"priority"`. A parcel is deleted
after it was moved, or becomes a receipt if a program without Celery wrote it. A refused parcel stays, with
`"status": "refused"`, `"reason"` and `"failed"` (when). For each id only one parcel is moved: see `moved_id`.

A *receipt* tells the outcome of a parcel that a program wrote without Celery. When such a parcel is moved, its document
becomes the receipt, so that its publisher sees it in the document that it has written, by HTTP or in a replica::

    {"_id": "order-17", "type": "Receipt",
     "task": "shop.order", "args": [17], …,       as the publisher wrote it
     "id": "…",                                   the id of the task
     "moved": 1763709001.5,                       when the task was put into its queue
     "state": "PENDING",                          then "SUCCESS", "FAILURE" or "REVOKED"
     "done": 1763709002.5,                        when it ended
     "result": 42,                                what it returned; or "error", or "left_out"
     "kept_until": 1764313802.5}                  when the receipt is deleted

The publisher creates the document. The process that moves parcels makes it a receipt, and the worker that ends the task
writes how it ended, both by revision. The first end counts. If the task ends before its parcel is a receipt, the worker
makes it one. What a publisher writes into a receipt changes nothing that runs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Literal, TypedDict, cast, final

from ...design import WITHOUT_ROWS
from ...documents.body import attached, is_large
from ...documents.types import Document, Message, Stored
from ...documents.validation import check_value
from ...errors import Unstorable

#: The design document of a database of parcels. Publishers recognise such a database by it. Its index has no rows: no
#: document of a publisher can disturb it. The name must sort after that of the broker's design document, see
#: `queues.databases`.
PARCELS = 'parcels-v2'

#: Two headers and a property of messages, see the room `regions`: the region in which a task was first sent, and that
#: in which it is to run. Publishers of parcels can set none of them.
FROM_REGION, REGION_HEADER, REGION_PROPERTY = 'x-from-region', 'x-region', 'region'

#: The header by which a result finds its way back to another region, see `kombu_couchdb.contrib.regions.region.Giver`.
GIVER = 'x-giver'

#: The beginning of the ids of the messages that a worker moved from a database of parcels.
MESSAGE = 'parcel:'

#: The maximum size of a body.
MAX_BODY_BYTES = 64_000_000

#: The members that remain of a refused parcel, and of a receipt, that is `shortened`.
_REFUSED = ('_id', '_rev', 'status', 'failed')
_RECEIPT = ('_id', '_rev', 'type', 'id', 'moved', 'state', 'done', 'result', 'error', 'left_out', 'kept_until')

#: The maximum length of the name of a task in a document that is `shortened`.
_MAX_NAME_CHARACTERS = 255

#: The state of a task that has not ended, as Celery names it.
_PENDING = 'PENDING'

#: The members of a receipt that tell how its task ended.
_OUTCOME = ('done', 'result', 'error', 'left_out')

#: A larger result is left out: receipts are replicated to devices.
MAX_RESULT_CHARACTERS = 64_000

#: Longer texts of errors are cut.
_MAX_ERROR_CHARACTERS = 2_000


class _ParcelOptions(TypedDict, total=False):
    #: Members of records, see `kombu_couchdb.contrib.regions.region`.
    lent: float
    fallback: str
    fallback_at: float
    state: Literal['there', 'withdrawn']
    taken: float
    by: str
    told: bool
    run_in: str
    cancelled: float
    delayed: str
    status: Literal['refused']
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


def moved_id(source: str, parcel_id: str) -> str:
    """Return the id of a parcel's message in the broker's database.

    `source` is the name of the database of parcels, or `region.SOURCE` for a record. The id is made of both alone, so
    that a message is stored once if two workers move the same parcel.
    """
    return MESSAGE + sha256(f'{source}/{parcel_id}'.encode()).hexdigest()[:32]


def is_waiting(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is a parcel that was neither moved nor refused.

    It may have a `type` or `status` of its program, see `own_members`, if it names a task.
    """
    if doc.get('_deleted') or doc.get('status') == 'refused':
        return False
    return isinstance(doc.get('task'), str) and doc.get('type') != 'Receipt' if own_members(doc) else True


def own_members(doc: Mapping[str, Any]) -> list[str]:
    """Return which of the members `type` and `status`, which say what a document is, its program has set."""
    return [name for name, ours in (('type', 'Parcel'), ('status', 'refused')) if doc.get(name) not in (ours, None)]


def refused(doc: Mapping[str, Any], reason: str, now: float) -> Document:
    """Return a parcel as refused: it stays where its publisher can see it, with the reason."""
    kept = {name: value for name, value in doc.items() if name not in own_members(doc)}
    return {**kept, 'status': 'refused', 'reason': reason, 'failed': now}


def shortened(doc: Mapping[str, Any]) -> Document:
    """Return a refused parcel or a receipt without what its publisher wrote: CouchDB refuses it for its size."""
    if doc.get('type') != 'Receipt':
        reason = f'{doc["reason"]}; the rest of the document was removed, because with the reason it was too large'
        return {**{name: doc[name] for name in _REFUSED if name in doc}, 'reason': reason}
    task = doc.get('task')
    is_name = isinstance(task, str) and task.isprintable() and len(task) <= _MAX_NAME_CHARACTERS
    return {**{name: doc[name] for name in _RECEIPT if name in doc}, 'task': task if is_name else None}


# -- receipts


class _ReceiptOptions(TypedDict, total=False):
    #: When the task ended. The members below are there only then, one of them.
    done: float
    result: Any
    error: str
    left_out: str


class Receipt(_ReceiptOptions, Stored):
    """A parcel of a program without Celery after it was moved, beside the members that the program wrote."""

    _id: str
    type: Literal['Receipt']
    task: str
    id: str
    moved: float
    state: str
    #: When it is deleted.
    kept_until: float


def receipt_of(doc: Mapping[str, Any], task_id: str, due: float | None, now: float, keep: float) -> Document:
    """Return the receipt for a parcel that was moved.

    `due` is when the task may run, `keep` for how many seconds the receipt is kept then, both at least.
    """
    own = {name: value for name, value in doc.items() if name not in _OUTCOME}
    receipt: Receipt = {
        '_id': doc['_id'],
        'type': 'Receipt',
        'task': doc['task'],
        'id': task_id,
        'moved': now,
        'state': _PENDING,
        'kept_until': max(now, due or now) + keep,
    }
    return {**own, **receipt}


def end_of(state: str, outcome: Mapping[str, Any], date: float, keep: float) -> Document:
    """Return the members of a receipt whose task has ended at `date`; the outcome is one of those below."""
    return {'state': state, 'done': date, **outcome, 'kept_until': date + keep}


def ended(doc: Mapping[str, Any], end: Mapping[str, Any]) -> Document:
    """Return the receipt that says how a task has ended, see `end_of`."""
    own = {name: value for name, value in doc.items() if name not in _OUTCOME}
    return {**own, 'type': 'Receipt', **end}


def error_outcome(text: str) -> Document:
    """Return the member of a receipt with an error."""
    # CouchDB cannot store half of a surrogate pair, which a file name in the text may contain.
    return {'error': text[:_MAX_ERROR_CHARACTERS].encode('utf-8', 'backslashreplace').decode('utf-8')}


def is_open(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is a receipt that does not tell how its task ended."""
    return doc.get('type') == 'Receipt' and 'done' not in doc


def result_outcome(result: Any) -> Document:
    """Return the member of a receipt with a result as JSON; or the one that says why it is left out."""
    try:
        text = json.dumps(result, default=str, allow_nan=False, ensure_ascii=False)
        value = json.loads(text.encode('utf-8'))
    except Exception:  # half of a surrogate pair, or what `str` of an object of the application raises
        return {'left_out': 'the result is not JSON'}
    if len(text) > MAX_RESULT_CHARACTERS:
        return {'left_out': f'the result has {len(text):,} characters, more than {MAX_RESULT_CHARACTERS:,}'}
    try:
        check_value('the result', value)
    except Unstorable as exc:
        return {'left_out': str(exc)}
    return {'result': value}


# -- the database


def design_documents() -> list[dict[str, Any]]:
    """Return the design document of a database of parcels, without a revision."""
    return [{'_id': f'_design/{PARCELS}', **WITHOUT_ROWS}]
