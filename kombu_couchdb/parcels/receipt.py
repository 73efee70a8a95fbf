"""The Receipt: the outcome of a parcel that a program wrote without Celery.

When such a parcel is moved, its document becomes the receipt, so that its publisher sees it in the document that it has
written, by HTTP or in a replica::

    {"_id": "order-17", "type": "Receipt",
     "task": "shop.order", "args": [17], …,       as the publisher wrote it
     "id": "…",                                   the id of the task
     "moved": 1763709001.5,                       when the task was put into its queue
     "state": "PENDING",                          then "SUCCESS", "FAILURE" or "REVOKED"
     "done": 1763709002.5,                        when it ended
     "result": 42,                                what it returned; or "error", or "left_out"
     "kept_until": 1764313802.5}                  when the receipt is deleted

The publisher creates the document. Afterwards only the process that moves parcels writes it. What a publisher writes
into a receipt changes nothing that runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from ..documents.types import Document, Stored
from ..documents.validation import check_value
from ..errors import Unstorable

#: The state of a task that has not ended, as Celery names it.
_PENDING = 'PENDING'

#: The members of a receipt that tell how its task ended.
_OUTCOME = ('done', 'result', 'error', 'left_out')

#: A larger result is left out: receipts are replicated to devices.
MAX_RESULT_CHARACTERS = 64_000

#: Longer texts of errors are cut.
_MAX_ERROR_CHARACTERS = 2_000


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


def opened(doc: Mapping[str, Any], task_id: str, due: float | None, now: float, keep: float) -> Document:
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


def closed(
    doc: Mapping[str, Any], state: str, result: Any, error: str | None, date: float, now: float, keep: float
) -> Document:
    """Return a receipt of a task that has ended at `date` with this result, or, if it is not None, this error."""
    if error is not None:
        # CouchDB cannot store half of a surrogate pair, which a file name in the text may contain.
        text = error[:_MAX_ERROR_CHARACTERS].encode('utf-8', 'backslashreplace').decode('utf-8')
        outcome: Mapping[str, Any] = {'error': text}
    else:
        outcome = _value(result)
    own = {name: value for name, value in doc.items() if name not in _OUTCOME}
    return {**own, 'state': state, 'done': date, **outcome, 'kept_until': now + keep}


def is_open(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is a receipt that does not tell how its task ended."""
    return doc.get('type') == 'Receipt' and 'done' not in doc


def outlasts(doc: Mapping[str, Any], date: float) -> bool:
    """Tell whether a document is an open receipt that is kept longer than until `date`."""
    until = doc.get('kept_until')
    return is_open(doc) and isinstance(until, (int, float)) and until > date


def _value(result: Any) -> dict[str, Any]:
    """Return the member with a result as JSON; or the one that says why it is left out."""
    try:
        text = json.dumps(result, default=str, allow_nan=False, ensure_ascii=False)
        value = json.loads(text.encode('utf-8'))
    except (TypeError, ValueError, RecursionError):  # with half of a surrogate pair, too
        return {'left_out': 'the result is not JSON'}
    if len(text) > MAX_RESULT_CHARACTERS:
        return {'left_out': f'the result has {len(text):,} characters, more than {MAX_RESULT_CHARACTERS:,}'}
    try:
        check_value('the result', value)
    except Unstorable as exc:
        return {'left_out': str(exc)}
    return {'result': value}
