"""A registry of the documents of one database that cannot be written, so that others look at them no more."""

from __future__ import annotations

from ..log import get_logger

logger = get_logger(__name__)

#: The maximum number of documents in the registry.
_MAX_DOCS = 10_000


class Unusable:
    """The unusable documents of one database. Thread-safe."""

    def __init__(self) -> None:
        #: By document id, the revision.
        self._known: dict[str, str] = {}
        self._new: list[tuple[str, str]] = []

    def note(self, doc_id: str, rev: str, reason: str) -> None:
        """Record an unusable document and log it once: it cannot be written over this revision.

        `reason` is the end of a sentence in the log.
        """
        known = self.has(doc_id, rev)
        self._known[doc_id] = rev
        if known:
            return
        if len(self._known) > _MAX_DOCS:
            self._known.pop(next(iter(self._known)), None)
        self._new.append((doc_id, reason))
        logger.error('document %s is skipped: %s', doc_id, reason)

    def has(self, doc_id: str, rev: str) -> bool:
        """Return whether `note` was called with this id and revision."""
        return self._known.get(doc_id) == rev

    def take(self) -> list[tuple[str, str]]:
        """Return the ids and reasons that were recorded since the last call."""
        new, self._new = self._new, []
        return new
