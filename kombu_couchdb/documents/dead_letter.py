"""The dead letter: a WorkItem that is kept for an operator, and is not delivered, with the reason for that.

A dead letter has `status: "fail"`, `reason` (see `reasons`) and `failed` (when). It keeps its id, unless it is a unique
job with other messages in `next`: these run under that id, and the dead letter gets an id of its own (`apart`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from . import workitem
from .types import FAIL, DeadLetter, Document, WorkItem

__all__ = ['apart', 'copy', 'made_of', 'members', 'replayed']

#: No date in the id of a copy is later, in seconds since the epoch.
_MAX_DATE = 1e12


def members(reason: str, now: float) -> DeadLetter:
    """Return the members that make an item a dead letter."""
    return {'status': FAIL, 'reason': reason, 'failed': now}


def made_of(doc: Mapping[str, Any], reason: str, now: float) -> Document:
    """Return an item as a dead letter. Anybody may have changed the item by hand."""
    return {**workitem.without_room(doc), 'claimed': None, **members(reason, now), **workitem.holder(doc)}


def apart(doc: Mapping[str, Any], now: float) -> list[Mapping[str, Any]]:
    """Return the documents to write for a changed item, in this order.

    That is the item. A dead letter with messages in `next` becomes a copy under another id, and then its own document
    becomes the first of these messages.
    """
    if not doc.get('status') or not doc.get('next'):
        return [doc]
    return [copy(doc), workitem.acked(doc, now)]


def copy(doc: Mapping[str, Any]) -> Document:
    """Return the copy of a dead unique job. Its id is made of its message: two processes make the same copy."""
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
    """Return a dead letter as waiting at the end of its queue, as if it had never been delivered; it never expires."""
    dropped = ('status', 'reason', 'failed', 'expires', 'consumer')
    kept = {name: value for name, value in doc.items() if name not in dropped}
    headers = {name: None if name == 'expires' else value for name, value in doc['message']['headers'].items()}
    message = {**doc['message'], 'headers': headers}
    return workitem.checked({**kept, 'date': None, 'published': now, 'attempts': 0, 'message': message})
