"""Callbacks of results, `result.then(…)`: a thread that waits on behalf of those who do not.

Only a process that is no worker has it: within a task, whoever wants a result waits for it. A result that only the barrier
of its group listens to is held weakly, and is watched only once the group has a callback of somebody's own.
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
from .subscriber import Subscriber, Waiter

if TYPE_CHECKING:
    from celery.result import AsyncResult, ResultSet

__all__ = ['Callbacks', 'groups_of']

logger = get_logger(__name__)

#: Results are taken up when none has come for this long, or since the first came for at most the second, in seconds: a
#: group registers its tasks one by one, and much is forgotten as soon as it was sent.
_QUIET, _GATHER = 0.05, 0.5

#: How often the thread looks whether results were forgotten, or groups got callbacks, in seconds.
_TICK = 1.0

#: How long the thread stays without any result, in seconds.
_IDLE = 10.0


class Callbacks:
    """The results of one backend whose callbacks are still to be called. Thread-safe."""

    def __init__(
        self,
        reader: Subscriber,
        key_of: Callable[[str], str],
        decode: Callable[[Document], dict[str, Any]],
        complete: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._reader, self._key_of, self._decode, self._complete = reader, key_of, decode, complete
        self.reset()

    def reset(self) -> None:
        """Start over, after a fork: the thread and its promises are the parent's."""
        self._lock, self._fulfilling = threading.Lock(), threading.RLock()
        #: (id, task id, result), without result if it is to go, without id for all results of the task.
        self._queue: deque[tuple[int | None, str, Any]] = deque()
        self._waiter = Waiter()
        self._held: dict[
            str, dict[int, Callable[[], Any]]
        ] = {}  # by document, by id: what returns the result, if it lives
        self._watched: set[str] = set()
        self._running = False

    def add(self, result: AsyncResult) -> None:
        """Fulfil a result when it is ready, unless this is a worker."""
        if task_join_will_block():
            return
        with self._lock:
            self._queue.append((id(result), result.id, result))
            if not self._running:
                threading.Thread(target=self._run, name='celery-couchdb-callbacks', daemon=True).start()
                self._running = True
        self._waiter.wake()

    def remove(self, result: Any) -> None:
        """Let go of a result; it takes no lock."""
        if self._running and result.id is not None:
            self._queue.append((id(result), str(result.id), None))

    def forget(self, task_id: str) -> None:
        """Let go of all results of a task that was forgotten: it will have none."""
        if self._running:
            self._queue.append((None, task_id, None))

    def following(self, doc_id: str, count: int) -> list[str]:
        """Return the documents of results that were registered after that of `doc_id` and are not ready: its group's, say."""
        held = list(self._held)
        try:
            place = held.index(doc_id) + 1
        except ValueError:
            return []
        return held[place : place + count]

    def fulfil(self, result: AsyncResult, meta: dict[str, Any]) -> None:
        """Give a result its outcome and call its callbacks, once, whoever of several threads comes first."""
        with self._fulfilling:
            if result._cache is not None:
                return
            result._set_cache(self._complete(dict(meta)))
            # Whoever asks for its state just now calls on_ready, too, and vine forgets a callback only after its end.
            ready = result.on_ready
            listeners = list(ready._lvpending or (ready._svpending,))
            ready._svpending = ready._lvpending = None
        ready(result)
        for listener in listeners:
            if listener is not None:
                listener(result)

    # -- in the thread of its own

    def _run(self) -> None:
        used = first = time.monotonic()
        waiting = 0
        while True:
            now = time.monotonic()
            try:
                for doc in self._waiter.take(_QUIET if self._queue else _TICK):
                    self._call(doc)
                now = time.monotonic()
                if not waiting:
                    first = now
                if waiting == (waiting := len(self._queue)) or now - first > _GATHER:
                    self._take_up()
                    waiting = len(self._queue)
            except CouchDBError as exc:
                self._fail(exc)
            except Exception:  # without this thread no callback would ever be called again
                logger.exception('callbacks of results were disturbed')
            if self._held:
                used = now
            with self._lock:
                if not self._held and not self._queue and now - used > _IDLE:
                    self._running = False
                    return

    def _fail(self, exc: CouchDBError) -> None:
        """Give up those results whose own documents cannot be read; all of them, if it is not the documents."""
        lost = [doc_id for doc_id in self._watched if not self._reader.is_watching(self._waiter, doc_id)]
        logger.error('callbacks of %d results will not be called: %s', len(lost), exc)
        for doc_id in lost:
            self._watched.discard(doc_id)
            self._held.pop(doc_id, None)

    def _take_up(self) -> None:
        """Hold what was added, let go of what was removed or is no more, and watch what has callbacks."""
        while self._queue:
            number, task_id, result = self._queue.popleft()
            try:
                doc_id = self._key_of(task_id)
                doc_id.encode()
            except (ValueError, TypeError):
                doc_id = ''
            if not task_id or not doc_id:
                continue  # no id, or one that cannot be that of a document: nothing will ever be stored under it
            if number is None:
                self._held.pop(doc_id, None)
            elif result is None:
                self._held.get(doc_id, {}).pop(number, None)
            elif result._cache is None:
                self._held.setdefault(doc_id, {})[number] = _hold(result)
            result = None
        heard: set[str] = set()
        for doc_id, held in list(self._held.items()):
            for number, get in list(held.items()):
                if (result := get()) is None:
                    del held[number]
                elif _is_heard(result.on_ready):
                    heard.add(doc_id)
                result = None
            if not held:
                del self._held[doc_id]
        self._reader.drop(self._waiter, self._watched - heard)
        if new := heard - self._watched:
            self._reader.watch(self._waiter, new)
        self._watched = heard

    def _call(self, doc: Document) -> None:
        try:
            meta = self._decode(doc)
            if meta['status'] not in states.READY_STATES:
                return
        except Exception:  # the others go on
            logger.exception('callbacks of %s will not be called: its result cannot be read', doc['_id'])
            meta = None
        held = self._held.pop(doc['_id'], {})
        self._watched.discard(doc['_id'])
        self._reader.drop(self._waiter, [doc['_id']])
        for get in held.values():
            if meta is None or (result := get()) is None:
                continue
            try:
                self.fulfil(result, meta)
            except Exception:  # a user's code
                logger.exception('a callback of task %s failed', result.id)


def _hold(result: AsyncResult) -> Callable[[], Any]:
    """Return what returns `result`: as long as it lives, if only barriers listen to it, else for ever."""
    if all(listener is None or isinstance(listener, barrier) for listener in list(result.on_ready.listeners)):
        return weakref.ref(result)
    return lambda: result


def _is_heard(on_ready: promise) -> bool:
    """Tell whether a promise has a callback of somebody's own, be it that of a group that waits for it."""
    for listener in list(on_ready.listeners):
        if listener is None:
            continue
        if isinstance(listener, barrier):
            if _is_heard(listener.p):
                return True
        elif isinstance(listener, promise) and listener.weak:
            # So a set of results learns that its barrier was passed: is there anybody whom it tells?
            group = _told(listener)
            if group is not None and _is_heard(group.on_ready):
                return True
        else:
            return True
    return False


def groups_of(result: AsyncResult | ResultSet) -> Iterator[ResultSet]:
    """Yield the sets of results that a result is in, and the sets around those, as far as somebody keeps them."""
    for listener in list(result.on_ready.listeners):
        if isinstance(listener, barrier):
            for promised in list(listener.p.listeners):
                group = _told(promised) if isinstance(promised, promise) and promised.weak else None
                if group is not None:
                    yield group
                    yield from groups_of(group)


def _told(promised: promise) -> Any:
    """Return the set of results that a weak promise tells that its barrier was passed, None if nobody keeps it."""
    return getattr(promised.fun() if promised.fun else None, '__self__', None)
