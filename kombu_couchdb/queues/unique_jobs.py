"""Publishing of unique jobs.

The id of a unique job is made of its queue, task and key, so CouchDB's revision conflicts decide between publishers. A
publisher whose write is in conflict reads the document again, and merges again (see `documents.unique_merge`).

The job of a key lives again and again under one id. CouchDB accepts a write without a revision on top of a tombstone,
so such a write, if it arrived late, would begin a job anew that has run meanwhile. Therefore a message is only written
over the revision that its publisher has read. CouchDB refuses that for a tombstone (measured with CouchDB 3.5), so the
publisher opens the document first: it adds a revision without a message, which follows from the tombstone alone. All
publishers write the same one, and CouchDB ignores a late copy (see `Client.write_anew`). If the publisher is killed
then, an empty document stays, which the next publisher of the key uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..couchdb.bulk import ATTEMPTS
from ..couchdb.client import Client, Document, winning
from ..couchdb.write_result import WriteResult
from ..documents import workitem
from ..documents.types import WorkItem
from ..documents.unique_merge import ENQUEUED, MOVED, Outcome, markers, merge, moved, once_id
from ..errors import Conflict, ServerUnavailable
from ..log import get_logger
from ..values import revision_parts

logger = get_logger(__name__)

#: The type of a job's document without a message.
_OPENED = 'UniqueJob'

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


def enqueue(client: Client, doc: WorkItem) -> Outcome:
    """Store a new WorkItem with a job key, or merge it into the stored one.

    A read and a write, and one more write if there is no job of this key. A message with a derived id (see
    `workitem.has_derived_id`), which several processes may publish, is merged once, even if its job has ended and was
    published again since: see `documents.unique_merge`. That needs one more read, and one more write if the job has
    markers to be stored. The outcome of an earlier call is `ENQUEUED` or `MOVED`.

    *Raises* `ServerUnavailable` (call it again with the same `doc`, which is recognized by its delivery tag),
    `DocumentTooLarge`, `AccessDenied`.
    """
    outcome = _merge(client, doc, once_id(doc) if workitem.has_derived_id(doc) else None)
    if (outcomes := _outcomes.get()) is not None:
        outcomes.append(outcome)
    return outcome


def was_enqueued(client: Client, doc: WorkItem) -> bool:
    """Tell whether the same message was stored before; it may have run since. One request or two."""
    once = once_id(doc) if workitem.has_derived_id(doc) else None
    return _earlier_outcome(client, doc, once, client.known_leaves(doc['_id'])) is not None


def _merge(client: Client, doc: WorkItem, once: str | None) -> Outcome:
    for _ in range(ATTEMPTS):
        # First the leaves, then the marker: if the job runs in between, the write is in conflict.
        leaves = client.known_leaves(doc['_id'])
        if (earlier := _earlier_outcome(client, doc, once, leaves)) is not None:
            return earlier
        shown = winning(leaves)
        found = None if shown is None or shown.get('_deleted') or shown.get('type') == _OPENED else shown
        if once:
            client.create_once(markers(found))
        docs, outcome = merge(found, doc, client.clock.now(), once)
        try:
            for one in docs:
                _store(client, one, doc['_id'], shown)
        except Conflict:
            continue
        return outcome
    raise ServerUnavailable(
        f'{client.address.url}: other processes changed the unique job {doc["_id"]} at each of {ATTEMPTS} attempts'
    )


def _earlier_outcome(client: Client, doc: WorkItem, once: str | None, leaves: list[Document]) -> Outcome | None:
    """Return the outcome of a message that was stored before, as its marker, the job or the job's tombstone has it."""
    own = workitem.task_id(doc)
    if any(leaf.get('done') == workitem.tag(doc) and not leaf.get('void') for leaf in leaves):
        return Outcome(ENQUEUED, own)  # an earlier attempt was stored, its response was lost, and the job has run
    if once is None:
        return None
    for leaf in (*leaves, *client.known_leaves(once)):
        if leaf['_id'] == once or (once in moved(leaf) and not leaf.get('void')):
            task_id = moved(leaf).get(once, own)
            return Outcome(ENQUEUED if task_id == own else MOVED, task_id)
    return None


def _store(client: Client, doc: Mapping[str, Any], job: str, shown: Document | None) -> None:
    """Write the job upon the leaf `shown`, or a copy of its dead letter.

    *Raises* `Conflict` if another process has changed the job.
    """
    if doc['_id'] != job:
        # The job is published all the same: a dead letter that cannot be copied must not block it.
        keep_copies(client, [doc])
        return
    doc = {**doc, '_rev': _opened(client, job, shown)}
    [result] = client.bulk([doc])
    if result.is_refused:
        raise result.exception(client.address.url)
    if result.is_conflict or (result.is_unproven and _yields(client, doc, result.rev)):
        raise Conflict(f'{client.address.url}: {job} was changed by others')


def keep_copies(client: Client, docs: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
    """Store copies of dead or completed jobs (see `dead_letter.copy`), each once; log those that CouchDB refuses."""
    results = client.create_once(docs) if docs else []
    for result in results:
        if result.is_refused:
            logger.error('the copy %s of a dead or completed job could not be kept: %s', result.id, result.reason)
    return results


def _opened(client: Client, job: str, shown: Document | None) -> str:
    """Return the revision of the job over which its message can be written; open the document if there is no job."""
    if shown is not None and not shown.get('_deleted'):
        return str(shown['_rev'])
    return client.write_anew({'_id': job, 'type': _OPENED}, shown)


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
    """Tell whether another process wrote `leaf` in place of `ours`: both follow from the same revision."""
    generation, text = revision_parts(ours['_rev'])
    revisions = leaf['_revisions']
    index = int(revisions['start']) - generation
    return not leaf.get('void') and 0 < index < len(revisions['ids']) and bool(revisions['ids'][index] == text)
