"""The WorkItem: the document that is a message, and what may happen to it, as pure functions.

::

    {"_id": "0000647…", "type": "WorkItem", "queue": "celery", "priority": 0,
     "date": null,                     when it is due, seconds since the epoch; null: at once
     "published": 1763709000.123456,   orders the messages that are due at once
     "attempts": 0,                    how often it was delivered, and not given back by a consumer that stopped
     "claimed": null,                  or {"by": the id of a Consumer document, "date": when}
     "expires": 1763709060.1,          only if the message has an expiration: when it is not delivered any more
     "consumer": "broker:consumer:…",  only if it came back: who was the last to hold it
     "key": "customer-42",             only of a unique job (see `unique`), with `next`: what runs after it, and `sent`: when
                                       the newest message for it was sent, or its turn came; and `done`: the delivery tag
                                       of what ran before it, or in its tombstone of what ran last
     "message": {"body", "headers", "properties", "content-type", "content-encoding"},
     "_attachments": {"body": …}}      only of a large message: its body, which is null in `message` then (see `body`)

A dead one also has `status: "fail"`, `reason` and `failed` (when). The state is derived: dead, claimed, scheduled
(`date` is yet to come) or ready. An acknowledged item is deleted, without a body. No function here does I/O; each
returns a new document and leaves the one it was given as it is. Dates are seconds since the epoch, UTC.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from ..errors import ConfigurationError
from .body import attached, is_large
from .ids import JOB
from .properties import HIGHEST, due_date, lifetime, priority
from .reasons import malformed
from .validation import is_deeper

__all__ = [
    'HIGHEST',
    'JOB_KEY',
    'acked',
    'apart',
    'buried',
    'bury',
    'claim',
    'claimant',
    'dead_copy',
    'deleted',
    'flaw',
    'has_expired',
    'is_announced',
    'is_due',
    'is_unique',
    'is_waiting',
    'job_id',
    'new',
    'new_id',
    'rank',
    'ready_since',
    'release',
    'replay',
    'size',
    'state',
    'tag',
    'task_id',
    'task_name',
]

Document = dict[str, Any]

#: A message's header with this name makes it a unique job.
JOB_KEY = 'job_key'
_LONGEST_KEY = 500

#: A unique job, which keeps its body in the document, may be as large as the server takes when it is published; later states
#: of it must fit, too.
_ROOM = ' ' * 600

#: An item is nested in no more levels than the message that is published, and those around one that waits behind a unique job.
_DEEPEST = 110

#: An item that was delivered more often is spoilt; and no date is beyond these, in seconds.
_ATTEMPTS, _DATES = 10**9, 1e12

_serial = itertools.count()


def new_id(now: float) -> str:
    """Return an id that sorts by time, so that CouchDB's B-trees append instead of scattering."""
    return f'{int(now * 1e6):014x}{next(_serial) & 0xFFFF:04x}{os.urandom(6).hex()}'


def new(doc_id: str, queue: str, message: Mapping[str, Any], now: float) -> Document:
    """Return the WorkItem for a message as kombu's virtual transports represent it.

    That of a unique job, with a job key in its headers, has an id of its own instead of `doc_id`. *Raises*
    `ConfigurationError` for a job key that cannot be one, `Unstorable` for a body that cannot be written.
    """
    doc: Document = {
        '_id': doc_id,
        'type': 'WorkItem',
        'queue': queue,
        'priority': priority(message),
        'date': due_date(message),
        'published': now,
        'attempts': 0,
        'claimed': None,
        'message': message,
    }
    if (seconds := lifetime(message)) is not None:
        doc['expires'] = now + seconds
    if (key := (message.get('headers') or {}).get(JOB_KEY)) is not None:
        doc['key'] = key
        doc['_id'] = job_id(queue, message['headers'].get('task'), key)
        if is_large(message):
            doc['room'] = _ROOM  # others may change the message, or put theirs behind it
    elif is_large(message):
        doc |= attached(message)
    return doc


def job_id(queue: str, task: Any, key: Any) -> str:
    """Return the id of a unique job; *raises* `ConfigurationError` if `key` is not text of a fit length."""
    if (
        not isinstance(key, str)
        or not 0 < len(key) <= _LONGEST_KEY
        or any('\ud800' <= char <= '\udfff' for char in key)
    ):
        raise ConfigurationError(
            f'the header {JOB_KEY} must be text of 1 to {_LONGEST_KEY} characters, not {key!r:.80}'
        )
    # JSON keeps the three apart, whatever characters they have.
    return JOB + json.dumps([queue, task, key], ensure_ascii=False, separators=(',', ':'))


def is_due(doc: Mapping[str, Any], now: float) -> bool:
    """Tell whether an item may be handed out at `now`."""
    date = doc.get('date')
    return not isinstance(date, (int, float)) or date <= now


def has_expired(doc: Mapping[str, Any], now: float) -> bool:
    """Tell whether the message's `expiration` has passed: it must not be delivered any more."""
    expires = doc.get('expires')
    return isinstance(expires, (int, float)) and expires <= now


def is_announced(doc: Mapping[str, Any]) -> bool:
    """Tell whether a worker must be given an item though it has expired: Celery does not run the task, but counts it as revoked.

    It is one of a group, with a header `expires`. Without that count a chord would never end.
    """
    message = doc.get('message')
    headers = message.get('headers') if isinstance(message, dict) else None
    return isinstance(headers, dict) and all(isinstance(headers.get(name), str) for name in ('group', 'expires'))


def ready_since(doc: Mapping[str, Any]) -> float:
    """Return when an item became ready: when it was due, or else published; or sent last, if that was later."""
    dates = (doc.get('published') if doc.get('date') is None else doc['date'], doc.get('sent'))
    return max((float(date) for date in dates if isinstance(date, (int, float))), default=0.0)


def is_waiting(doc: Mapping[str, Any]) -> bool:
    """Tell whether nobody holds an item, and it is neither done nor dead."""
    return not (claimant(doc) or doc.get('status') or doc.get('_deleted'))


def claimant(doc: Mapping[str, Any]) -> str | None:
    """Return the id of the consumer that holds an item, or None."""
    claimed = doc.get('claimed')
    by = claimed.get('by') if isinstance(claimed, dict) else None
    return by if isinstance(by, str) else None


def claim(doc: Document, by: str, now: float) -> Document:
    """Return the item as claimed by the Consumer `by`.

    `by` and `now` make the claim unique: CouchDB gives equal bodies on the same parent the same revision, so that two
    equal claims would both be told that they won.
    """
    return {**_without_room(doc), 'claimed': {'by': by, 'date': now}, 'attempts': doc['attempts'] + 1}


def release(doc: Document, *, delivered: bool = True, counts: bool = True) -> Document:
    """Return the item as waiting again, at its old place in the queue; an attempt that was not `delivered` does not count."""
    attempts = doc.get('attempts')
    fewer = {'attempts': attempts - 1} if not (delivered and counts) and isinstance(attempts, int) else {}
    return {**doc, 'claimed': None, **fewer, **(_holder(doc) if delivered else {})}


def bury(doc: Document, reason: str, now: float) -> Document:
    """Return the item as dead: kept where a person can see it, out of the way of the queue."""
    return {**_without_room(doc), 'claimed': None, **buried(reason, now), **_holder(doc)}


def buried(reason: str, now: float) -> Document:
    """Return what a dead item has more than others."""
    return {'status': 'fail', 'reason': reason, 'failed': now}


def acked(doc: Mapping[str, Any], now: float) -> Document:
    """Return what is to be written when an item is done: its deletion, or of a unique job what runs after it, if there is any."""
    following = doc.get('next')
    if isinstance(following, list) and following and isinstance(following[0], dict):
        kept = {name: doc[name] for name in ('_id', '_rev', 'type', 'queue', 'key') if name in doc}
        rest = {'next': following[1:]} if following[1:] else {}
        first = {name: value for name, value in following[0].items() if not name.startswith('_')}  # CouchDB's own names
        return {**first, **kept, 'attempts': 0, 'claimed': None, 'sent': now, **rest, **_done(doc)}
    return deleted(doc)


def deleted(doc: Mapping[str, Any]) -> Document:
    """Return the deletion of this revision of the item, and of no other."""
    return {'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True, **_done(doc)}


def apart(doc: Document, now: float) -> list[Document]:
    """Return what is to be written for an item: itself, but of a dead one with others behind it a copy, and what follows."""
    if not doc.get('status') or not doc.get('next'):
        return [doc]
    return [dead_copy(doc), acked(doc, now)]


def dead_copy(doc: Document) -> Document:
    """Return a dead unique job under an id of its own, made of its message: whoever makes this again makes the same."""
    date = doc.get('published')
    try:
        known = f'{doc["_id"]}\0{json.dumps(doc.get("message"), default=repr)}'
    except RecursionError:
        known = f'{doc["_id"]}\0{doc["_rev"]}'
    made = int(max(0, min(_DATES, date)) * 1e6) if isinstance(date, (int, float)) else 0
    copy_id = f'{made:014x}{sha256(known.encode()).hexdigest()[:16]}'
    return {
        **{name: value for name, value in doc.items() if name not in ('_rev', '_attachments', 'next')},
        '_id': copy_id,
    }


def replay(doc: Document, now: float) -> Document:
    """Return a dead item as waiting at the end of its queue, as if it had never been delivered; it does not expire any more."""
    kept = {
        name: value for name, value in doc.items() if name not in ('status', 'reason', 'failed', 'expires', 'consumer')
    }
    headers = {name: None if name == 'expires' else value for name, value in doc['message']['headers'].items()}
    return {**kept, 'date': None, 'published': now, 'attempts': 0, 'message': {**doc['message'], 'headers': headers}}


def state(doc: Mapping[str, Any], now: float) -> str:
    """Return `dead`, `running` (claimed), `scheduled`, `pending`, or `gone` for one that has expired and is not delivered."""
    if doc.get('status'):
        return 'dead'
    if claimant(doc):
        return 'running'
    if has_expired(doc, now) and not is_announced(doc):
        return 'gone'
    return 'pending' if is_due(doc, now) else 'scheduled'


def task_id(doc: Mapping[str, Any]) -> str | None:
    """Return the id of the task in an item, or in what waits behind one; None if it is no Celery message."""
    return _header(doc, 'id')


def task_name(doc: Mapping[str, Any]) -> str | None:
    """Return the name of the task in an item, or None if it is no Celery message."""
    return _header(doc, 'task')


def tag(doc: Mapping[str, Any]) -> str | None:
    """Return the delivery tag that the publisher gave the message in an item, or in what waits behind one; None without one."""
    message = doc.get('message')
    properties = message.get('properties') if isinstance(message, dict) else None
    found = properties.get('delivery_tag') if isinstance(properties, dict) else None
    return found if isinstance(found, str) else None


def size(doc: Mapping[str, Any]) -> int:
    """Return about how many characters an item has; what is small in any case is not counted."""
    message = doc.get('message')
    body = message.get('body') if isinstance(message, dict) else None
    return len(body) if isinstance(body, str) else 0


def is_unique(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document, or its deletion, is that of a unique job, under the id that its key makes."""
    return str(doc['_id']).startswith(JOB)


def flaw(doc: Mapping[str, Any]) -> str | None:
    """Return in one sentence what is wrong with an item that somebody spoilt, or None if it can be delivered."""
    message = doc.get('message')
    if not isinstance(message, dict):
        return malformed('message is missing or not an object')
    for name, kinds in (('properties', dict), ('headers', dict), ('body', (str, type(None)))):
        if not isinstance(message.get(name), kinds):
            return malformed(f'message.{name} is missing or of a wrong type')
    if not isinstance(message['properties'].get('delivery_info', {}), dict):
        return malformed('message.properties.delivery_info is not an object')
    if doc.get('claimed') is not None and claimant(doc) is None:
        return malformed('claimed is neither null nor names a consumer')
    attempts, date = doc.get('attempts'), doc.get('date')
    if isinstance(attempts, bool) or not isinstance(attempts, int) or not 0 <= attempts <= _ATTEMPTS:
        return malformed('attempts is not a whole number, or too large')
    if isinstance(date, bool) or not isinstance(date, (int, float, type(None))):
        return malformed('date is neither null nor a number of seconds')
    if is_deeper(doc, _DEEPEST):
        return malformed(f'it is nested in more than {_DEEPEST} levels')
    return None


def rank(priority: int) -> int:
    """Return the place of a priority in the view's key: the highest comes first."""
    return HIGHEST - priority


def _header(doc: Mapping[str, Any], name: str) -> str | None:
    message = doc.get('message')
    headers = message.get('headers') if isinstance(message, dict) else None
    found = headers.get(name) if isinstance(headers, dict) else None
    return found if isinstance(found, str) else None


def _holder(doc: Document) -> Document:
    by = claimant(doc)
    return {'consumer': by} if by else {}


def _done(doc: Mapping[str, Any]) -> Document:
    # The id of a unique job is used again: what is said of it is said of this message.
    return {'done': tag(doc)} if 'key' in doc and tag(doc) is not None else {}


def _without_room(doc: Document) -> Document:
    return {name: value for name, value in doc.items() if name != 'room'} if 'room' in doc else doc
