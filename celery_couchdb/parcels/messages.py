"""Messages of open receipts: one that expired, was deleted or became a dead letter ends its receipt without a result.

Nobody stores a result for such a message. So the leader looks up the messages of open receipts in the broker's database
by their ids: first after a minute, then after pauses that double up to ten minutes. The tombstone of a message that
nobody has acknowledged says so (`workitem.dropped`). That of an acknowledged one says nothing about its task, which may
still run, may have been sent again, or may ignore its result; it is not looked up again. If the broker's database has
no trace of a message, a vacuum has purged its tombstone, or its publisher has forged the receipt.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any

from celery import states

from kombu_couchdb.couchdb.client import Client, chunks
from kombu_couchdb.documents import parcel, workitem
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

__all__ = ['End', 'Messages']

logger = get_logger(__name__)

#: The state in which a task without a result has ended, and a sentence that says why.
End = tuple[str, str]

#: The seconds until a message is looked up first, and the longest pause between two look-ups of one message.
_FIRST_SECONDS, _MAX_SECONDS = 60.0, 600.0

#: Messages that are looked up in one request.
_BATCH_DOCS = 200

_DROPPED: End = (states.REVOKED, 'the message of the task expired, or was deleted, before a worker acknowledged it')


class Messages:
    """The messages, in the broker's database, of the parcels that have open receipts. Use it in one thread."""

    def __init__(self, broker: Client) -> None:
        self._broker = broker
        #: By the ids of the parcels: when a message is looked up next, as a monotonic time, and the pause before that.
        self._checks: dict[str, tuple[float, float]] = {}
        self._next_at = -inf

    def ends(self, open_ids: Collection[str]) -> dict[str, End | None]:
        """Return how those of these parcels have ended whose tasks store no result; no request in most calls.

        None is for a parcel of which the broker's database has no trace.
        """
        now = time.monotonic()
        if now < self._next_at:
            return {}
        self._next_at = now + _FIRST_SECONDS
        first = (now + _FIRST_SECONDS, _FIRST_SECONDS)
        self._checks = {doc_id: self._checks.get(doc_id, first) for doc_id in open_ids}
        found: dict[str, End | None] = {}
        try:
            for part in chunks([doc_id for doc_id, (at, _) in self._checks.items() if at <= now], _BATCH_DOCS):
                found |= self._look_up(part, now)
        except CouchDBError as exc:  # the next call that is due looks them up
            logger.debug('the messages of receipts cannot be looked up just now: %s', exc)
        return found

    def _look_up(self, doc_ids: Sequence[str], now: float) -> dict[str, End | None]:
        of = {parcel.moved_id(doc_id): doc_id for doc_id in doc_ids}
        docs = dict(zip(of, self._broker.find(list(of)), strict=True))
        gone = sorted(self._broker.known([name for name, doc in docs.items() if doc is None]))
        # In a cluster the node that answers first may have an unproven deletion: each copy that responds is read.
        everywhere = {'r': self._broker.replicas} if self._broker.replicas > 1 else {}
        found = self._broker.fetch_leaves(gone, **everywhere)
        # `_bulk_get` of the embedded server leaves out deleted documents.
        leaves = {name: of_one or self._broker.leaves(name) for name, of_one in zip(gone, found, strict=True)}
        ends: dict[str, End | None] = {}
        for name, doc_id in of.items():
            pause = min(2 * self._checks[doc_id][1], _MAX_SECONDS)
            self._checks[doc_id] = now + pause, pause
            doc = docs[name]
            if doc is not None and workitem.is_dead(doc):
                ends[doc_id] = states.FAILURE, f'the message of the task is a dead letter: {doc.get("reason")}'
            elif name in leaves and _is_dropped(leaves[name]):
                ends[doc_id] = _DROPPED
            elif doc is None and name not in leaves:
                ends[doc_id] = None
            elif (doc is not None and workitem.is_done(doc)) or (name in leaves and _is_deleted(leaves[name])):
                self._checks[doc_id] = inf, pause
        return ends


def _is_deleted(leaves: Sequence[Mapping[str, Any]]) -> bool:
    return all(leaf.get('_deleted') for leaf in leaves)


def _is_dropped(leaves: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a message was deleted and nobody has acknowledged it; `leaves` are all its leaf revisions."""
    decided = [leaf for leaf in leaves if not leaf.get('void')]  # the others are withdrawn claims
    return bool(decided) and all(leaf.get('_deleted') and leaf.get('dropped') for leaf in decided)
