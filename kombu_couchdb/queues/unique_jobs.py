"""Publishing unique jobs: the id of a job's document is made of its queue, task and key, so that CouchDB's revision conflict
decides between publishers. A publisher that lost reads the document again, and decides again (see `documents.unique_merge`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..couchdb.client import Client, Document
from ..documents import workitem
from ..documents.unique_merge import Outcome, merge
from ..errors import Conflict, NestedTooDeeply, ServerUnavailable
from ..log import get_logger

__all__ = ['collect_outcomes', 'enqueue']

logger = get_logger(__name__)

#: How often a job is tried to be written while others change it: each failure means that another publisher succeeded.
_TRIES = 200

_outcomes: ContextVar[list[Outcome] | None] = ContextVar('kombu_couchdb_unique', default=None)


@contextmanager
def collect_outcomes() -> Iterator[list[Outcome]]:
    """Gather, in the list that is given, what becomes of the unique jobs that are sent in this context."""
    outcomes: list[Outcome] = []
    token = _outcomes.set(outcomes)
    try:
        yield outcomes
    finally:
        _outcomes.reset(token)
        if (outer := _outcomes.get()) is not None:
            outer += outcomes


def enqueue(client: Client, doc: Document) -> Outcome:
    """Store a new item with a job key, or merge it with the one that is there. One request if there is none.

    *Raises* `ServerUnavailable` (enqueue the same again: it is known by its tag), `DocumentTooLarge`, `AccessDenied`.
    """
    found: Document | None = None
    for _ in range(_TRIES):
        docs, outcome = merge(found, doc, client.clock.now())
        try:
            for one in docs:
                _store(client, one, doc['_id'])
        except Conflict:
            found = _found(client, doc['_id'])
            continue
        if (outcomes := _outcomes.get()) is not None:
            outcomes.append(outcome)
        return outcome
    raise ServerUnavailable(f'{client.address.url}: the unique job {doc["_id"]} is changed by others all the time')


def _found(client: Client, job: str) -> Document | None:
    """Return the job that is there; of one that cannot be read only `_id` and `_rev`."""
    try:
        return client.get_or_none(job)
    except NestedTooDeeply as exc:
        client.unusable.note(job, None, f'{exc}; it is replaced by the message that was sent')
        rev = client.rev(job)
        return None if rev is None else {'_id': job, '_rev': rev}


def _store(client: Client, doc: Document, job: str) -> None:
    """Write one document; *raises* `Conflict` if the job was changed by others."""
    [result] = client.bulk([doc])
    if doc['_id'] != job and result.is_permanent:
        # A dead letter that cannot be copied must not keep publishers from sending the job.
        logger.error('the dead letter of the unique job %s could not be kept: %s', job, result.reason)
        return
    if result.is_refused:
        raise result.exception(client.address.url)
    if doc['_id'] != job:
        return  # a conflict means that another publisher has stored the same copy of the dead letter
    if result.is_conflict or (result.is_unproven and _yields(client, doc, result.rev)):
        raise Conflict(f'{client.address.url}: {job} was changed by others')


def _yields(client: Client, doc: Document, rev: str) -> bool:
    """Take back what a cluster accepted on too few nodes, if others have changed the job on other ones; tell whether that was so.

    If nobody has, the nodes are down, or cut off, and it stays. If a consumer has taken it meanwhile, it stays, too.
    """
    if not any(_is_rival(leaf, doc) for leaf in client.leaves(doc['_id'], revs=True) if leaf['_rev'] != rev):
        return False
    [result] = client.bulk([{**workitem.deleted({**doc, '_rev': rev}), 'void': True}])
    return result.is_stored


def _is_rival(leaf: Document, ours: Document) -> bool:
    """Tell whether what others wrote stands for what we wrote over: if it comes of the same, or there was nothing."""
    if '_rev' not in ours:
        return not leaf.get('_deleted')
    generation, _, text = ours['_rev'].partition('-')
    revisions = leaf['_revisions']
    place = int(revisions['start']) - int(generation)
    return not leaf.get('void') and 0 < place < len(revisions['ids']) and bool(revisions['ids'][place] == text)
