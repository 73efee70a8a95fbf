"""Rules of unique jobs: merge a message into the job of its key, and merge conflicting leaves of a job.

The header `job_key` makes a job unique within its queue and task. A new message for a job has one of three outcomes, as
in the rules of CouchDB's RFC 007 (background jobs):

* `ENQUEUED`: there was no such job, or it was done, had expired, or was a dead letter. A dead letter is then kept under
  another id, and so is an expired task, which a worker marks as revoked. Also if the message is a retry of the waiting
  task itself, or if the same message was stored before (a repeated request).
* `MOVED`: a message of the job waits: as the item, or in `next` behind the running message. It gets the due date and
  the expiry of the new message, which is not stored.
* `AGAIN`: the job runs, and no message waits behind it, except perhaps a retry of the running task. The new message is
  added to `next` and runs afterwards. A retry that the running task sends of itself is always `AGAIN`: it becomes the
  first message in `next`.

A change of `next` makes the running job's ack a conflict. Its consumer then reads the item again and applies its
decision to the new revision (`PendingWrites.retry_changed`).

A message that is *published once* (see `once_id`) must not be merged a second time, even if the process that published
it was killed before it noted that, and the job has run since. So the write that merges the message also adds its id to
the member `moved` of the job. It stays there, through all messages of the job, until a *marker* is stored: a tombstone
with this id. Whoever acknowledges the last message of a job stores the markers first, because the next publisher may
write over the tombstone of the job. Whoever merges the next such message stores those of the earlier ones first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from . import dead_letter, validation, workitem
from .idempotency import copy_id
from .types import Document, WorkItem

ENQUEUED, MOVED, AGAIN = 'enqueued', 'moved', 'again'

#: How often `sent` of an otherwise unchanged job is updated, at most, in seconds. A queue's message TTL counts from
#: `sent`.
_NOTE_INTERVAL = 1.0

#: The members of an item that belong to its message; the others belong to the job.
_MESSAGE_MEMBERS = ('priority', 'date', 'published', 'expires', 'message')

#: The members of an item that a merged message makes invalid: it may be due at another time, or have another limit.
_OUTDATED_MEMBERS = (*_MESSAGE_MEMBERS, 'parked')


class Outcome(NamedTuple):
    """The outcome of publishing a message with a job key."""

    #: `ENQUEUED`, `MOVED` or `AGAIN`.
    what: str
    #: The id of the task that will run; if the job was `MOVED`, that of an earlier message.
    task_id: str | None


def once_id(doc: Mapping[str, Any]) -> str:
    """Return the id by which a new WorkItem that is published once is known: of a unique job, that of its message."""
    return copy_id(str(workitem.tag(doc)), doc['queue']) if 'key' in doc else str(doc['_id'])


def moved(doc: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Return the member `moved` of a job, or of its tombstone."""
    found = (doc or {}).get('moved')
    return found if isinstance(found, dict) else {}


def markers(doc: Mapping[str, Any] | None) -> list[Document]:
    """Return the markers of the messages in `moved`, to be stored with `Client.create_once`."""
    return [{'_id': once, '_deleted': True, 'moved': {once: task_id}} for once, task_id in moved(doc).items()]


def merge(
    found: Document | None, doc: WorkItem, now: float, once: str | None = None
) -> tuple[list[Mapping[str, Any]], Outcome]:
    """Return the documents to write for a new WorkItem `doc`, in this order, and the outcome.

    `found` is the stored document with this id, or None. `once` is the `once_id` of a message that is published once:
    then the markers of `found` are stored, and none of them is this message.
    """
    docs, outcome = _merge(found, doc, now)
    known = moved(found) if once is None else {once: outcome.task_id}
    if known and (docs or once):
        docs = [*docs[:-1], {**(docs[-1] if docs else found or doc), 'moved': known}]
    return docs, outcome


def _merge(found: Document | None, doc: WorkItem, now: float) -> tuple[list[Mapping[str, Any]], Outcome]:
    own = workitem.task_id(doc)
    if found is None:
        return [doc], Outcome(ENQUEUED, own)
    reason = validation.malformed_reason(found)
    if found.get('status') or reason:
        dead = found if found.get('status') else dead_letter.made_of(found, str(reason), now)
        return [dead_letter.copy(dead), {**doc, '_rev': found['_rev']}], Outcome(ENQUEUED, own)
    if workitem.tag(found) == workitem.tag(doc):
        return [], Outcome(ENQUEUED, own)  # an earlier attempt was stored, and its response was lost
    if workitem.is_waiting(found) and workitem.has_expired(found, now):
        kept = [dead_letter.copy(found)] if workitem.delivers_expired(found) else []
        following = workitem.acked(found, now)
        if following.get('_deleted'):
            return [*kept, {**doc, '_rev': found['_rev']}], Outcome(ENQUEUED, own)
        docs, outcome = _join(following, doc)
        return [*kept, *(docs or [following])], outcome
    return _join(found, doc)


def _join(current: Mapping[str, Any], doc: WorkItem) -> tuple[list[Mapping[str, Any]], Outcome]:
    """Do the same as `_merge` for a job that waits, and has not expired, or runs."""
    own = workitem.task_id(doc)
    if workitem.is_waiting(current):
        if workitem.task_id(current) == own:
            return [_with_message(current, doc)], Outcome(ENQUEUED, own)
        moved, outcome = _moved(current, doc), Outcome(MOVED, workitem.task_id(current))
        # An unchanged job is written only to update `sent`.
        if moved != current or workitem.ready_since(current) + _NOTE_INTERVAL < doc['published']:
            return [{**moved, 'sent': doc['published']}], outcome
        return [], outcome
    return _merge_into_next(current, doc)


def _merge_into_next(running: Mapping[str, Any], doc: WorkItem) -> tuple[list[Mapping[str, Any]], Outcome]:
    """Do the same as `_merge` for a running job: add `doc` to its `next`, or move the message that waits there."""
    own, stored, followers, new = workitem.task_id(doc), running.get('next'), _followers(running), _message_of(doc)
    retries = [one for one in followers if workitem.task_id(one) == workitem.task_id(running)]
    others = [one for one in followers if one not in retries]
    if own == workitem.task_id(running):
        outcome, followers = Outcome(AGAIN, own), [new, *others]
    elif others:
        is_same = workitem.tag(others[0]) == workitem.tag(doc)
        outcome = Outcome(AGAIN if is_same else MOVED, workitem.task_id(others[0]))
        followers = [*retries, others[0] if is_same else _moved(others[0], doc), *others[1:]]
    else:
        outcome, followers = Outcome(AGAIN, own), [*retries, new]
    return [{**running, 'next': followers}] if followers != stored else [], outcome


def _followers(doc: Mapping[str, Any]) -> list[Document]:
    """Return the messages in a job's `next`, without malformed ones."""
    stored = doc.get('next')
    if not isinstance(stored, list):
        return []
    return [one for one in stored if isinstance(one, dict) and not validation.malformed_reason({**one, 'attempts': 0})]


def _moved(item: Mapping[str, Any], doc: WorkItem) -> Document:
    """Return an item with the due date and expiry of `doc`, also in its headers, where Celery reads them."""
    moved = {name: value for name, value in item.items() if name not in ('expires', 'parked')}
    headers = {
        **item['message']['headers'],
        **{name: doc['message']['headers'].get(name) for name in ('eta', 'expires')},
    }
    return {
        **moved,
        'date': doc['date'],
        'message': {**item['message'], 'headers': headers},
        **({'expires': doc['expires']} if 'expires' in doc else {}),
    }


def _with_message(item: Mapping[str, Any], doc: WorkItem) -> Document:
    """Return the item with the message of `doc`, a retry of the same task."""
    kept = {name: value for name, value in item.items() if name not in _OUTDATED_MEMBERS}
    return {**kept, **_message_of(doc)}


def _message_of(doc: Mapping[str, Any]) -> Document:
    return {name: doc[name] for name in _MESSAGE_MEMBERS if name in doc}


def add_missing(kept: Document, others: list[Document], done: Collection[Any]) -> Document:
    """Add to `next` of a job the messages that only other leaves of its document have, and return the job.

    These are the other leaves' own messages and those in their `next`. They are added at the end, the oldest first.
    `done` contains the delivery tags of messages that are done: they are not added. `moved` of all leaves is kept.
    """
    joined = {once: task_id for leaf in (*others, kept) for once, task_id in moved(leaf).items()}
    if joined != moved(kept):
        kept = {**kept, 'moved': joined}
    known = {*done, *_tags(kept)}
    missing = {
        workitem.tag(one): one
        for leaf in others
        for one in (_message_of(leaf), *_followers(leaf))
        if not validation.malformed_reason({**one, 'attempts': 0}) and workitem.tag(one) not in known
    }
    if not missing:
        return kept
    return {**kept, 'next': [*_followers(kept), *sorted(missing.values(), key=workitem.ready_since)]}


def without_known(leaf: Document, others: list[Document]) -> Document:
    """Remove from `next` of a job the messages that another leaf has, or names as done; return the job."""
    known = [tag for other in others if not other.get('void') for tag in (other.get('done'), *_tags(other))]
    return {**leaf, 'next': [one for one in _followers(leaf) if workitem.tag(one) not in known]}


def _tags(doc: Document) -> list[Any]:
    return [workitem.tag(one) for one in (doc, *_followers(doc))]
