"""Documents that a process watches, or has received, before its program asked for them.

Only successes are kept: a success is never replaced. A result is returned once, so the program that asks again, or
another object of the same result, reads the document.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from celery import states

from ..results.documents import Document

__all__ = ['Ahead', 'Received']

#: The most documents that are kept, the most characters of them, and for how long each may be used, in seconds.
_MAX_DOCS, _MAX_CHARACTERS, _MAX_AGE_SECONDS = 5000, 8_000_000, 60.0


#: The most documents that are watched although nothing waits for them yet, and the largest of them that is kept without
#: being a success, in characters.
_MAX_AHEAD, _MAX_STATE_CHARACTERS = 1000, 4000


class Received:
    """Successes by their ids, the oldest first. Thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over in a forked child, where a thread of the parent may hold the lock."""
        self._lock = threading.Lock()
        #: By id: the document, its size in characters, and when it was received.
        self._docs: OrderedDict[str, tuple[Document, int, float]] = OrderedDict()
        self._characters = 0

    def __contains__(self, doc_id: str) -> bool:
        return doc_id in self._docs

    def add(self, doc: Document) -> bool:
        """Keep a document if it is a success, and drop the oldest ones if there are too many."""
        if doc.get('status') != states.SUCCESS:
            return False
        size = len(repr(doc))
        with self._lock:
            self._pop(doc['_id'])
            self._docs[doc['_id']] = (doc, size, time.monotonic())
            self._characters += size
            while len(self._docs) > _MAX_DOCS or self._characters > _MAX_CHARACTERS:
                self._pop(next(iter(self._docs)))
        return True

    def take(self, doc_id: str) -> Document | None:
        """Remove a document and return it; return None if it is not kept, or for too long."""
        if doc_id not in self._docs:
            return None
        with self._lock:
            doc, _, received = self._pop(doc_id) or (None, 0, 0.0)
        return doc if time.monotonic() - received <= _MAX_AGE_SECONDS else None

    def _pop(self, doc_id: str) -> tuple[Document, int, float] | None:
        found = self._docs.pop(doc_id, None)
        if found is not None:
            self._characters -= found[1]
        return found


class Ahead(dict[str, Document | None]):
    """The watched documents that nothing waits for yet, by id: the latest state that was received, or None.

    Successes leave it for `received`. The subscriber uses it with its lock.
    """

    def __init__(self, received: Received) -> None:
        super().__init__()
        self._received = received

    def extend(self, ids: Iterable[str]) -> set[str]:
        """Add ids, unless there are too many or their documents were received; return the added ones."""
        new = [doc_id for doc_id in ids if doc_id not in self and doc_id not in self._received]
        added = dict.fromkeys(new[: max(0, _MAX_AHEAD - len(self))])
        self.update(added)
        return set(added)

    def keep(self, doc: Document) -> None:
        """Keep a received document, if it is watched ahead. One that is too large is not watched any longer."""
        if doc['_id'] not in self:
            return
        if self._received.add(doc) or len(repr(doc)) > _MAX_STATE_CHARACTERS:
            del self[doc['_id']]
        else:
            self[doc['_id']] = doc

    def drop(self, doc_id: str) -> None:
        """Forget a document, also if it was received as a success."""
        self.pop(doc_id, None)
        self._received.take(doc_id)

    def forget_states(self, ids: Iterable[str]) -> None:
        """Forget the states of documents that were deleted, or are read again."""
        self.update(dict.fromkeys(doc_id for doc_id in ids if doc_id in self))
