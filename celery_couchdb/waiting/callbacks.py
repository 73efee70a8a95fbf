"""Callbacks of results, `result.then(…)`: a thread that waits for results and calls their callbacks.

The thread runs only in processes that are no workers: a task that needs a result has to wait for it. A result whose
only listener is the barrier of its group is referenced weakly, and is not watched until the group has a callback.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from celery import states
from celery._state import task_join_will_block
from vine import barrier, promise

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

from ..results.documents import Document
from .subscriber import Subscriber
from .watched import ResultMailbox

if TYPE_CHECKING:
    from celery.result import AsyncResult, ResultSet


logger = get_logger(__name__)

#: After a result was added, the thread waits so long for more, in seconds, and at least so many times as long as it
#: needed to process them the last time: a group adds its results one by one, and many are deleted as soon as they are
#: sent.
_GATHER_SECONDS, _GATHER_SHARE = 0.05, 10

#: How often the thread checks whether results were deleted, or groups have new callbacks, in seconds.
_CHECK_SECONDS = 1.0

#: How long the thread runs on without any result, in seconds.
_IDLE_SECONDS = 10.0


class Callbacks:
    """The results of one backend whose callbacks were not called yet. Thread-safe.

    `key_of` returns the document id of a task's result. `decode` returns the meta-data in a document, and `complete`
    adds to them what Celery's base class adds.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        key_of: Callable[[str], str],
        decode: Callable[[Document], dict[str, Any]],
        complete: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._subscriber, self._key_of, self._decode, self._complete = subscriber, key_of, decode, complete
        self.reset()

    def reset(self) -> None:
        """Start over in a forked child: the thread and the callbacks belong to the parent process."""
        self._lock, self._fulfilling = threading.Lock(), threading.RLock()
        #: Results to add, with the ids of their tasks. Without a result: remove all results of the task.
        self._queue: deque[tuple[str, Any]] = deque()
        self._mailbox = ResultMailbox()
        self._watched: set[str] = set()
        #: By document id: functions that return a result, or None if it was deleted.
        self._held: dict[str, list[Callable[[], Any]]] = {}
        self._running = False
        #: Whether the thread has been told about new results.
        self._is_told = False

    def add(self, result: AsyncResult) -> None:
        """Call the callbacks of a result when it is ready. In a worker, do nothing."""
        if task_join_will_block():
            return
        with self._lock:
            self._queue.append((result.id, result))
            if not self._running:
                threading.Thread(target=self._run, name='celery-couchdb-callbacks', daemon=True).start()
                self._running = True
            is_told, self._is_told = self._is_told, True
        if not is_told:  # a group adds hundreds of results, and waking the thread for each costs as much as sending
            self._mailbox.interrupt()

    def forget(self, task_id: str) -> None:
        """Remove all results of a task after `AsyncResult.forget`: its result was deleted."""
        if self._running:
            self._queue.append((task_id, None))

    def following(self, doc_id: str, count: int) -> list[str]:
        """Return the ids of up to `count` documents whose results were added after that of `doc_id` and are not ready.

        They are often the results of the same group.
        """
        held = list(self._held)
        try:
            start = held.index(doc_id) + 1
        except ValueError:
            return []
        return held[start : start + count]

    def fulfil(self, result: AsyncResult, meta: dict[str, Any]) -> None:
        """Set the outcome of a result and call its callbacks, unless another thread has done so."""
        with self._fulfilling:
            if result._cache is not None:
                return
            result._set_cache(self._complete(dict(meta)))
            # Another thread that reads the result's state now calls on_ready, too. vine removes a callback only after
            # it has returned, so a callback could be called twice.
            ready = result.on_ready
            listeners = list(ready._lvpending or (ready._svpending,))
            ready._svpending = ready._lvpending = None
        ready(result)
        for listener in listeners:
            if listener is not None:
                listener(result)

    # -- in the thread

    def _run(self) -> None:
        last_used, gather = time.monotonic(), _GATHER_SECONDS
        while True:
            try:
                for doc in self._mailbox.receive(_CHECK_SECONDS):
                    self._call(doc)
                if self._is_told:
                    time.sleep(gather)
                    self._is_told = False  # before the queue is processed, so that no entry is missed
                began = time.monotonic()
                self._process_queue()
                gather = max(_GATHER_SECONDS, _GATHER_SHARE * (time.monotonic() - began))
            except CouchDBError as exc:
                self._fail(exc)
            except Exception:  # if this thread ended, no callback would be called any more
                logger.exception('unexpected error in the thread for callbacks of results, which continues')
            now = time.monotonic()
            if self._held:
                last_used = now
            with self._lock:
                if not self._held and not self._queue and now - last_used > _IDLE_SECONDS:
                    self._running = False
                    return

    def _fail(self, exc: CouchDBError) -> None:
        """Remove the results that the subscriber no longer watches because of an error."""
        lost = self._watched - self._mailbox.revs.keys()
        logger.error('callbacks of %d results will not be called: %s', len(lost), exc)
        self._watched -= lost
        for doc_id in lost:
            self._held.pop(doc_id, None)

    def _process_queue(self) -> None:
        """Add and remove queued results, remove deleted ones, and watch those that have callbacks."""
        while self._queue:
            task_id, result = self._queue.popleft()
            try:
                doc_id = self._key_of(task_id)
                doc_id.encode()
            except (ValueError, TypeError):
                doc_id = ''
            if not task_id or not doc_id:
                continue  # no id, or one that CouchDB refuses: no result can be stored under it
            if result is None:
                self._held.pop(doc_id, None)
            else:
                self._held.setdefault(doc_id, []).append(_reference(result))
            result = None  # no reference may stay in this frame
        wanted: set[str] = set()
        for doc_id, held in list(self._held.items()):
            held[:] = [get for get in held if not _is_over(get())]
            if not held:
                del self._held[doc_id]
            elif any(_has_callback(result.on_ready) for get in held if (result := get()) is not None):
                wanted.add(doc_id)
            result = None
        self._subscriber.unwatch(self._mailbox, self._watched - wanted)
        if new := wanted - self._watched:
            self._subscriber.watch(self._mailbox, new)
        self._watched = wanted

    def _call(self, doc: Document) -> None:
        try:
            meta = self._decode(doc)
            if meta['status'] not in states.READY_STATES:
                return
        except Exception:  # callbacks of other results are still called
            logger.exception('callbacks of %s will not be called: its result cannot be read', doc['_id'])
            meta = None
        held = self._held.pop(doc['_id'], ())
        self._watched.discard(doc['_id'])
        self._subscriber.unwatch(self._mailbox, [doc['_id']])
        for get in held:
            if meta is None or (result := get()) is None:
                continue
            try:
                self.fulfil(result, meta)
            except Exception:  # an error of the user's callback
                logger.exception('a callback of task %s failed', result.id)


def _is_over(result: AsyncResult | None) -> bool:
    """Tell whether a result was deleted, or is known: whoever has received it has called its callbacks."""
    return result is None or result._cache is not None


def _reference(result: AsyncResult) -> Callable[[], Any]:
    """Return a function that returns `result`; a weak reference if only barriers listen to the result."""
    if all(listener is None or isinstance(listener, barrier) for listener in list(result.on_ready.listeners)):
        return weakref.ref(result)
    return lambda: result


def _has_callback(on_ready: promise) -> bool:
    """Tell whether a promise has a callback of the user, or belongs to a group that has one."""
    for listener in list(on_ready.listeners):
        if listener is None:
            continue
        if isinstance(listener, barrier):
            if _has_callback(listener.p):
                return True
        elif isinstance(listener, promise) and listener.weak:
            # A set of results listens to its barrier with a weak promise, and may have callbacks itself.
            group = _group_of(listener)
            if group is not None and _has_callback(group.on_ready):
                return True
        else:
            return True
    return False


def groups_of(result: AsyncResult | ResultSet) -> Iterator[ResultSet]:
    """Yield the sets that contain a result, and the sets that contain those, unless they were deleted."""
    for listener in list(result.on_ready.listeners):
        if isinstance(listener, barrier):
            for promised in list(listener.p.listeners):
                group = _group_of(promised) if isinstance(promised, promise) and promised.weak else None
                if group is not None:
                    yield group
                    yield from groups_of(group)


def _group_of(promised: promise) -> Any:
    """Return the set of results that listens to its barrier with this weak promise, or None if it was deleted."""
    return getattr(promised.fun() if promised.fun else None, '__self__', None)
