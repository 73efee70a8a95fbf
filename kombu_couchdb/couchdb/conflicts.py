"""Finds the documents of which a cluster, or replication, left several leaves, and makes them one again.

CouchDB shows one of the leaves, whichever has the higher revision, and keeps the others for ever. A view lists such documents; it
costs nothing until it is read. What is to become of one, its `rule` says, made for its type. Nothing is written before all leaves
have been the same for as long as the nodes of a cluster may take to tell each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping

from ..errors import RETRIED, AccessDenied, Conflict, NotFound
from ..log import get_logger
from .client import Client, Document

__all__ = ['SYNC', 'ConflictResolver', 'Rule', 'write_each']

logger = get_logger(__name__)

#: How long the nodes of a cluster may take to tell each other of a write, in seconds (mem3's sync_delay is 5).
SYNC = 10.0

#: How often conflicted documents are looked for, in seconds: in a cluster, and where only replication could leave them.
_CLUSTER, _SINGLE = 60.0, 3600.0

#: How many are healed in one go.
_AT_ONCE = 200

#: Returns what is to be written, in this order, about a document with these leaves, deleted ones too, where these consumers live;
#: None: that cannot be told yet.
Rule = Callable[[list[Document], Collection[str]], 'list[Document] | None']


class ConflictResolver:
    """Heals the documents of one database, of those types that have a rule."""

    def __init__(self, client: Client, view: Document, rules: Mapping[str, Rule]) -> None:
        """Use the design document `view`, whose view `conflicted` lists such documents; it is stored where it is missing."""
        self._client, self._view, self._rules = client, view, rules
        self._name = str(view['_id']).partition('/')[2]
        #: Revisions and the monotonic time of the first look, by id; of what is settled the time is infinite.
        self._seen: dict[str, tuple[frozenset[str], float]] = {}
        self._refused = False
        self._every = random.uniform(0.5, 1.0)
        self._looked = time.monotonic()

    @property
    def due(self) -> float:
        """The monotonic time to heal next."""
        if any(since < float('inf') for _, since in self._seen.values()):
            return self._looked + SYNC
        return self._looked + self._every * (_SINGLE if self._client.replicas == 1 else _CLUSTER)

    def conflicted(self, update: str = 'true') -> dict[str, frozenset[str]]:
        """Return the revisions of all leaves of each conflicted document, by id; one request. `update` is CouchDB's."""
        if self._refused:
            return {}
        try:
            rows = self._client.view(self._name, 'conflicted', keys=sorted(self._rules), update=update)
        except NotFound:
            self._set_up()
            return {}
        return {row['id']: frozenset(row['value']) for row in rows}

    def look(self) -> None:
        """Heal if it is time to; for who has no occasion to ask whether this is a cluster."""
        self._client.is_cluster()  # `due` depends on it
        if time.monotonic() >= self.due:
            self.heal(())

    def heal(self, living: Collection[str]) -> int:
        """Heal what has been conflicted for long enough; return how many documents that were."""
        now = self._looked = time.monotonic()
        seen, self._seen = self._seen, {}
        healed = 0
        # Nobody waits for an index that is to be made of a long queue first: the next look finds what this one did not.
        for doc_id, revs in self.conflicted('lazy').items():
            before, since = seen.get(doc_id, (revs, now))
            since = since if before == revs else now
            if since <= now - SYNC and healed < _AT_ONCE and self._is_settled(doc_id, living):
                since = float('inf')
                healed += 1
            self._seen[doc_id] = (revs, since)
        return healed

    def _is_settled(self, doc_id: str, living: Collection[str]) -> bool:
        """Heal a document, and tell whether nothing is left to do: it was healed, or it never can be."""
        try:
            return self._heal(doc_id, living)
        except RETRIED:
            raise
        except Exception as exc:  # whatever somebody has written there: the others are healed
            logger.error('the leaves of %s are left alone: %r', doc_id, exc)
            return True

    def _heal(self, doc_id: str, living: Collection[str]) -> bool:
        leaves = self._client.leaves(doc_id)
        rule = next((rule for leaf in leaves if (rule := self._rules.get(str(leaf.get('type'))))), None)
        changes = rule(leaves, living) if rule else []
        if changes is None or not write_each(self._client, changes):
            return False
        if changes:
            logger.info('%s had %d leaves, and is one document again', doc_id, len(leaves))
        return True

    def _set_up(self) -> None:
        try:
            self._client.put(self._view)
        except Conflict:
            pass  # another process was first, with the same
        except AccessDenied:
            self._refused = True
            logger.warning(
                '%s lacks the design document %s, and what a cluster leaves conflicted is not healed; let an '
                'administrator run "celery -A your_app couchdb setup"',
                self._client.address.url,
                self._name,
            )


def write_each(client: Client, docs: Collection[Document]) -> bool:
    """Write leaves of one document, each in a request of its own, and tell whether all are proven; stop at the first that is not.

    What is kept comes first: what follows is only right if that is there.
    """
    for doc in docs:
        [result] = client.bulk([doc])
        if not result.is_proven:
            return False
    return True
