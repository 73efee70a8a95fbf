"""Reading ahead: who asks for the states of a group's results, one after the other, gets them from a few requests.

Celery asks so wherever it looks at a group without waiting for it: `ready()`, `completed_count()`, and `get()` of a chord's
body, which first asks whether any part of the header has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .documents import Document
from .store import Store

__all__ = ['ReadAhead']

#: So many questions in a row, with pauses of at most so many seconds, are taken for the beginning of many.
_ROW, _PAUSE = 3, 0.05

#: How many documents are read at once, and how long, in seconds, they may be used instead of asking again; each once.
_COUNT, _FRESH = 250, 0.1


class ReadAhead:
    """Reads documents of one store; `following(doc_id, count)` tells which are likely to be asked for next."""

    def __init__(self, store: Store, following: Callable[[str, int], list[str]]) -> None:
        self._store, self._following = store, following
        self._local = threading.local()

    def read(self, doc_id: str) -> Document | None:
        """Return a document, None if there is none; at most `_FRESH` seconds old if it was asked for in a row."""
        local, now = self._local.__dict__, time.monotonic()
        docs: dict[str, Document | None] = local.get('docs', {})
        in_a_row = local.get('row', 0) + 1 if now - local.get('asked', 0.0) < _PAUSE else 0
        if doc_id not in docs or now > local['until']:
            ids = [doc_id, *(self._following(doc_id, _COUNT - 1) if in_a_row >= _ROW else ())]
            if len(ids) == 1:
                docs = {doc_id: self._store.read(doc_id)}
            else:
                docs = dict(zip(ids, self._store.read_many(ids), strict=True))
            local['until'] = time.monotonic() + _FRESH
        local.update(docs=docs, row=in_a_row, asked=time.monotonic())
        return docs.pop(doc_id)
