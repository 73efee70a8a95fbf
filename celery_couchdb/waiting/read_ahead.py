"""Reading ahead: who asks for results one after the other, in the order of their tasks, gets them from a few requests.

So do programs that send many tasks and then `get` their results in turn. So does Celery wherever it looks at a group without
waiting for it: `ready()`, `completed_count()`, and `get()` of a chord's body, which first asks whether any part of the header
has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

from ..results.documents import Document
from ..results.store import Recent, Store

__all__ = ['ReadAhead']

logger = get_logger(__name__)

#: So many questions in a row, with pauses of at most so many seconds, are taken for the beginning of many.
_ROW, _PAUSE = 3, 0.05

#: So many results of tasks that this process sent last are known in their order.
_SENT = 5000

#: How many documents are read at once, at first and at the most: twice as many if all were used, and fewer for who is slow. How
#: long, in seconds, they may be used instead of asking again; each once.
_FIRST, _COUNT, _FRESH = 8, 250, 0.1


class ReadAhead:
    """Reads documents of one store; `following(doc_id, count)` tells which are likely to be asked for next, beside `sent`."""

    def __init__(self, store: Store, following: Callable[[str, int], list[str]]) -> None:
        self._store, self._following = store, following
        self._sent: Recent[None] = Recent(_SENT)
        self._local = threading.local()

    def sent(self, doc_id: str) -> None:
        """Note that a result will be stored under this id, after those that were noted before."""
        self._sent[doc_id] = None

    def drop(self) -> None:
        """Forget what was read ahead in this thread: it has written since."""
        self._local.__dict__.pop('docs', None)

    def read(self, doc_id: str) -> Document | None:
        """Return a document, None if there is none; at most `_FRESH` seconds old if it was asked for in a row."""
        local, now = self._local.__dict__, time.monotonic()
        docs: dict[str, Document | None] = local.get('docs', {})
        in_a_row = local.get('row', 0) + 1 if now - local.get('asked', 0.0) < _PAUSE else 0
        if doc_id not in docs or now > local['until']:
            used = local.get('count', 0) - len(docs)  # the others were read in vain
            count = max(_FIRST, min(2 * used, _COUNT))
            ids = [doc_id, *(self._next(doc_id, count - 1) if in_a_row >= _ROW else ())]
            local['count'] = len(ids)
            docs = {}
            if len(ids) > 1:
                try:
                    docs = dict(zip(ids, self._store.read_many(ids), strict=True))
                except CouchDBError as exc:
                    logger.debug('results are read one by one: %s', exc)  # the trouble of another is none of this one's
            if not docs:
                docs = {doc_id: self._store.read(doc_id)}
            local['until'] = time.monotonic() + _FRESH
        local.update(docs=docs, row=in_a_row, asked=time.monotonic())
        return docs.pop(doc_id)

    def _next(self, doc_id: str, count: int) -> list[str]:
        found = self._following(doc_id, count)
        sent = list(self._sent)
        if found or doc_id not in sent:
            return found
        place = sent.index(doc_id) + 1
        return sent[place : place + count]
