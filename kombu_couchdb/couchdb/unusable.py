"""Documents of which a client knows that they cannot be read, or not be written back, whatever it does."""

from __future__ import annotations

import time

from ..log import get_logger

__all__ = ['Unusable']

logger = get_logger(__name__)

#: So many are remembered; and one that cannot be read is not read again together with others for so long, in seconds.
_REMEMBERED, _UNREAD = 10_000, 60.0


class Unusable:
    """The unusable documents of one database. Every method may be called in any thread."""

    def __init__(self) -> None:
        #: By id the revision, None of what cannot be read, and the monotonic time.
        self._known: dict[str, tuple[str | None, float]] = {}
        self._new: list[tuple[str, str]] = []

    def note(self, doc_id: str, rev: str | None, reason: str) -> None:
        """Note that a document cannot be written back in this revision, or, with None, not be read; the log says so once."""
        known = self.has(doc_id, rev)
        self._known[doc_id] = rev, time.monotonic()
        if known:
            return
        if len(self._known) > _REMEMBERED:
            self._known.pop(next(iter(self._known)), None)
        self._new.append((doc_id, reason))
        logger.error('document %s is passed over: %s', doc_id, reason)

    def has(self, doc_id: str, rev: str | None) -> bool:
        """Tell whether that was noted."""
        return doc_id in self._known and self._known[doc_id][0] == rev

    def is_unread(self, doc_id: str) -> bool:
        """Tell whether a document could not be read a short time ago."""
        rev, since = self._known.get(doc_id, ('', 0.0))
        return rev is None and time.monotonic() - since < _UNREAD

    def take(self) -> list[tuple[str, str]]:
        """Return the ids of those that were noted since the last call, with the reasons."""
        new, self._new = self._new, []
        return new
