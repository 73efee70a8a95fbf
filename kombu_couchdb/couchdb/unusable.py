"""A registry of unusable documents, which can never be read or written."""

from __future__ import annotations

import time

from ..log import get_logger

__all__ = ['Unusable']

logger = get_logger(__name__)

#: The maximum number of documents in the registry.
_MAX_DOCS = 10_000

#: Seconds in which an unreadable document is not read again together with others.
_UNREADABLE_SECONDS = 60.0


class Unusable:
    """The unusable documents of one database. Thread-safe."""

    def __init__(self) -> None:
        #: By document id, the revision (None: the document cannot be read) and the monotonic time of the entry.
        self._known: dict[str, tuple[str | None, float]] = {}
        self._new: list[tuple[str, str]] = []

    def note(self, doc_id: str, rev: str | None, reason: str) -> None:
        """Record an unusable document and log it once: it cannot be written with this revision, or (None) not be read.

        `reason` is the end of a sentence in the log.
        """
        known = self.has(doc_id, rev)
        self._known[doc_id] = rev, time.monotonic()
        if known:
            return
        if len(self._known) > _MAX_DOCS:
            self._known.pop(next(iter(self._known)), None)
        self._new.append((doc_id, reason))
        logger.error('document %s is skipped: %s', doc_id, reason)

    def forget(self, doc_id: str) -> None:
        """Remove a document that was replaced."""
        self._known.pop(doc_id, None)
        self._new = [(name, reason) for name, reason in self._new if name != doc_id]

    def has(self, doc_id: str, rev: str | None) -> bool:
        """Return whether `note` was called with this id and revision."""
        return doc_id in self._known and self._known[doc_id][0] == rev

    def is_unread(self, doc_id: str) -> bool:
        """Return whether a document was found unreadable in the last 60 seconds."""
        rev, since = self._known.get(doc_id, ('', 0.0))
        return rev is None and time.monotonic() - since < _UNREADABLE_SECONDS

    def take(self) -> list[tuple[str, str]]:
        """Return the ids and reasons that were recorded since the last call."""
        new, self._new = self._new, []
        return new
