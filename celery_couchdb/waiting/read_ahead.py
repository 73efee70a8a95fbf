"""Results that are received before the program asks for them: their cache, and the prediction of what it asks for next.

A program may send many tasks and then `get` their results in turn. Celery reads the results of a group in turn, too,
when it does not wait for them: in `ready()`, in `completed_count()`, and in `get()` of a chord's body, which first
checks whether a part of the header has failed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from celery import states

from kombu_couchdb.errors import CouchDBError, ServerUnavailable
from kombu_couchdb.log import get_logger

from ..results.documents import Document, is_expired
from ..results.result_store import Recent, ResultStore

logger = get_logger(__name__)

#: The most documents that are kept, the most characters of them, and for how long a success may be used, in seconds.
_MAX_DOCS, _MAX_CHARACTERS, _MAX_AGE_SECONDS = 5000, 8_000_000, 60.0

#: For how long any other state may be used, in seconds: it may be replaced at any time.
_FRESH_SECONDS = 0.1

#: Reading ahead begins after this number of reads, with less than `_MAX_PAUSE_SECONDS` from one to the next.
_MIN_READS, _MAX_PAUSE_SECONDS = 3, 0.05

#: The number of tasks whose order is remembered, the last that this process has sent.
_REMEMBERED_TASKS = 5000

#: The number of documents in one request, at first and at the most. It is twice the number of documents of the last
#: request that were used, so a slow program reads few unused ones.
_MIN_READ, _MAX_READ = 8, 250

#: The number of documents that are watched together with the one before them that a thread waits for, at first and at
#: the most, and after how many seconds without a wait it is small again.
_MIN_WATCHED, _MAX_WATCHED, _WATCHED_SECONDS = 8, 1000, 60.0


class Cache:
    """Documents of results by their ids, the oldest first. Each is returned once. Thread-safe.

    So the program that asks again, or another object of the same result, reads the document. `now` returns the server's
    time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.reset()

    def reset(self) -> None:
        """Start over in a forked child, where a thread of the parent may hold the lock."""
        self._lock = threading.Lock()
        #: By id: the document, its size in characters, and the monotonic time until which it may be used.
        self._docs: OrderedDict[str, tuple[Document, int, float]] = OrderedDict()
        self._characters = 0
        #: How often a document was dropped.
        self.drops = 0

    def __contains__(self, doc_id: str) -> bool:
        """Tell whether a success is kept under this id."""
        return doc_id in self._docs and is_success(self._docs.get(doc_id, ({},))[0])

    def add(self, docs: Sequence[Document], drops: int | None = None) -> None:
        """Keep documents; if there are too many, drop the oldest ones.

        `drops` is the number of drops before the documents were read: after another one they may be outdated.
        """
        with self._lock:
            if drops is not None and drops != self.drops:
                return
            for doc in docs:
                self._pop(doc['_id'])
                size = len(repr(doc))
                seconds = _MAX_AGE_SECONDS if is_success(doc) else _FRESH_SECONDS
                self._docs[doc['_id']] = (doc, size, time.monotonic() + seconds)
                self._characters += size
            while len(self._docs) > _MAX_DOCS or self._characters > _MAX_CHARACTERS:
                self._pop(next(iter(self._docs)))

    def take(self, doc_id: str) -> Document | None:
        """Remove a document and return it; return None if it is not kept, or has expired."""
        if doc_id not in self._docs:
            return None
        with self._lock:
            doc, _, until = self._pop(doc_id) or ({}, 0, float('-inf'))
        return doc if time.monotonic() <= until and not is_expired(doc, self._now()) else None

    def drop(self, doc_id: str) -> None:
        """Forget a document, because this process replaces or deletes it."""
        with self._lock:
            self._pop(doc_id)
            self.drops += 1

    def _pop(self, doc_id: str) -> tuple[Document, int, float] | None:
        found = self._docs.pop(doc_id, None)
        if found is not None:
            self._characters -= found[1]
        return found


def is_success(doc: Document) -> bool:
    """Tell whether a document is the result of a task that has succeeded: it is never replaced."""
    return bool(doc.get('status') == states.SUCCESS)


class _Thread(threading.local):
    """What one thread has done; the class has the values of a new thread."""

    #: The document id of the last sent task, and when it was sent.
    last_sent: tuple[str, float] = ('', 0.0)
    #: How many reads followed each other quickly, when the last one ended, and how many documents of the last request
    #: were used.
    reads, last_read, used = 0, float('-inf'), 0
    #: How many documents were to be watched with the last one that it waited for, and when.
    watched, last_wait = 0, float('-inf')


class ReadAhead:
    """Reads documents of one store, and with them, into `cache`, those that the thread is likely to ask for next.

    Those are the ids that `following(doc_id, count)` returns, or else the ids that the same thread passed to `sent`
    next.
    """

    def __init__(self, store: ResultStore, following: Callable[[str, int], list[str]], cache: Cache) -> None:
        self._store, self._following, self._cache = store, following, cache
        #: By document id, the thread that sent the task.
        self._sent: Recent[int] = Recent(_REMEMBERED_TASKS)
        self._thread = _Thread()

    def sent(self, doc_id: str) -> None:
        """Remember that a task was sent whose result will have this id."""
        self._sent[doc_id] = threading.get_ident()
        self._thread.last_sent = doc_id, time.monotonic()
        self._cache.take(doc_id)  # the result of an earlier task with this id

    def sent_ago(self, doc_id: str) -> float | None:
        """Return how many seconds ago a task was sent, if this thread has sent no other since; otherwise None."""
        last, sent_at = self._thread.last_sent
        return time.monotonic() - sent_at if last == doc_id else None

    def to_watch(self, doc_id: str) -> list[str]:
        """Return the ids of documents to watch together with `doc_id`, which this thread waits for.

        Their number doubles with each call, until the thread does not wait for a minute.
        """
        own, now = self._thread, time.monotonic()
        own.watched = min(2 * own.watched, _MAX_WATCHED) if now - own.last_wait < _WATCHED_SECONDS else _MIN_WATCHED
        own.last_wait = now
        return self._next_ids(doc_id, own.watched)

    def read(self, doc_id: str) -> Document | None:
        """Return a document, or None if there is none or it has expired.

        If it was read ahead and is no success, it is at most 0.1 seconds old. *Raises* the errors of
        `kombu_couchdb.errors`.
        """
        own = self._thread
        own.reads = own.reads + 1 if time.monotonic() - own.last_read < _MAX_PAUSE_SECONDS else 0
        try:
            doc = self._cache.take(doc_id)
            if doc is not None:
                own.used += 1
            elif own.reads >= _MIN_READS:
                ids = [doc_id, *self._next_ids(doc_id, max(_MIN_READ, min(2 * own.used, _MAX_READ)) - 1)]
                own.used = 1
                self.load(ids, least=2)
                doc = self._cache.take(doc_id)
            if doc is None:
                return self._store.read(doc_id)
            return doc if '_rev' in doc else None
        finally:
            own.last_read = time.monotonic()

    def load(self, ids: Sequence[str], least: int = _MIN_READS, *, raises: bool = False) -> None:
        """Read documents that this thread reads next, unless they are few: one request for each 250.

        With `raises` it *raises* `ServerUnavailable`: the next read would wait for the same error.
        """
        if len(ids) < least:
            for doc_id in ids:  # each is read alone, and not as it was a moment ago
                self._cache.take(doc_id)
            return
        drops = self._cache.drops
        try:
            docs = self._store.read_many(ids)
        except CouchDBError as exc:  # it may concern another document than the one that is read next
            if raises and isinstance(exc, ServerUnavailable):
                raise
            logger.debug('results cannot be read ahead, and are read one by one: %s', exc)
        else:
            # A missing document has an id only. If they are too many for the cache, it keeps those that are read first.
            self._cache.add([doc or {'_id': doc_id} for doc_id, doc in zip(ids, docs, strict=True)][::-1], drops)

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
