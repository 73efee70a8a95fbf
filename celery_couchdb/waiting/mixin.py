"""Waiting for results, as a mixin of the backend: `AsyncResult.get`, `ResultSet.join`, `iter_native` and `then`.

In Celery's own mixin, one of the waiting threads at a time reads from a connection. Here a separate thread reads, see
`subscriber`, and delivers documents to the mailbox of each waiting thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import TimeoutError

from kombu_couchdb.couchdb.bounds import time_limit
from kombu_couchdb.errors import RETRIED

from ..results.documents import Document, is_final
from ..results.result_store import ResultStore
from .callbacks import Callbacks, groups_of
from .read_ahead import ReadAhead
from .subscriber import Subscriber
from .watched import ResultMailbox

if TYPE_CHECKING:
    from celery.result import AsyncResult, ResultSet


Meta = dict[str, Any]

#: The least time between two checks for failures of earlier tasks in a chain, in seconds for each of these tasks.
_PAUSE_PER_ANCESTOR_SECONDS = 0.005

#: Before the timeout of a shorter wait, in seconds, the document is read, even if the subscriber watches it.
_MIN_TIMEOUT_SECONDS = 1.0


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
        self._ensure_not_eager()
        # In each interval Celery reads the states of all earlier results, in case one has failed. That is seldom
        # useful, because then this result fails, too. So the interval is longer if there are more earlier results.
        ancestors = list(_ancestors(result))
        pause = max(interval or 0.5, _PAUSE_PER_ANCESTOR_SECONDS * len(ancestors))
        on_interval = on_interval and partial(self._on_interval, on_interval, ancestors)
        before = {task.id: task for group in groups_of(result) for task in _ancestors(group)}
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
        self._ensure_not_eager()
        waiting: dict[str, list[AsyncResult]] = {}
        for node in tasks_in(result):
            if not node._cache:
                waiting.setdefault(node.id, []).append(node)
        own = {id(node) for node in result.results or ()}
        for node in result.results or ():
            if getattr(node, '_cache', None):
                yield node.id, node._cache
        before = {parent.id: parent for parent in _tasks_before(result)} if waiting else {}
        failed: dict[str, Meta] = {}
        with closing(self.await_results(waiting, timeout, interval, on_message, on_interval, before)) as found:
            for task_id, meta in found:
                for node in waiting.get(task_id, ()):
                    self.callbacks.fulfil(node, meta)
                    if id(node) in own:
                        yield task_id, node._cache
                if task_id in before and meta['status'] in states.PROPAGATE_STATES:
                    self.callbacks.fulfil(before[task_id], meta)
                    failed |= dict.fromkeys(_never_sent(result, task_id), before[task_id]._cache)
                if failed and all(node._cache or node.id in failed for nodes in waiting.values() for node in nodes):
                    break
        # These results have no document, and are yielded so that the caller does not wait for them.
        for node in result.results or ():
            failure = next((failed[task.id] for task in tasks_in(node) if task.id in failed and not task._cache), None)
            if failure is not None:
                yield node.id, failure
            elif not hasattr(node, '_cache'):
                yield node.id, node.children

    def add_pending_result(self, result: AsyncResult, weak: bool | None = None) -> AsyncResult:
        """Call the callbacks of a result when it is ready."""
        # AsyncResult.then passes `weak`. AsyncResult.get does not, and then waits itself.
        if weak is not None:
            self.callbacks.add(result)
        return result

    def remove_pending_result(self, result: Any) -> Any:
        """Do nothing: deleted and fulfilled results are noticed. Destructors call this at any time."""
        return result

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
        awaited = {self.get_key_for_task(task_id) for task_id in task_ids}
        ids = {self.get_key_for_task(task_id): task_id for task_id in (*task_ids, *before)}
        found: list[Document] = []
        with _time_limit(timeout), self._outages():
            found = self._read_first(awaited, ids, timeout)
        mailbox = ResultMailbox()
        try:
            while True:
                found.sort(key=lambda doc: doc['_id'] not in awaited)
                for doc in found:
                    if doc['_id'] not in ids:
                        continue
                    meta = self.decode_document(doc)
                    if on_message is not None and doc['_id'] in awaited:
                        on_message(meta)
                    if meta['status'] in states.READY_STATES:
                        if mailbox.revs:
                            self.subscriber.unwatch(mailbox, [doc['_id']])
                        yield ids.pop(doc['_id']), meta
                if ids.keys().isdisjoint(awaited):
                    return
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise TimeoutError('The operation timed out.')
                if not mailbox.revs:
                    ahead = self.read_ahead.to_watch(next(iter(awaited))) if len(awaited) == 1 else ()
                    self.subscriber.watch(mailbox, ids, ahead)
                elif on_interval is not None:
                    with _time_limit(remaining), self._outages():
                        on_interval()
                pause = interval or 0.5
                found = mailbox.receive(pause if remaining is None else min(remaining, pause))
        finally:
            if mailbox.revs:
                self.subscriber.unwatch(mailbox, mailbox.revs)

    def _read_first(self, awaited: set[str], ids: Collection[str], timeout: float | None) -> list[Document]:
        """Return the documents with these `ids` that exist, unless the subscriber delivers them anyway."""
        if len(awaited) != 1:
            return [doc for doc in self.store.read_many(ids) if doc is not None]
        [doc_id] = awaited
        # Before a short timeout, the subscriber might not deliver it in time.
        is_short = timeout is not None and timeout < _MIN_TIMEOUT_SECONDS
        if len(ids) == 1 and not is_short and self.subscriber.will_deliver(doc_id, self.read_ahead.sent_ago(doc_id)):
            return []
        docs = [doc := self.read_ahead.read(doc_id)]
        if not is_final(doc or {}):  # earlier tasks matter only if this result is not ready
            docs += self.store.read_many(other for other in ids if other != doc_id)
        return [doc for doc in docs if doc is not None]

    @contextmanager
    def _outages(self) -> Iterator[None]:
        """Survive a server that does not respond if the setting `result_backend_always_retry` says so."""
        try:
            yield
        except RETRIED:
            if not self.always_retry:
                raise

    def _on_interval(self, on_interval: Callable[[], Any], ancestors: Collection[AsyncResult]) -> None:
        """Read the unfinished earlier results together, and let Celery check them."""
        self.read_ahead.load([self.get_key_for_task(task.id) for task in ancestors if task._cache is None])
        on_interval()


def _time_limit(seconds: float | None) -> AbstractContextManager[None]:
    """Return the time limit of the reads of a caller that waits for up to `seconds`, and at least for one second."""
    return time_limit(None if seconds is None else max(seconds, _MIN_TIMEOUT_SECONDS))


def _ancestors(result: AsyncResult | ResultSet) -> Iterator[AsyncResult]:
    """Yield the results of the tasks before a result in its chain, the earliest first."""
    for parent in reversed(list(_parents(result))):
        yield from tasks_in(parent)


def _parents(result: AsyncResult | ResultSet) -> Iterator[AsyncResult | ResultSet]:
    parent = result.parent
    while parent is not None:
        yield parent
        parent = getattr(parent, 'parent', None)


def tasks_in(result: AsyncResult | ResultSet) -> Iterator[AsyncResult]:
    """Yield the results of the tasks in a set and in its nested sets; or the result itself if it is no set."""
    if getattr(result, 'results', None) is None:
        yield result
    else:
        for node in result.results:
            yield from tasks_in(node)


def _tasks_before(result: AsyncResult | ResultSet) -> Iterator[AsyncResult]:
    """Yield the results of the tasks that run before a set or one of its nested sets, the earliest first.

    If one of them fails, the set is never sent, and no result is stored for its tasks. After a failure before a single
    task, Celery stores a result for that task.
    """
    if getattr(result, 'results', None) is None:
        return
    yield from _ancestors(result)
    for node in result.results:
        yield from _tasks_before(node)


def _never_sent(result: AsyncResult | ResultSet, failed: str) -> Iterator[str]:
    """Yield the ids of the tasks in the sets that are never sent because the task `failed` has failed."""
    if getattr(result, 'results', None) is None:
        return
    if any(task.id == failed for task in _ancestors(result)):
        yield from (task.id for task in tasks_in(result))
    else:
        for node in result.results:
            yield from _never_sent(node, failed)
