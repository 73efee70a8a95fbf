"""The dead letter: a WorkItem that is not delivered but kept for an operator, with the reason.

A dead letter has `status: "fail"`, `reason` (see `reasons`) and `failed` (when). It keeps its id, unless it is a unique
job. A dead unique job gets an id of its own when the id of the job is needed for other messages: if it has messages in
`next` (`apart`), or when a new message for its key is published (`unique_merge.merge`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from . import malformed, workitem
from .concurrency import unpark
from .types import FAIL, DeadLetter, Document, WorkItem

__all__ = ['apart', 'copy', 'made_of', 'members', 'replayed']

#: The latest date in the id of a copy, in seconds since the epoch.
_MAX_DATE = 1e12


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
    made = int(max(0, min(_MAX_DATE, date)) * 1e6) if isinstance(date, (int, float)) else 0
    copy_id = f'{made:014x}{sha256(known.encode()).hexdigest()[:16]}'
    kept = {name: value for name, value in doc.items() if name not in ('_rev', '_attachments', 'next')}
    return {**kept, '_id': copy_id}


def replayed(doc: WorkItem, now: float) -> WorkItem:
    """Return a dead letter as an item that waits at the end of its queue and was never delivered; it never expires."""
    dropped = ('status', 'reason', 'failed', 'expires', 'consumer')
    kept = {name: value for name, value in doc.items() if name not in dropped}
    headers = {name: None if name == 'expires' else value for name, value in doc['message']['headers'].items()}
    message = {**doc['message'], 'headers': headers}
    return malformed.checked({**kept, 'date': None, 'published': now, 'attempts': 0, 'message': message})
