"""The dead letter: a WorkItem that is not delivered but kept for an operator, with the reason.

A dead letter has `status: "fail"`, `reason` and `failed` (when). The beginning of the reason is one of the constants
below, so that people and programs can tell the kinds apart; the rest is a sentence about the single message.

The dead letter of a task that failed also has `error`, see `types.TaskError`, and `expires`: it is deleted then.

A dead letter keeps its id, unless it is a unique job. A dead unique job gets an id of its own when the id of the job is
needed for other messages: if it has messages in `next` (`apart`), or when a new message for its key is published
(`unique_merge.merge`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, cast

from ..values import MAX_DATE, storable
from . import workitem
from .concurrency import unpark
from .task_message import MAX_LINE
from .types import FAIL, DeadLetter, Document, TaskError, WorkItem

#: The document was changed by hand and is not valid any more, or its body cannot be read or decoded.
MALFORMED = 'malformed'
#: A worker rejected the message without requeueing it.
REJECTED = 'rejected'
#: The message was delivered as often as its queue allows.
DELIVERY_LIMIT = 'delivery limit'
#: The task of the message failed, and is not retried any more.
FAILED = 'failed'

#: The kinds of reasons, and the kind of all others, which somebody else has written. The view `failures` contains them:
#: another one needs a new `design.JOBS`.
KINDS, OTHER = (MALFORMED, REJECTED, DELIVERY_LIMIT, FAILED), 'other'

#: The reason of a WorkItem whose queue is not text. The view `dead` writes the same.
NO_QUEUE = f'{MALFORMED}: queue is not text'

#: The maximum number of characters of the text of an error in a reason, and of the text of an exception and of a
#: traceback in `error`. What is longer loses its middle.
_MAX_LENGTH, _MAX_TEXT = 280, 50_000


# -- reasons


def malformed(detail: str) -> str:
    """Return the reason of a message that cannot be delivered."""
    return f'{MALFORMED}: {detail}'


def undecodable(error: object) -> str:
    """Return the reason of a message whose body cannot be decoded."""
    return malformed(f'the body cannot be decoded ({_one_line(str(error))})')


def rejected(detail: object) -> str:
    """Return the reason of a message that a worker rejected."""
    return f'{REJECTED}: {_one_line(detail)}'


def _one_line(detail: object) -> str:
    """Return a text, or the type and text of an exception, in one line that CouchDB can store."""
    try:
        text = f'{type(detail).__name__}: {detail}' if isinstance(detail, BaseException) else str(detail)
    except Exception:  # the text of another package's exception may fail
        text = type(detail).__name__
    return ' '.join(text.split())[:_MAX_LENGTH].encode('utf-8', 'replace').decode('utf-8')


def kind_of(doc: Mapping[str, Any]) -> str:
    """Return the kind of the reason of a dead letter: one of `KINDS`, or `OTHER`."""
    reason = doc.get('reason')
    return next((kind for kind in KINDS if isinstance(reason, str) and reason.startswith(kind)), OTHER)


def error_in(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `error` of a dead letter; {} if it has none, or somebody has replaced it."""
    found = doc.get('error')
    return found if isinstance(found, dict) else {}


def error_type(doc: Mapping[str, Any]) -> str:
    """Return the type of the exception, or else the kind of the reason. The view `failures` does the same."""
    found = error_in(doc).get('type')
    return found if isinstance(found, str) and len(found) <= MAX_LINE else kind_of(doc)


def error_text(doc: Mapping[str, Any]) -> str:
    """Return the type and the text of the exception of a dead letter, in one short line; or the reason."""
    return str(doc.get('reason') or OTHER).removeprefix(f'{FAILED}: ')


# -- documents


def members(reason: str, now: float) -> DeadLetter:
    """Return the members that make an item a dead letter."""
    return {'status': FAIL, 'reason': reason, 'failed': now}


def made_of(doc: Mapping[str, Any], reason: str, now: float) -> Document:
    """Return an item as a dead letter. The item may be malformed."""
    return {
        **unpark(workitem.without_room(doc)),
        'claimed': None,
        **members(reason, now),
        **workitem.last_consumer(doc),
    }


def failed(doc: Mapping[str, Any], error: TaskError, seconds: float, now: float) -> Document:
    """Return an item whose task has failed as a dead letter that is kept for `seconds`."""
    text = error['text'].strip()
    reason = f'{FAILED}: {_one_line(error["type"] + (f": {text}" if text else ""))}'
    bounded = {name: _bounded(value, _MAX_TEXT) if isinstance(value, str) else value for name, value in error.items()}
    bounded['type'] = storable(error['type'], MAX_LINE)
    return {**made_of(doc, reason, now), 'expires': now + seconds, 'error': bounded}


def _bounded(text: str, length: int) -> str:
    text = storable(text, len(text))
    half = length // 2
    return text if len(text) <= length else f'{text[:half]} … ({len(text):,} characters) … {text[-half:]}'


def shortened(doc: Mapping[str, Any]) -> Document | None:
    """Return the dead letter of a failed task without text and traceback; None if it has none.

    With them, the document may be larger than CouchDB allows.
    """
    error = error_in(doc)
    return {**doc, 'error': {**error, 'text': '', 'traceback': ''}} if error.get('traceback') else None


def apart(doc: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the documents to write for a new state `doc` of an item, in this order; the last one has its id.

    Usually that is `doc`. If `doc` is a dead letter with messages in `next`: a copy of the dead letter under another
    id, then the item with the first of these messages. The same for a unique job that is done, also without `next`.
    """
    if doc.get('status') and (doc.get('next') or (workitem.is_done(doc) and workitem.is_unique(doc))):
        return [copy(doc), workitem.acked(doc, doc.get('finished' if workitem.is_done(doc) else 'failed') or 0.0)]
    return [doc]


def copy(doc: Mapping[str, Any]) -> Document:
    """Return a copy of a unique job that is dead or done under another id, without `next`.

    The id is made of the job's id and its message, so that two processes that copy the same one store it once.
    """
    date = doc.get('published')
    try:
        known = f'{doc["_id"]}\0{json.dumps(doc.get("message"), default=repr)}'
    except RecursionError:
        known = f'{doc["_id"]}\0{doc["_rev"]}'
    made = int(max(0, min(MAX_DATE, date)) * 1e6) if isinstance(date, (int, float)) else 0
    copy_id = f'{made:014x}{sha256(known.encode()).hexdigest()[:16]}'
    kept = {name: value for name, value in doc.items() if name not in ('_rev', '_attachments', 'next', 'moved')}
    return {**kept, '_id': copy_id}


def replayed(doc: WorkItem, now: float) -> WorkItem:
    """Return a dead letter as an item that waits at the end of its queue and was never delivered; it never expires.

    Its task may be retried as often as when it was first sent.
    """
    dropped = ('status', 'reason', 'failed', 'expires', 'consumer', 'error')
    kept = {name: value for name, value in doc.items() if name not in dropped}
    again = {'expires': None, 'retries': 0}
    headers = {name: again.get(name, value) for name, value in doc['message']['headers'].items()}
    message = {**doc['message'], 'headers': headers}
    return cast(WorkItem, {**kept, 'date': None, 'published': now, 'attempts': 0, 'message': message})
