"""The WorkItem: the document of a message, and its changes, as pure functions.

::

    {"_id": "0000647…", "type": "WorkItem", "queue": "celery", "priority": 0,
     "date": null,                     when it is due, in seconds since the epoch; null: at once
     "published": 1763709000.123456,   orders the messages that are due at once
     "attempts": 0,                    how often it was delivered; see `release` for deliveries that do not count
     "claimed": null,                  or {"by": the id of a Consumer document, "date": when}
     "expires": 1763709060.1,          only if the message expires: from then on it is not delivered
     "temporary": true,                only if its queue has a lifetime: without the queue the message is deleted
     "consumer": "broker:consumer:…",  only after a release or in a dead letter: the consumer that held it last
     "parked": {"key", "date"},        only while it waits for a slot or a start: see `concurrency`, `rates`
     "key": "customer-42",             only of a unique job; `types` has its other members
     "message": {"body", "headers", "properties", "content-type", "content-encoding"},
     "_attachments": {"body": …}}      only of a large message: its body, which is null in `message` then; see `body`

A dead letter also has `status: "fail"`, `reason` and `failed` (when), and `error` if its task failed; see
`dead_letter`. The state is derived from the
members: dead, claimed, scheduled (`date` is in the future) or ready. An acknowledged item is deleted, and its tombstone
has no body; or it becomes a DoneItem, with its times, which is kept for a while (`keep_done`)::

    {"_id": "0000647…", "type": "DoneItem", "status": "done", "queue": "celery", "priority": 0, "date": null,
     "published": 1763709000.123456, "attempts": 1,
     "started": 1763709001.5,          when the consumer claimed it
     "finished": 1763709002.5,         when the consumer acknowledged it
     "expires": 1763795402.5,          when it is deleted
     "consumer": "broker:consumer:…",  the consumer, whose id contains host and process id
     "worker": "celery@shop-1",        the name of the Celery worker, if the consumer belongs to one
     "claimed": null, "message": {…}, "_attachments": {…}}

No function here does input or output. Each returns a new document and does not change the one that it was given. Dates
are seconds since the epoch, UTC. Functions that take a `Mapping` accept documents that somebody may have changed by
hand: see `validation`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any, cast

from ..errors import ConfigurationError
from ..values import MAX_NUMBER, is_number
from . import rates
from .body import attached, is_large
from .concurrency import parked_key
from .ids import JOB, JOB_KEY, job_id
from .task_message import HIGHEST, due_date, headers_of, lifetime, priority
from .types import DONE, Document, Message, Tombstone, WorkItem

#: Blanks in a unique job with a large body. CouchDB may accept a document of exactly its maximum size when it is
#: published, but later states of the job are larger (claimed, or with a reason) and must be accepted, too. They are
#: written without these blanks.
_ROOM = ' ' * 600

#: The property of a message, and the attribute of a task, with the seconds for which its completed message is kept.
KEEP_DONE = 'keep_done'

_serial = itertools.count()


def new_id(now: float) -> str:
    """Return an id that sorts by time, so that CouchDB appends to its B-trees instead of writing all over them."""
    return f'{int(now * 1e6):014x}{next(_serial) & 0xFFFF:04x}{os.urandom(6).hex()}'


def has_later_id(doc_id: str, date: float) -> bool:
    """Tell whether the id of a document is one of `new_id`, made after a date."""
    return ':' not in doc_id and doc_id > f'{int(date * 1e6):014x}g'


def new(doc_id: str, queue: str, message: Mapping[str, Any], now: float) -> WorkItem:
    """Return the WorkItem for a message as kombu's virtual transports represent it.

    A message with a job key in its headers is a unique job: its id is made of the key, and `doc_id` is not used.
    Its body stays in the document even if it is large. *Raises* `ConfigurationError` for an invalid job key or limit,
    `Unstorable` for a large body that contains half of a surrogate pair.
    """
    doc: WorkItem = {
        '_id': doc_id,
        'type': 'WorkItem',
        'queue': queue,
        'priority': priority(message),
        'date': due_date(message),
        'published': now,
        'attempts': 0,
        'claimed': None,
        'message': cast(Message, message),
    }
    rates.check(message.get('headers') or {})
    if (seconds := lifetime(message)) is not None:
        doc['expires'] = now + seconds
    if (key := (message.get('headers') or {}).get(JOB_KEY)) is not None:
        doc['key'] = key
        doc['_id'] = job_id(queue, message['headers'].get('task'), key)
        if is_large(message):
            doc['room'] = _ROOM  # the body is not attached: publishers replace the message, or add theirs to `next`
    elif is_large(message):
        doc['message'], doc['_attachments'] = attached(doc['message'])
    return doc


def check_keep_done(value: Any) -> float:
    """Return `value` if it is a time for which completed messages can be kept; 0 means that they are deleted.

    *Raises* `ConfigurationError` if it is not a number of seconds from 0 on.
    """
    if not is_number(value) or not 0 <= value <= MAX_NUMBER:
        raise ConfigurationError(f'{KEEP_DONE} must be a number of seconds from 0 to {MAX_NUMBER:,}, not {value!r:.80}')
    return float(value)


# -- questions


def is_due(doc: Mapping[str, Any], now: float) -> bool:
    """Tell whether an item may be delivered at the time `now`."""
    date = doc.get('date')
    return not isinstance(date, (int, float)) or date <= now


def has_expired(doc: Mapping[str, Any], now: float) -> bool:
    """Tell whether an item has expired. It is then not delivered any more, except as `delivers_expired` says."""
    expires = doc.get('expires')
    return isinstance(expires, (int, float)) and expires <= now


def delivers_expired(doc: Mapping[str, Any]) -> bool:
    """Tell whether an item is delivered even if it has expired: a task of Celery with a header `expires`.

    The worker does not run such a task but marks it as revoked: only a worker of the queue knows where the task's
    result is. If nobody did, a program would wait for the result for ever, and a chord would never end.
    """
    return task_id(doc) is not None and _header(doc, 'expires') is not None


def ready_since(doc: Mapping[str, Any]) -> float:
    """Return when an item became ready: its due date, or else its date of publishing; `sent` if that is later."""
    dates = (doc.get('published') if doc.get('date') is None else doc['date'], doc.get('sent'))
    return max((float(date) for date in dates if isinstance(date, (int, float))), default=0.0)


def is_waiting(doc: Mapping[str, Any]) -> bool:
    """Tell whether an item is neither claimed nor deleted, nor a dead letter or done."""
    return not (claimant(doc) or doc.get('status') or doc.get('_deleted'))


def is_dead(doc: Mapping[str, Any]) -> bool:
    """Tell whether an item is a dead letter: whatever its `status` is, it is not delivered."""
    return bool(doc.get('status')) and doc.get('type', 'WorkItem') == 'WorkItem'


def is_done(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document is a completed message that is kept."""
    return doc.get('type') == 'DoneItem'


def is_unique(doc: Mapping[str, Any]) -> bool:
    """Tell whether a document, or its deletion, has an id that was made of a job key."""
    return str(doc['_id']).startswith(JOB)


def claimant(doc: Mapping[str, Any]) -> str | None:
    """Return the id of the consumer that has claimed an item, or None."""
    claimed = doc.get('claimed')
    by = claimed.get('by') if isinstance(claimed, dict) else None
    return by if isinstance(by, str) else None


def last_consumer(doc: Mapping[str, Any]) -> Document:
    """Return `{'consumer': id}` of the consumer that has claimed an item, for the item's next state; {} if none has."""
    by = claimant(doc)
    return {'consumer': by} if by else {}


def state(doc: Mapping[str, Any], now: float) -> str:
    """Return the state of an item alone: `dead`, `done`, `prefetched` (claimed), `parked`, `scheduled` or `ready`.

    It is `gone` if it has expired for good. Whether a claimed item runs, only the heartbeat of its consumer says.
    """
    if doc.get('status'):
        if is_dead(doc):
            return 'dead'
        return 'gone' if has_expired(doc, now) else 'done'
    if claimant(doc):
        return 'prefetched'
    if has_expired(doc, now) and not delivers_expired(doc):
        return 'gone'
    if not is_due(doc, now):
        return 'scheduled'
    return 'ready' if parked_key(doc) is None else 'parked'


def task_id(doc: Mapping[str, Any]) -> str | None:
    """Return the id of the task in an item, or in an element of its `next`; None if the message is not from Celery."""
    return _header(doc, 'id')


def task_name(doc: Mapping[str, Any]) -> str | None:
    """Return the name of the task in an item, or None if the message is not from Celery."""
    return _header(doc, 'task')


def tag(doc: Mapping[str, Any]) -> str | None:
    """Return the delivery tag of the message of an item, or of an element of its `next`, which its publisher chose."""
    message = doc.get('message')
    properties = message.get('properties') if isinstance(message, dict) else None
    found = properties.get('delivery_tag') if isinstance(properties, dict) else None
    return found if isinstance(found, str) else None


def has_derived_id(doc: Mapping[str, Any]) -> bool:
    """Tell whether the delivery tag is derived from what the message is about: several processes may publish it.

    Such a tag has a prefix (`ids.ONCE`, or that of an optional room); that of `new_id` has none.
    """
    return ':' in (tag(doc) or '')


def size(doc: Mapping[str, Any]) -> int:
    """Return the length of the body that is in an item, in characters; its other members are always small."""
    message = doc.get('message')
    body = message.get('body') if isinstance(message, dict) else None
    return len(body) if isinstance(body, str) else 0


def rank(priority: int) -> int:
    """Return the rank of a priority in the key of the view `waiting`: the highest priority comes first."""
    return HIGHEST - priority


# -- changes


def claim(doc: WorkItem, by: str, now: float) -> WorkItem:
    """Return the item as claimed by the Consumer `by`, with one attempt more, without `room` and `parked`.

    `by` and `now` make each claim different. CouchDB gives two equal documents with the same parent the same revision,
    so two equal claims would get the same revision, and CouchDB would tell both consumers that they won.
    """
    claimed = doc.copy()
    claimed.pop('room', None)
    claimed.pop('parked', None)
    claimed['claimed'] = {'by': by, 'date': now}
    claimed['attempts'] += 1
    return claimed


def release(doc: Mapping[str, Any], *, delivered: bool = True, counts: bool = True) -> Document:
    """Return the item as waiting again, at its old position in the queue.

    `delivered` says that the message was handed to a worker. `counts` says that this delivery counts; it is false if
    the worker stopped in an orderly way. If either is false, the attempt that `claim` added is taken back. A message
    that was removed while it was claimed is not released but deleted; a unique job goes on with the next one.
    """
    if isinstance(removed := doc.get('removed'), (int, float)):
        return dict(dropped(doc, removed))
    attempts = doc.get('attempts')
    fewer = {'attempts': attempts - 1} if not (delivered and counts) and isinstance(attempts, int) else {}
    return {**doc, 'claimed': None, **fewer, **(last_consumer(doc) if delivered else {})}


def acked(doc: Mapping[str, Any], now: float) -> Mapping[str, Any]:
    """Return the document to write when the message of an item is done.

    That is the deletion of the item. A unique job with messages in `next` becomes the first of those instead.
    """
    following = doc.get('next')
    if isinstance(following, list) and following and isinstance(following[0], dict):
        kept = {name: doc[name] for name in ('_id', '_rev', 'queue', 'key', 'moved') if name in doc}
        rest = {'next': following[1:]} if following[1:] else {}
        first = {name: value for name, value in following[0].items() if not name.startswith('_')}  # CouchDB's own names
        return {**first, **kept, 'type': 'WorkItem', 'attempts': 0, 'claimed': None, 'sent': now, **rest, **_done(doc)}
    return deleted(doc)


def done(doc: Mapping[str, Any], seconds: float, now: float, worker: str | None) -> Document:
    """Return the DoneItem that replaces an acknowledged item and is kept for `seconds`.

    It has the same id, unless it is a unique job (see `dead_letter.apart`), and another type than a WorkItem, so that
    no view shows it as a message that waits, is claimed or is a dead letter. `worker` is the name of the Celery worker.
    """
    claimed = doc.get('claimed') or {}
    return {
        **doc,
        'type': 'DoneItem',
        'status': DONE,
        'claimed': None,
        'started': claimed.get('date'),
        'finished': now,
        'expires': now + seconds,
        **last_consumer(doc),
        **({'worker': worker} if worker else {}),
    }


def dropped(doc: Mapping[str, Any], now: float) -> Mapping[str, Any]:
    """Return the document to write when an item is deleted although nobody has acknowledged its message; see `acked`.

    Its tombstone says so.
    """
    after = acked(doc, now)
    return {**after, 'dropped': True} if after.get('_deleted') else after


def deleted(doc: Mapping[str, Any]) -> Tombstone:
    """Return the deletion of exactly this revision of the item."""
    tombstone: Tombstone = {'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True}
    if finished := _done(doc):
        tombstone['done'] = finished['done']
    if 'moved' in doc:
        tombstone['moved'] = doc['moved']
    if 'removed' in doc:
        tombstone['removed'] = True
    return tombstone


def without_room(doc: Mapping[str, Any]) -> Document:
    """Return an item without its `room`: its next state needs the space."""
    return {name: value for name, value in doc.items() if name != 'room'}


def _header(doc: Mapping[str, Any], name: str) -> str | None:
    found = headers_of(doc).get(name)
    return found if isinstance(found, str) else None


def _done(doc: Mapping[str, Any]) -> dict[str, str]:
    # The id of a unique job is used again, so `done` names the message that is done.
    finished = tag(doc) if 'key' in doc else None
    return {} if finished is None else {'done': finished}
