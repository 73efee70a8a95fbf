"""The documents of the result database, as pure functions: what they hold, and how an encoded value is kept in one.

::

    {"_id": "celery-task-meta-<task id>", "type": "Result", "status": "SUCCESS", "task": "shop.add",
     "date": 1790000000.0, "expires": 1790086400.0, "delivery": [0, 0, 2],
     "value": {"task_id", "status", "result", "traceback", …}}

A saved group is a `Group`, anything else a `Value`. `date` is when it was stored, `expires` when it may be deleted, both
in seconds since the epoch. `delivery` is the delivery of the task's message whose run stored the result; see `delivery_of`.
`value` holds Celery's own encoding, taken apart only if it comes back the same; see `pack`.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from celery import states
from kombu.exceptions import DecodeError

from kombu_couchdb.documents.validation import is_deeper

__all__ = ['Document', 'delivery_of', 'is_expired', 'is_final', 'is_outdated', 'pack', 'precedence', 'stamp', 'unpack']

Document = dict[str, Any]


def stamp(doc: Document, now: float, lifetime: float | None) -> Document:
    """Return `doc` with its `date`, and with `expires` if it has a `lifetime`, in seconds."""
    return {**doc, 'date': now, **({'expires': now + lifetime} if lifetime else {})}


def is_expired(doc: Document, now: float) -> bool:
    """Tell whether `doc` counts as deleted at the time `now`, though nobody has swept it up yet."""
    expires = doc.get('expires')
    return isinstance(expires, (int, float)) and expires <= now


def is_final(doc: Mapping[str, Any]) -> bool:
    """Tell whether `doc` is the result of a task that has ended, however it did."""
    return doc.get('status') in states.READY_STATES


def delivery_of(request: Any, task_id: str) -> list[int]:
    """Return which delivery of a task's message `request` belongs to: a later one compares greater than an earlier one.

    The three numbers are how often the task was replaced, how often it was retried, both of which send a new message, and which
    delivery of that message it is. The list is empty for a result that is not stored by a run of the task itself: the failure of
    a chain's earlier step, for example. Brokers other than CouchDB only tell a redelivery from the first delivery.
    """
    if request is None or getattr(request, 'id', None) != task_id:
        return []
    info = (getattr(request, 'properties', None) or {}).get('delivery_info') or getattr(request, 'delivery_info', None)
    if not isinstance(info, dict):
        return []
    numbers = [
        getattr(request, 'replaced_task_nesting', 0),
        getattr(request, 'retries', 0),
        info.get('delivery', int(bool(info.get('redelivered')))),
    ]
    return [number if isinstance(number, int) else 0 for number in numbers]


def is_outdated(doc: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Tell whether a result must not be written over the one that is there.

    A success stays. A failure stays unless `doc` is of a newer delivery of the task. A state that is not final gives way to
    everything but an unfinished or failed older delivery.
    """
    if there.get('status') == states.SUCCESS:
        return True
    own, other = _delivery(doc), _delivery(there)
    if is_final(there):
        return own <= other
    return bool(own) and own < other and doc.get('status') != states.SUCCESS


def precedence(doc: Mapping[str, Any]) -> tuple[bool, list[int], bool]:
    """Return what orders the conflicting leaves of a result: a success, then the newest delivery, then a final state."""
    return doc.get('status') == states.SUCCESS, _delivery(doc), is_final(doc)


def _delivery(doc: Mapping[str, Any]) -> list[int]:
    found = doc.get('delivery')
    return found if isinstance(found, list) and all(isinstance(number, int) for number in found) else []


def pack(payload: str | bytes, content_type: str) -> Document:
    """Return the members of a document that hold an encoded value.

    JSON becomes an object if every server returns it as it was; else the encoded text is kept as it is, and bytes as
    base64, both with their content type.
    """
    if isinstance(payload, bytes):
        return {'content_type': content_type, 'base64': b64encode(payload).decode('ascii')}
    value = _portable(payload) if content_type == 'application/json' else None
    return {'value': value} if isinstance(value, dict) else {'content_type': content_type, 'value': payload}


def unpack(doc: Document | None) -> str | bytes | None:
    """Return the encoded value that a document holds, None if there is none; *raises* `DecodeError` if nobody can encode it."""
    if doc is None:
        return None
    if 'base64' in doc:
        return b64decode(doc['base64'])
    value = doc.get('value')
    # Text is also what Celery's own CouchDB backend stored, under the same ids.
    try:
        return value if value is None or isinstance(value, str) else json.dumps(value)
    except RecursionError as exc:
        raise DecodeError(f'{doc.get("_id", "a value")} cannot be decoded: it is nested too deeply') from exc


def _portable(payload: str) -> Any:
    """Return the value of a JSON text, None if a server written in Erlang or JavaScript might change or refuse it."""
    if '"__type__"' in payload or '"__proto__"' in payload:  # kombu's own types stay as it wrote them
        return None
    try:
        value = json.loads(payload, parse_int=_number, parse_float=_number, parse_constant=_number)
        if '\\ud' in payload:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
        return None if is_deeper(value) else value
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> int | float:
    if len(text) < 16 and text.lstrip('-').isdigit():  # JavaScript's integers have 53 bits
        return int(text)
    number = float(text)  # JavaScript makes 2.0 an integer, Erlang makes the smallest fractions 0.0, both know no NaN
    if number.is_integer() or not sys.float_info.min <= abs(number) <= sys.float_info.max:
        raise ValueError(text)
    return number
