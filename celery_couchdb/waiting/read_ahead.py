"""Reading ahead: results that are read one after the other, in the order of their tasks, need few requests.

A program may send many tasks and then `get` their results in turn. Celery reads the results of a group in turn, too,
when it does not wait for them: in `ready()`, in `completed_count()`, and in `get()` of a chord's body, which first
checks whether a part of the header has failed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

from ..results.documents import Document, is_expired
from ..results.store import Recent, Store
from .received import Received

__all__ = ['ReadAhead']

logger = get_logger(__name__)

#: Reading ahead begins after this number of reads, with less than `_MAX_PAUSE_SECONDS` from one to the next.
_MIN_READS, _MAX_PAUSE_SECONDS = 3, 0.05

#: The number of tasks whose order is remembered, the last that this process has sent.
_REMEMBERED_TASKS = 5000

#: The number of documents in one request, at first and at the most. It is twice the number of documents of the last
#: request that were used, so a slow program reads few unused ones.
_MIN_DOCS, _MAX_DOCS = 8, 250

#: The most documents that are watched together with the one before them that a thread waits for, and after how many
#: seconds without a wait their number begins small again.
_MAX_WINDOW, _WINDOW_SECONDS = 1000, 60.0

#: How long a document that was read ahead may be used, in seconds. Each is used once.
_FRESH_SECONDS = 0.1


class ReadAhead:
    """Reads documents of one store, and with them the documents that are likely to be read next.

    Those are the ids that `following(doc_id, count)` returns, or else the ids that the same thread passed to `sent`
    next. Successes that were read ahead are put into `received`.
    """

    def __init__(
        self, store: Store, following: Callable[[str, int], list[str]], received: Received | None = None
    ) -> None:
        self._store, self._following, self._received = store, following, received or Received()
        #: By document id, the thread that sent the task.
        self._sent: Recent[int] = Recent(_REMEMBERED_TASKS)
        self._local = threading.local()

    def sent(self, doc_id: str) -> None:
        """Remember that a task was sent whose result will have this id."""
        self._sent[doc_id] = threading.get_ident()
        self._local.last_sent = doc_id, time.monotonic()
        self._received.take(doc_id)  # the result of an earlier task with this id

    def sent_ago(self, doc_id: str) -> float | None:
        """Return how many seconds ago a task was sent, if this thread has sent no other since; otherwise None."""
        last, sent_at = self._local.__dict__.get('last_sent', (None, 0.0))
        return time.monotonic() - sent_at if last == doc_id else None

    def next_ids(self, doc_id: str) -> list[str]:
        """Return the ids of documents that are likely to be asked for after `doc_id`.

        Their number doubles with each call of the same thread, until it does not call for a minute.
        """
        local, now = self._local.__dict__, time.monotonic()
        is_recent = now - local.get('last_window', float('-inf')) < _WINDOW_SECONDS
        local['window'] = min(2 * local['window'], _MAX_WINDOW) if is_recent else _MIN_DOCS
        local['last_window'] = now
        return self._next_ids(doc_id, local['window'])

    def clear(self) -> None:
        """Delete what was read ahead for this thread, because the thread writes to the database."""
        self._local.__dict__.pop('docs', None)

    def read(self, doc_id: str) -> Document | None:
        """Return a document, or None if there is none or it has expired.

        A document that was read ahead is at most 0.1 seconds old. *Raises* the errors of `kombu_couchdb.errors`.
        """
        local, now = self._local.__dict__, time.monotonic()
        if (doc := self._received.take(doc_id)) is not None and not is_expired(doc, self._store.client.clock.now()):
            local.get('docs', {}).pop(doc_id, None)  # used: the next request is larger
            local.update(reads=local.get('reads', 0) + 1, last=now)
            return doc
        docs: dict[str, Document | None] = local.get('docs', {})
        reads = local.get('reads', 0) + 1 if now - local.get('last', 0.0) < _MAX_PAUSE_SECONDS else 0
        if doc_id not in docs or now > local['until']:
            used = local.get('count', 0) - len(docs)
            count = max(_MIN_DOCS, min(2 * used, _MAX_DOCS))
            ids = [doc_id, *(self._next_ids(doc_id, count - 1) if reads >= _MIN_READS else ())]
            local['count'] = len(ids)
            docs = {}
            if len(ids) > 1:
                try:
                    docs = dict(zip(ids, self._store.read_many(ids), strict=True))
                    self._keep([doc for doc in docs.values() if doc is not None and doc['_id'] != doc_id])
                except CouchDBError as exc:
                    # The error may concern another document only.
                    logger.debug('results cannot be read ahead, and are read one by one: %s', exc)
            if not docs:
                docs = {doc_id: self._store.read(doc_id)}
            local['until'] = time.monotonic() + _FRESH_SECONDS
        local.update(docs=docs, reads=reads, last=time.monotonic())
        return docs.pop(doc_id)

    def load(self, ids: list[str]) -> None:
        """Read the documents that this thread reads next: one request for each 250."""
        if len(ids) < _MIN_READS:
            return
        try:
            docs = dict(zip(ids, self._store.read_many(ids), strict=True))
        except CouchDBError as exc:
            logger.debug('results cannot be read ahead, and are read one by one: %s', exc)
        else:
            until = time.monotonic() + _FRESH_SECONDS
            self._local.__dict__.update(docs=docs, count=len(docs), until=until)

    def _next_ids(self, doc_id: str, count: int) -> list[str]:
        found = self._following(doc_id, count)
        thread = self._sent.get(doc_id)
        if found or thread is None:
            return found
        # Of the ids alone: to make pairs may start Python's garbage collection, and let another thread send a task.
        sent = list(self._sent)
        if doc_id not in sent:
            return []
        after = itertools.islice(sent, sent.index(doc_id) + 1, None)
        return list(itertools.islice((other for other in after if self._sent.get(other) == thread), count))

    def _keep(self, docs: list[Document]) -> None:
        for doc in docs:
            self._received.add(doc)
