"""Unproven claims: claims that a cluster stored on fewer nodes than a quorum.

CouchDB may have confirmed another consumer's claim of the same message. So an unproven claim is not delivered. After
`SYNC` seconds, in which the nodes replicate to each other, the sweeper reads all leaf revisions of the message and
decides about the claim; see `documents.conflict_rules`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf

from ..couchdb.conflicts import SYNC

__all__ = ['UnprovenClaims']


class UnprovenClaims:
    """The unproven claims of one consumer. Only its I/O thread may use them."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[str, float]] = {}  # by message id: the claim's revision, and a monotonic time

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the messages."""
        return iter(self._claims)

    def add(self, doc_id: str, rev: str) -> None:
        """Note the claim that was stored as revision `rev` of a message."""
        self._claims[doc_id] = rev, time.monotonic()

    @property
    def due(self) -> float:
        """The monotonic time at which the first claim can be decided; infinite if there is none."""
        return min((since + SYNC for _, since in self._claims.values()), default=inf)

    def decide(self, decide: Callable[[str, str], bool]) -> None:
        """Call `decide(doc_id, rev)` for each claim that is due; forget the claims for which it returns True."""
        for doc_id, (rev, since) in list(self._claims.items()):
            if time.monotonic() - since > SYNC:
                self._claims[doc_id] = rev, time.monotonic()
                if decide(doc_id, rev):
                    del self._claims[doc_id]
