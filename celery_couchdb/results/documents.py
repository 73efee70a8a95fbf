"""The documents of the result database: their types, and pure functions about them.

::

    {"_id": "celery-task-meta-<task id>", "type": "Result", "status": "SUCCESS", "task": "shop.add",
     "date": 1790000000.0, "expires": 1790086400.0, "delivery": [0, 0, 2],
     "value": {"task_id", "status", "result", "traceback", …}}

`date` is when the document was stored, `expires` when it may be deleted, both in seconds since the epoch. `delivery`
names the delivery of the task's message that stored the result; see `delivery_of`. `value` is what Celery
encodes; it is an object only if CouchDB returns that unchanged; see `pack`.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypedDict, TypeVar, cast

from celery import states
from kombu.exceptions import DecodeError
from kombu.utils.encoding import safe_repr

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.conflicts import Rule
from kombu_couchdb.couchdb.http import TOO_DEEP
from kombu_couchdb.documents.validation import MAX_LEVELS
from kombu_couchdb.values import nesting, revision_parts

#: A part of the JSON of a value that is nested too deeply to be read.
_TOO_DEEP = json.dumps(TOO_DEEP)

#: The number of characters that are kept of each end of what is shortened.
_KEPT = 1000

#: A document as it was read, or of any type. Anybody may have changed it by hand.
Document = dict[str, Any]

_Doc = TypeVar('_Doc', bound=Mapping[str, Any])


class Packed(TypedDict, total=False):
    """An encoded value; see `pack`."""

    #: An object, or text if CouchDB might change the object.
    value: Any
    #: How `value` or `base64` is serialised, if `value` is not an object.
    content_type: str
    #: Instead of `value`: bytes.
    base64: str


class _Stored(TypedDict, total=False):
    _rev: str
    _deleted: bool
    #: When the document was stored; `stamp` sets it.
    date: float


class _Expiring(_Stored, total=False):
    #: When the document may be deleted; missing: never.
    expires: float


class _ResultOptions(Packed, _Expiring, total=False):
    delivery: list[int]
    #: The id of its part of a chord, if the part has no copy of the value.
    part: str
    #: The region in which the task ran, if its result returned from there.
    region: str


class Result(_ResultOptions):
    """The result of a task, or its state before."""

    _id: str
    type: Literal['Result']
    status: str
    task: str | None


class Group(Packed, _Expiring):
    """A saved group."""

    _id: str
    type: Literal['Group']
    status: None


class Value(Packed, _Stored):
    """A value that a program stores through `set()` of the backend; it never expires."""

    _id: str
    type: Literal['Value']
    status: None


class _ChordOptions(_Expiring, total=False):
    #: A random id of this run: the same chord may be sent a second time.
    run: str
    #: How often its errbacks were about to run.
    errbacks: int


class Chord(_ChordOptions):
    """A chord until its body is sent."""

    _id: str
    type: Literal['Chord']
    #: The number of parts; None until all of them are sent.
    size: int | None
    #: The ids of tasks that were added while the chord ran.
    added: list[str]
    body: Packed | None
    #: Whether there are groups in its header.
    nested: bool
    #: The random mark of the process that sends the body.
    claimed: str | None
    sent: bool


class _PartOptions(_Expiring, total=False):
    #: The result, unless it is stored under the id of the task.
    value: Packed
    #: The request of the task, without what is large, for the process that completes the chord.
    request: Packed


class ChordPart(_PartOptions):
    """A task of a chord's header that has ended."""

    _id: str
    type: Literal['Part']
    task_id: str
    #: The position in the header.
    index: int | None
    state: str


def new_chord(doc_id: str) -> Chord:
    """Return a chord of unknown size, without a body."""
    return {
        '_id': doc_id,
        'type': 'Chord',
        'size': None,
        'added': [],
        'body': None,
        'nested': False,
        'claimed': None,
        'sent': False,
    }


def stamp(doc: _Doc, now: float, lifetime: float | None) -> _Doc:
    """Return `doc` with its `date`, and with `expires` if it has a `lifetime`, in seconds."""
    return cast(_Doc, {**doc, 'date': now, **({'expires': now + lifetime} if lifetime else {})})


def is_expired(doc: Mapping[str, Any], now: float) -> bool:
    """Tell whether `doc` has expired at the time `now`: it counts as deleted until a sweep deletes it."""
    expires = doc.get('expires')
    return isinstance(expires, (int, float)) and expires <= now


def is_final(doc: Mapping[str, Any]) -> bool:
    """Tell whether `doc` is the result of a task that has ended, with success or without."""
    return doc.get('status') in states.READY_STATES


def delivery_of(request: Any, task_id: str) -> list[int]:
    """Return the delivery of a task's message that `request` belongs to; a later delivery compares greater.

    The three numbers are: how often the task was replaced, how often it was retried (both send a new message), and
    which delivery of that message this is. The list is empty if the result is not stored by a run of the task itself,
    but for example because an earlier step of its chain failed. Brokers other than CouchDB only tell a redelivery from
    the first delivery.
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


def is_outdated(doc: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Tell whether the result `doc` must not replace the result `stored`.

    A success is never replaced. A failure is replaced only by a newer delivery of the task. A state that is not final
    is replaced by everything but an unfinished or failed older delivery.
    """
    if stored.get('status') == states.SUCCESS:
        return True
    own, other = _delivery(doc), _delivery(stored)
    if is_final(stored):
        return own <= other
    return bool(own) and own < other and doc.get('status') != states.SUCCESS


def precedence(doc: Mapping[str, Any]) -> tuple[bool, list[int], bool]:
    """Return the sort key of leaf revisions of a result: success, then the newest delivery, then a final state."""
    return doc.get('status') == states.SUCCESS, _delivery(doc), is_final(doc)


def _delivery(doc: Mapping[str, Any]) -> list[int]:
    found = doc.get('delivery')
    return found if isinstance(found, list) and all(isinstance(number, int) for number in found) else []


def pack(payload: str | bytes, content_type: str) -> Packed:
    """Return the members of a document for an encoded value.

    JSON becomes an object if every server returns that unchanged. Other text is stored as it is and bytes as base64,
    both with their content type.
    """
    if isinstance(payload, bytes):
        return {'content_type': content_type, 'base64': b64encode(payload).decode('ascii')}
    value = _portable(payload) if content_type == 'application/json' else None
    return {'value': value} if isinstance(value, dict) else {'content_type': content_type, 'value': payload}


def unpack(doc: Mapping[str, Any] | None) -> str | bytes | None:
    """Return the encoded value in a document, or None; *raises* `DecodeError` if it is nested too deeply."""
    if doc is None:
        return None
    if 'base64' in doc:
        return b64decode(doc['base64'])
    value = doc.get('value')
    # Celery's own CouchDB backend stored text, too, under the same ids.
    if value is None or isinstance(value, str):
        return value
    try:
        text = json.dumps(value)
    except RecursionError:
        text = _TOO_DEEP
    if _TOO_DEEP in text:
        raise DecodeError(f'{doc.get("_id", "a value")} cannot be decoded: it is nested too deeply')
    return text


def shortened(meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the meta-data of a result with less and less of what is only for people, as far as something is long.

    First its arguments become text without its middle, and then the traceback loses its middle, too.
    """
    for names in (('args', 'kwargs'), ('traceback',)):
        texts = {name: _without_middle(meta.get(name)) for name in names}
        if any(texts.values()):
            meta = {**meta, **{name: text for name, text in texts.items() if text}}
            yield meta


def _without_middle(value: Any) -> str | None:
    text = value if isinstance(value, str) else safe_repr(value)
    if len(text) <= 3 * _KEPT:
        return None
    return f'{text[:_KEPT]} … (shortened: {len(text):,} characters are too many to be stored) … {text[-_KEPT:]}'


def error_text(value: Any) -> str:
    """Return the type and the text of an exception as Celery stores it."""
    if isinstance(value, Mapping):
        message = value.get('exc_message')
        text = ', '.join(map(str, message)) if isinstance(message, (list, tuple)) else str(message)
        return f'{value.get("exc_type")}: {text}'
    return f'{type(value).__name__}: {value}' if isinstance(value, BaseException) else str(value)


def _portable(payload: str) -> Any:
    """Return the value of a JSON text; None if a server written in Erlang or JavaScript might change or refuse it."""
    if '"__type__"' in payload or '"__proto__"' in payload:  # kombu's own types stay as it wrote them
        return None
    try:
        value = json.loads(payload, parse_int=_number, parse_float=_number, parse_constant=_number)
        if '\\ud' in payload:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
        return None if nesting(value)[0] > MAX_LEVELS else value
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> int | float:
    if len(text) < 16 and text.lstrip('-').isdigit():  # JavaScript's integers have 53 bits
        return int(text)
    number = float(text)  # JavaScript makes 2.0 an integer, Erlang makes the smallest fractions 0.0, both know no NaN
    if number.is_integer() or not sys.float_info.min <= abs(number) <= sys.float_info.max:
        raise ValueError(text)
    return number


def keep_best(leaves: list[Document], living: Collection[str] = ()) -> list[Document]:
    """Return the deletions of all leaf revisions of a document but one.

    The revision that is kept is the result with the highest `precedence`, the chord that has progressed furthest, or
    else CouchDB's winner. Every `Rule` has the argument `living`, the living consumers; this one does not use it.
    """
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    return [deletion(leaf) for leaf in sorted(live, key=_rank)[:-1]]


def _rank(leaf: Mapping[str, Any]) -> tuple[Any, ...]:
    added = leaf.get('added')
    return (
        *precedence(leaf),
        bool(leaf.get('sent')),
        bool(leaf.get('claimed')),
        bool(leaf.get('size')),
        len(added) if isinstance(added, list) else 0,
        *revision_parts(leaf['_rev']),
    )


#: The conflict rules of the result database: which of several leaf revisions is kept.
RULES: Mapping[str, Rule] = dict.fromkeys(('Result', 'Group', 'Value', 'Chord', 'Part'), keep_best)
