"""Rules of unique jobs: merge a message into the job of its key, and merge the leaves of a job that was in conflict.

The header `job_key` makes a job unique within its queue and task. As in the rules of CouchDB's RFC 007 (background jobs), the job

* does not exist, is finished or dead: it is **enqueued** (a dead letter is kept, under another id);
* waits, now or for later: its due date is **moved** to that of the newest message, and its expiry with it;
* runs: the message is put behind it, into the item's `next`, and runs **again** after it, once however often it is sent.

The consumer of a running job finds its acknowledgement in conflict with such a change, reads the item, and decides about what it
finds (`unacked.Holdings.resettle`). A retry that a task sends of itself goes before what waits behind it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from . import workitem

__all__ = ['AGAIN', 'ENQUEUED', 'MOVED', 'Outcome', 'apart_from', 'gather', 'merge']

Document = dict[str, Any]

ENQUEUED, MOVED, AGAIN = 'enqueued', 'moved', 'again'

#: How exactly it is known when a job was sent last, in seconds: a queue's message TTL is counted from then.
_NOTED = 1.0

#: What of an item is its message's, and not the job's.
_MESSAGE = ('priority', 'date', 'published', 'expires', 'message')


class Outcome(NamedTuple):
    """What became of a message with a job key."""

    #: `ENQUEUED`, `MOVED` or `AGAIN`.
    what: str
    #: The id of the task that runs for it: that of an earlier message if it was `MOVED`.
    task_id: str | None


def merge(found: Document | None, doc: Document, now: float) -> tuple[list[Document], Outcome]:
    """Return what is to be written, in this order, where `doc` is sent and `found` is there; and what that makes of it."""
    own = workitem.task_id(doc)
    if found is None:
        return [doc], Outcome(ENQUEUED, own)
    if found.keys() == {'_id', '_rev'}:
        return [{**doc, '_rev': found['_rev']}], Outcome(ENQUEUED, own)
    reason = workitem.flaw(found)
    if found.get('status') or reason:
        dead = found if found.get('status') else workitem.bury(found, str(reason), now)
        return [workitem.dead_copy(dead), {**doc, '_rev': found['_rev']}], Outcome(ENQUEUED, own)
    if workitem.tag(found) == workitem.tag(doc):
        return [], Outcome(ENQUEUED, own)  # an earlier try was stored, its answer was lost
    stored = found
    if workitem.is_waiting(found) and workitem.has_expired(found, now):
        found = workitem.acked(found, now)
        if found.get('_deleted'):
            return [{**doc, '_rev': found['_rev']}], Outcome(ENQUEUED, own)
    if workitem.is_waiting(found):
        if workitem.task_id(found) == own:
            return [_message_of(doc, found)], Outcome(ENQUEUED, own)
        moved = _moved(found, doc)
        # What would change nothing is not written: that it was sent again is noted once a second.
        if moved != stored or workitem.ready_since(found) + _NOTED < doc['published']:
            return [{**moved, 'sent': doc['published']}], Outcome(MOVED, workitem.task_id(found))
        return [], Outcome(MOVED, workitem.task_id(found))
    return _behind(found, doc)


def _behind(found: Document, doc: Document) -> tuple[list[Document], Outcome]:
    """Return the same where `found` runs: `doc` waits behind it, or moves what does."""
    own, waiting, entries, entry = workitem.task_id(doc), found.get('next'), _entries(found), _message(doc)
    retries = [one for one in entries if workitem.task_id(one) == workitem.task_id(found)]
    others = [one for one in entries if one not in retries]
    if own == workitem.task_id(found):
        outcome, entries = Outcome(AGAIN, own), [entry, *others]
    elif others:
        same = workitem.tag(others[0]) == workitem.tag(doc)
        outcome = Outcome(AGAIN if same else MOVED, workitem.task_id(others[0]))
        entries = [*retries, others[0] if same else _moved(others[0], doc), *others[1:]]
    else:
        outcome, entries = Outcome(AGAIN, own), [*retries, entry]
    return [{**found, 'next': entries}] if entries != waiting else [], outcome


def _entries(doc: Document) -> list[Document]:
    """Return what waits behind a job, without what is spoilt."""
    waiting = doc.get('next')
    return (
        [one for one in waiting if isinstance(one, dict) and not workitem.flaw({**one, 'attempts': 0})]
        if isinstance(waiting, list)
        else []
    )


def _moved(found: Document, doc: Document) -> Document:
    """Return an item with the due date and expiry of another, in its message's headers, too: Celery reads them there."""
    moved = {name: value for name, value in found.items() if name != 'expires'}
    headers = {
        **found['message']['headers'],
        **{name: doc['message']['headers'].get(name) for name in ('eta', 'expires')},
    }
    return {
        **moved,
        'date': doc['date'],
        'message': {**found['message'], 'headers': headers},
        **({'expires': doc['expires']} if 'expires' in doc else {}),
    }


def _message_of(doc: Document, found: Document) -> Document:
    """Return the item with the message of `doc`: a newer one of the same task, its retry."""
    kept = {name: value for name, value in found.items() if name not in _MESSAGE}
    return {**kept, **_message(doc)}


def _message(doc: Document) -> Document:
    return {name: doc[name] for name in _MESSAGE if name in doc}


def gather(kept: Document, others: list[Document], done: Collection[Any]) -> Document:
    """Return a job with the messages behind it that other leaves of its document have, and it has not, the oldest first.

    `done` has the tags of messages that are done.
    """
    known = {*done, *_tags(kept)}
    missing = {
        workitem.tag(entry): entry
        for leaf in others
        for entry in (_message(leaf), *_entries(leaf))
        if not workitem.flaw({**entry, 'attempts': 0}) and workitem.tag(entry) not in known
    }
    if not missing:
        return kept
    return {**kept, 'next': [*_entries(kept), *sorted(missing.values(), key=workitem.ready_since)]}


def apart_from(leaf: Document, others: list[Document]) -> Document:
    """Return a job without those messages behind it that other leaves of its document have, or are done with."""
    known = [tag for other in others if not other.get('void') for tag in (other.get('done'), *_tags(other))]
    return {**leaf, 'next': [entry for entry in _entries(leaf) if workitem.tag(entry) not in known]}


def _tags(doc: Document) -> list[Any]:
    return [workitem.tag(one) for one in (doc, *_entries(doc))]
