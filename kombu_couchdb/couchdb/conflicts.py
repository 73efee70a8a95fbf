"""Conflict resolution: documents with several leaf revisions, as clusters and replication create them.

CouchDB shows one leaf revision of a conflicted document, the one that sorts highest, and keeps the others for ever. A
view lists the conflicted documents; it costs nothing until it is read. A rule for each type of document decides which
leaf to keep. The resolver writes nothing until the leaves have been the same for `SYNC` seconds, in which the nodes of
a cluster copy writes to each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..errors import RETRIED, AccessDenied, CouchDBError, NotFound
from ..log import get_logger
from .bulk import BATCH_DOCS, deletion
from .client import Client, Document
from .shapes import revision

logger = get_logger(__name__)

#: Seconds in which the nodes of a cluster copy a write to each other (the sync_delay of CouchDB's mem3 is 5).
SYNC = 10.0

#: The most seconds between two searches for conflicted documents: in a cluster, where the answer may come from a node
#: whose index is one search old, and on a single node, where only replication creates conflicts.
_CLUSTER_SECONDS, _SINGLE_NODE_SECONDS = 45.0, 3600.0

#: A rule for one type of document. It gets all leaf revisions, deleted ones included, and the ids of the consumers with
#: a valid lease. It returns the changes to write, in this order, or None if it cannot decide yet.
Rule = Callable[[list[Document], Collection[str]], Sequence[Mapping[str, Any]] | None]


class ConflictResolver:
    """Resolves the conflicts of one database, for the types of documents that have a rule."""

    def __init__(self, client: Client, view: Document, rules: Mapping[str, Rule]) -> None:
        """Create a resolver with one rule for each type of document.

        `view` is the design document with the view `conflicted`. The resolver stores it if it is missing.
        """
        self._client, self._view, self._rules = client, view, rules
        self._name = str(view['_id']).partition('/')[2]
        #: By document id, the leaf revisions and the monotonic time at which they were first seen; infinite if the
        #: conflict is resolved or can never be.
        self._seen: dict[str, tuple[frozenset[str], float]] = {}
        self._view_forbidden = False
        self._jitter = random.uniform(0.5, 1.0)
        self._last_run = time.monotonic()
        self._expected_until = float('-inf')  # a monotonic time

    @property
    def due(self) -> float:
        """The monotonic time of the next call of `resolve`. It depends on `Client.replicas`."""
        is_expected = self._client.replicas > 1 and self._last_run < self._expected_until
        if is_expected or any(since < float('inf') for _, since in self._seen.values()):
            return self._last_run + SYNC
        seconds = _SINGLE_NODE_SECONDS if self._client.replicas == 1 else _CLUSTER_SECONDS
        return self._last_run + self._jitter * seconds

    def expect(self) -> None:
        """Look every `SYNC` seconds for a while, in a cluster: a write of this process may have made a conflict."""
        self._expected_until = time.monotonic() + 2 * SYNC  # the first look may only update the index

    def conflicted(self, update: str = 'true') -> dict[str, frozenset[str]]:
        """Return all leaf revisions of each conflicted document, by document id; one request.

        `update` is CouchDB's parameter for views: 'true' waits until the index is current, 'lazy' does not.
        """
        if self._view_forbidden:
            return {}
        try:
            rows = self._client.view(self._name, 'conflicted', keys=sorted(self._rules), update=update)
        except NotFound:
            self._store_view()
            return {}
        return {row['id']: frozenset(row['value']) for row in rows}

    def resolve_if_due(self) -> None:
        """Call `resolve` if `due` has passed. For databases without consumers; one more request at the first call."""
        self._client.is_cluster()  # sets `replicas`, which `due` needs
        if time.monotonic() >= self.due:
            self.resolve(())

    def resolve(self, living: Collection[str]) -> int:
        """Resolve the conflicts whose leaves have not changed for `SYNC` seconds; return their number.

        Conflicts that can never be resolved count, too. `living` are the ids of the consumers with a valid lease.
        """
        now = self._last_run = time.monotonic()
        seen, self._seen = self._seen, {}
        resolved = 0
        # 'lazy': indexing a long queue would block this thread; the next call sees the documents that are missing here.
        for doc_id, revs in self.conflicted('lazy').items():
            before, since = seen.get(doc_id, (revs, now))
            since = since if before == revs else now
            if since <= now - SYNC and resolved < BATCH_DOCS and self._try_to_resolve(doc_id, living):
                since = float('inf')
                resolved += 1
            self._seen[doc_id] = (revs, since)
        return resolved

    def _try_to_resolve(self, doc_id: str, living: Collection[str]) -> bool:
        """Resolve the conflict of a document; return whether it is done, or can never be done."""
        try:
            return self._resolve(doc_id, living)
        except RETRIED:
            raise
        except Exception as exc:  # a malformed document must not prevent the resolution of other conflicts
            logger.error('the conflict of document %s cannot be resolved: %r', doc_id, exc)
            return True

    def _resolve(self, doc_id: str, living: Collection[str]) -> bool:
        leaves = self._client.leaves(doc_id)
        rule = next((rule for leaf in leaves if (rule := self._rules.get(str(leaf.get('type'))))), None)
        changes = rule(leaves, living) if rule else []
        if changes is None or not write_each(self._client, changes):
            return False
        if changes:
            logger.info('the conflict of document %s with %d leaf revisions was resolved', doc_id, len(leaves))
        return True

    def _store_view(self) -> None:
        try:
            self._client.try_put(self._view)  # in conflict, another process has stored the same
        except AccessDenied:
            self._view_forbidden = True
            logger.warning(
                '%s lacks the design document %s, so that conflicts of a cluster are not resolved; let an '
                'administrator run "celery -A your_app couchdb setup"',
                self._client.address.url,
                self._name,
            )


def write_each(client: Client, docs: Collection[Mapping[str, Any]]) -> bool:
    """Write changes of leaf revisions of one document, each in its own request; return whether all writes are proven.

    Stop at the first write that is not proven: the change of the leaf to keep comes first, and the deletions of other
    leaves are only safe after it.
    """
    for doc in docs:
        [result] = client.bulk([doc])
        if not result.is_proven:
            return False
    return True


def delete_leaves(client: Client, docs: Sequence[Document]) -> int:
    """Delete documents with all their leaf revisions, the given one last. Return how many documents were deleted.

    So a document does not change into another one if the process is killed before all its leaf revisions are deleted.
    A request for each document, and two more.
    """
    _delete_conflicts(client, docs)
    return delete_docs(client, docs)


def delete_docs(client: Client, docs: Iterable[Mapping[str, Any]]) -> int:
    """Delete exactly these revisions of documents, and return how many were deleted: no other process changed them."""
    return sum(result.is_stored for result in client.bulk(list(map(deletion, docs))))


def _delete_conflicts(client: Client, docs: Sequence[Document]) -> None:
    """Delete the leaf revisions of documents beside those that CouchDB shows."""
    delete_docs(client, ({'_id': doc['_id'], '_rev': rev} for doc in docs for rev in _conflicts(client, doc['_id'])))


def _conflicts(client: Client, doc_id: str) -> list[str]:
    """Return the leaf revisions of a document beside the one that CouchDB shows."""
    try:
        found = client.get(doc_id, conflicts=True).get('_conflicts')
    except CouchDBError:
        return []  # it was deleted meanwhile, or cannot be read
    return [rev for rev in found if revision(rev)] if isinstance(found, list) else []


def delete_current(client: Client, docs: Sequence[Document]) -> list[str]:
    """Delete documents, and return the ids of those that another process has changed.

    In a cluster an unproven write of another process may be a conflict, which would show when the document is deleted:
    a task would run again.
    """
    if client.is_cluster():
        _delete_conflicts(client, docs)
    return [result.id for result in client.bulk(list(map(deletion, docs))) if not result.is_stored]


def rivals(client: Client, docs: Sequence[Document]) -> dict[str, list[Document]]:
    """Return the leaf revisions of those of these documents that have several which are not deleted, by id.

    In a cluster two processes may both have stored a change, one of them unproven. Which of them is shown is chance.
    """
    if not docs or not client.is_cluster():
        return {}
    ids = [doc['_id'] for doc in docs]
    found = zip(ids, client.fetch_leaves(ids, r=client.replicas), strict=True)
    live = {doc_id: [leaf for leaf in leaves if not leaf.get('_deleted')] for doc_id, leaves in found}
    return {doc_id: leaves for doc_id, leaves in live.items() if len(leaves) > 1}
