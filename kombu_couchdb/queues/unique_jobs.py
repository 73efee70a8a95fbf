"""Publishing of unique jobs.

The id of a unique job is made of its queue, task and key, so CouchDB's revision conflicts decide between publishers. A
publisher whose write is in conflict reads the document again, and merges again (see `documents.unique_merge`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

from ..couchdb.client import Client, Document
from ..documents import workitem
from ..documents.types import WorkItem
from ..documents.unique_merge import ENQUEUED, MOVED, Outcome, markers, merge, moved, once_id
from ..errors import Conflict, ServerUnavailable
from ..log import get_logger
from ..values import revision_parts

logger = get_logger(__name__)

#: The most attempts to write a job. An attempt fails only if another process has changed the job.
_MAX_TRIES = 200

_outcomes: ContextVar[list[Outcome] | None] = ContextVar('kombu_couchdb_unique', default=None)


@contextmanager
def collect_outcomes() -> Iterator[list[Outcome]]:
    """Return a context manager whose list gets the outcome of each unique job that is published within it, in order."""
    outcomes: list[Outcome] = []
    token = _outcomes.set(outcomes)
    try:
        yield outcomes
    finally:
        _outcomes.reset(token)
        if (outer := _outcomes.get()) is not None:
            outer += outcomes


def enqueue(client: Client, doc: WorkItem, *, once: bool = False) -> Outcome:
    """Store a new WorkItem with a job key, or merge it into the stored one; one request if none is stored.

    With `once` nothing is stored if this message was stored before, even if its job has ended and was published again
    since: see `documents.unique_merge`. That needs one more request, or two if the job exists, or three if it has
    markers to be stored. The outcome of an earlier call is `ENQUEUED` or `MOVED`.

    *Raises* `ServerUnavailable` (call it again with the same `doc`, which is recognized by its delivery tag),
    `DocumentTooLarge`, `AccessDenied`.
    """
    outcome = _merge(client, doc, once_id(doc) if once else None)
    if (outcomes := _outcomes.get()) is not None:
        outcomes.append(outcome)
    return outcome


def _merge(client: Client, doc: WorkItem, once: str | None) -> Outcome:
    found: Document | None = None
    for _ in range(_MAX_TRIES):
        if once:
            if (earlier := _earlier_outcome(client, doc, once)) is not None:
                return earlier
            client.create_once(markers(found))
        docs, outcome = merge(found, doc, client.clock.now(), once)
        try:
            for one in docs:
                _store(client, one, doc['_id'])
        except Conflict:
            found = client.get_or_none(doc['_id'])
            continue
        return outcome
    raise ServerUnavailable(
        f'{client.address.url}: other processes changed the unique job {doc["_id"]} at each of {_MAX_TRIES} attempts'
    )


def _earlier_outcome(client: Client, doc: WorkItem, once: str) -> Outcome | None:
    """Return the outcome of a message that was stored before, as its marker, the job or the job's tombstone has it."""
    known = client.known([once, doc['_id']])  # others are not read: see `Client.find`
    for leaf in chain.from_iterable(map(client.leaves, sorted(known))):
        if leaf['_id'] == once or (once in moved(leaf) and not leaf.get('void')):
            own = workitem.task_id(doc)
            task_id = moved(leaf).get(once, own)
            return Outcome(ENQUEUED if task_id == own else MOVED, task_id)
    return None


def _store(client: Client, doc: Mapping[str, Any], job: str) -> None:
    """Write the job, or a copy of its dead letter; *raises* `Conflict` if another process has changed the job."""
    [result] = client.bulk([doc])
    if doc['_id'] != job and result.is_permanent:
        # The job is published all the same: a dead letter that cannot be copied must not block it.
        logger.error('the dead letter of the unique job %s could not be kept: %s', job, result.reason)
        return
    if result.is_refused:
        raise result.exception(client.address.url)
    if doc['_id'] != job:
        return  # a conflict means that another publisher has stored the same copy of the dead letter
    if result.is_conflict or (result.is_unproven and _yields(client, doc, result.rev)):
        raise Conflict(f'{client.address.url}: {job} was changed by others')


def _yields(client: Client, doc: Mapping[str, Any], rev: str) -> bool:
    """Delete an unproven write if another process has changed the job on other nodes; tell whether it was deleted.

    If no process has, the other nodes are down or not reachable, and the write is kept. It is also kept if a consumer
    has claimed it.
    """
    if not any(_is_rival(leaf, doc) for leaf in client.leaves(doc['_id'], revs=True) if leaf['_rev'] != rev):
        return False
    [result] = client.bulk([{**workitem.deleted({**doc, '_rev': rev}), 'void': True}])
    return result.is_stored


def _is_rival(leaf: Document, ours: Mapping[str, Any]) -> bool:
    """Tell whether another process wrote `leaf` in place of `ours`.

    It did if `leaf` descends from the revision that `ours` replaces, or, if `ours` is a new document, if `leaf` is not
    deleted.
    """
    if '_rev' not in ours:
        return not leaf.get('_deleted')
    generation, text = revision_parts(ours['_rev'])
    revisions = leaf['_revisions']
    index = int(revisions['start']) - generation
    return not leaf.get('void') and 0 < index < len(revisions['ids']) and bool(revisions['ids'][index] == text)
