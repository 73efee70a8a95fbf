"""Waiting for results, as a mixin of the backend: `AsyncResult.get`, `ResultSet.join`, `iter_native` and `then`.

In Celery's own mixin, one of the waiting threads at a time reads from a connection. Here a separate thread reads, see
`subscriber`, and delivers documents to the mailbox of each waiting thread.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, Any

from celery import states
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import TimeoutError

from kombu_couchdb.couchdb.call import time_limit
from kombu_couchdb.errors import RETRIED

from ..results.documents import Document, is_final
from ..results.result_store import ResultStore
from .awaited import Awaited, AwaitedSet, Meta, ancestors
from .callbacks import Callbacks, groups_of
from .read_ahead import ReadAhead
from .subscriber import Subscriber
from .watched import ResultMailbox

if TYPE_CHECKING:
    from celery.result import AsyncResult, ResultSet

#: The least time between two checks for failures of earlier tasks in a chain, in seconds for each of these tasks.
_PAUSE_PER_ANCESTOR_SECONDS = 0.005

#: Before the timeout of a shorter wait, in seconds, the document is read, even if the subscriber watches it.
MIN_TIMEOUT_SECONDS = 1.0

#: The packages that call `get` for their users; a warning names the place outside of them.
_LIBRARIES = ('celery', 'celery_couchdb')


class PushMixin(BaseKeyValueStoreBackend):
    """The methods of the backend that wait for results. The backend sets the attributes."""

    store: ResultStore
    subscriber: Subscriber
    callbacks: Callbacks
    read_ahead: ReadAhead
    decode_document: Callable[[Document], Meta]
    is_async = True

    # -- called by celery.app

    def on_task_call(self, producer: Any, task_id: str) -> dict[str, Any]:
        """Remember the order of sent tasks for reading ahead. Return the message options to add to the task: none."""
        if isinstance(task_id, str):  # Celery raises its own error for other types later
            self.read_ahead.sent(self.get_key_for_task(task_id))
        return {}

    # -- called by celery.result

    def wait_for_pending(
        self,
        result: AsyncResult,
        callback: Callable[..., Any] | None = None,
        propagate: bool = True,
        timeout: float | None = None,
        interval: float | None = None,
        on_message: Callable[[Meta], Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
        **_: Any,
    ) -> Any:
        """Wait until a result is ready and return its value.

        `timeout` and `interval` are in seconds; see `await_results` for the functions. *Raises* `TimeoutError` after
        `timeout`, and with `propagate` the exception of a failed task: this one, or an earlier one in its chain.
        """
        self._check_caller()
        # In each interval Celery reads the states of all earlier results, in case one has failed. That is seldom
        # useful, because then this result fails, too. So the interval is longer if there are more earlier results.
        pause = max(interval or 0.5, _PAUSE_PER_ANCESTOR_SECONDS * len(list(ancestors(result))))
        before = {task.id: task for group in groups_of(result) for task in ancestors(group)}
        for task_id, meta in self.await_results([result.id], timeout, pause, on_message, on_interval, before):
            if task_id in before:
                if meta['status'] in states.PROPAGATE_STATES:
                    self.callbacks.fulfil(before[task_id], meta)  # so the group that contains `result` is never sent
                    error = before[task_id].maybe_throw(propagate=propagate)
                    if callback is not None:
                        callback(result.id, error)
                    return error
                continue
            self.callbacks.fulfil(result, meta)
            if propagate and on_interval is not None and meta['status'] in states.PROPAGATE_STATES:
                on_interval()  # if an earlier failure caused this one, Celery raises the earlier one here
        return result.maybe_throw(callback=callback, propagate=propagate)

    def iter_native(
        self,
        result: ResultSet,
        no_ack: bool = True,
        timeout: float | None = None,
        interval: float = 0.5,
        on_message: Callable[[Meta], Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yield `(id, meta)` of the results in a set as they become ready, and `(id, children)` of nested sets.

        If a task before the set fails, the set is never sent. Its unfinished results are yielded with that failure.
        *Raises* `TimeoutError` after `timeout` seconds; see `await_results` for the other parameters.
        """
        self._check_caller()
        awaited = AwaitedSet(result, self.callbacks.fulfil)
        yield from awaited.known()
        waiting, before = awaited.waiting, awaited.before
        with closing(self.await_results(waiting, timeout, interval, on_message, on_interval, before)) as found:
            for task_id, meta in found:
                yield from awaited.take(task_id, meta)
                if awaited.is_over:
                    break
        yield from awaited.rest()

    def add_pending_result(self, result: AsyncResult, weak: bool | None = None) -> AsyncResult:
        """Call the callbacks of a result when it is ready."""
        # AsyncResult.then passes `weak`. AsyncResult.get does not, and then waits itself.
        if weak is not None:
            self.callbacks.add(result)
        return result

    def remove_pending_result(self, result: Any) -> Any:
        """Do nothing: deleted and fulfilled results are noticed. Destructors call this at any time."""
        return result

    # -- called by patches.results

    def read_earlier(self, result: AsyncResult) -> None:
        """Read the states of all tasks before a result together: Celery asks for each next.

        *Raises* `ServerUnavailable`, as Celery's reads would do after that.
        """
        ids = [self.get_key_for_task(task.id) for task in ancestors(result) if task._cache is None]
        self.read_ahead.load(ids, least=2, raises=True)

    # -- waiting

    def await_results(
        self,
        task_ids: Collection[str],
        timeout: float | None = None,
        interval: float | None = 0.5,
        on_message: Callable[[Meta], Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
        before: Collection[str] = (),
    ) -> Generator[tuple[str, Meta]]:
        """Yield `(task id, meta)` of results as they become ready.

        `on_message(meta)` is called for every state that is received, and `on_interval()` every `interval` seconds.
        `before` are the ids of tasks that run before these tasks. Their results are yielded, too, after those that were
        received together with them, but this method does not wait for them. *Raises* `TimeoutError` after `timeout`
        seconds, when all results that are ready were yielded.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        awaited = self.awaited(task_ids, before, on_message)
        found: list[Document] = []
        with _time_limit(timeout), self._outages():
            found = self._read_first(awaited.docs, awaited.ids, timeout)
        mailbox = ResultMailbox()
        try:
            while True:
                for task_id, meta in awaited.take(found):
                    if mailbox.revs:
                        self.subscriber.unwatch(mailbox, [self.get_key_for_task(task_id)])
                    yield task_id, meta
                if awaited.is_over:
                    return
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise TimeoutError('The operation timed out.')
                if not mailbox.revs:
                    ahead = self.read_ahead.to_watch(next(iter(awaited.docs))) if len(awaited.docs) == 1 else ()
                    self.subscriber.watch(mailbox, awaited.ids, ahead)
                elif on_interval is not None:
                    with _time_limit(remaining), self._outages():
                        on_interval()
                pause = interval or 0.5
                found = mailbox.receive(pause if remaining is None else min(remaining, pause))
        finally:
            if mailbox.revs:
                self.subscriber.unwatch(mailbox, mailbox.revs)

    def awaited(
        self,
        task_ids: Collection[str],
        before: Collection[str] = (),
        on_message: Callable[[Meta], Any] | None = None,
    ) -> Awaited:
        """Return what a caller waits for, see `await_results`."""
        return Awaited(self.get_key_for_task, self.decode_document, task_ids, before, on_message)

    def read_now(self, ids: Collection[str]) -> list[Document]:
        """Return the documents with these ids that exist. This takes up to `MIN_TIMEOUT_SECONDS`."""
        with time_limit(MIN_TIMEOUT_SECONDS), self._outages():
            return [doc for doc in self.store.read_many(ids) if doc is not None]
        return []

    def _read_first(self, awaited: set[str], ids: Collection[str], timeout: float | None) -> list[Document]:
        """Return the documents with these `ids` that exist, unless the subscriber delivers them anyway."""
        if len(awaited) != 1:
            return [doc for doc in self.store.read_many(ids) if doc is not None]
        [doc_id] = awaited
        # Before a short timeout, the subscriber might not deliver it in time.
        is_short = timeout is not None and timeout < MIN_TIMEOUT_SECONDS
        if len(ids) == 1 and not is_short and self.subscriber.will_deliver(doc_id, self.read_ahead.sent_ago(doc_id)):
            return []
        docs = [doc := self.read_ahead.read(doc_id)]
        if not is_final(doc or {}):  # earlier tasks matter only if this result is not ready
            docs += self.store.read_many(other for other in ids if other != doc_id)
        return [doc for doc in docs if doc is not None]

    def _check_caller(self) -> None:
        """Raise Celery's error if tasks run eagerly; warn if the caller blocks an event loop."""
        self._ensure_not_eager()
        asyncio = sys.modules.get('asyncio')  # a program that has not imported it runs no loop
        if asyncio is not None and asyncio._get_running_loop() is not None:
            frame, level = sys._getframe(1), 3
            while frame.f_back and frame.f_back.f_globals['__name__'].partition('.')[0] in _LIBRARIES:
                frame, level = frame.f_back, level + 1
            text = 'get() blocks the event loop until the result is there: use `await celery_couchdb.aio.get(result)`'
            warnings.warn(text, RuntimeWarning, level)

    @contextmanager
    def _outages(self) -> Iterator[None]:
        """Survive a server that does not respond if the setting `result_backend_always_retry` says so."""
        try:
            yield
        except RETRIED:
            if not self.always_retry:
                raise


def _time_limit(seconds: float | None) -> AbstractContextManager[None]:
    """Return the time limit of the reads of a caller that waits for up to `seconds`, and at least for one second."""
    return time_limit(None if seconds is None else max(seconds, MIN_TIMEOUT_SECONDS))
