"""The waiting half of the backend: `AsyncResult.get`, `ResultSet.join`, `iter_native` and `then`.

Celery has a mixin for this, whose waiting threads take turns in reading a connection. Here a thread of its own reads, see
`subscriber`, and a waiting thread waits for nothing but its mailbox.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import TimeoutError

from kombu_couchdb.errors import RETRIED

from ..results.documents import Document, is_final
from ..results.store import Store
from .callbacks import Callbacks, groups_of
from .read_ahead import ReadAhead
from .subscriber import Subscriber, Waiter

if TYPE_CHECKING:
    from celery.result import AsyncResult, ResultSet

__all__ = ['PushMixin', 'tasks_in']

Meta = dict[str, Any]

#: The least time between two looks for failures before the result that `get` waits for, in seconds for each of them.
_PARENT = 0.005


class PushMixin:
    """The waiting half of a backend. `store`, `subscriber`, `callbacks` and `read_ahead` are the other half's to make."""

    store: Store
    subscriber: Subscriber
    callbacks: Callbacks
    read_ahead: ReadAhead
    is_async = True

    if TYPE_CHECKING:  # Celery's base class has these
        _ensure_not_eager: Callable[[], None]
        always_retry: bool
        get_key_for_task: Callable[[str], str]
        decode_document: Callable[[Document], Meta]

    # -- called by celery.app

    def on_task_call(self, producer: Any, task_id: str) -> dict[str, Any]:
        """Note that a task is being sent whose result may be asked for; return what is to be sent with it: nothing."""
        if isinstance(task_id, str):  # else Celery says later what it thinks of it
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
        """Wait until a result is ready and return its value; *raises* its exception if `propagate`, or `TimeoutError`."""
        self._ensure_not_eager()
        # What Celery does in each interval is to read the states of all results before this one, in case one has failed.
        # That is seldom news, for then this one fails, too: the more there are, the less often it is done.
        pause = max(interval or 0.5, _PARENT * sum(1 for _ in _ancestors(result)))
        before = {task.id: task for group in groups_of(result) for task in _ancestors(group)}
        for task_id, meta in self.await_results([result.id], timeout, pause, on_message, on_interval, before):
            if task_id in before:
                if meta['status'] in states.PROPAGATE_STATES:
                    self.callbacks.fulfil(before[task_id], meta)  # the group is never sent
                    error = before[task_id].maybe_throw(propagate=propagate)
                    if callback is not None:
                        callback(result.id, error)
                    return error
                continue
            self.callbacks.fulfil(result, meta)
            if propagate and on_interval is not None and meta['status'] in states.PROPAGATE_STATES:
                on_interval()  # a failure before this one is what it comes from: Celery raises that instead
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
        """Yield `(id, meta)` of the results in a set as they become ready, `(id, children)` of a set within the set.

        If a task before the set fails the set is never sent: each result that is not ready then has that task's failure.
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
        # Whoever asks these for their values need not wait any more.
        for node in result.results or ():
            lost = next((failed[task.id] for task in tasks_in(node) if task.id in failed and not task._cache), None)
            if lost is not None:
                yield node.id, lost
            elif not hasattr(node, '_cache'):
                yield node.id, node.children

    def add_pending_result(self, result: AsyncResult, weak: bool | None = None) -> AsyncResult:
        """Have the callbacks of a result called when it is ready."""
        # AsyncResult.then says whether the reference may be weak. AsyncResult.get does not, and waits by itself next.
        if weak is not None:
            self.callbacks.add(result)
        return result

    def remove_pending_result(self, result: Any) -> Any:
        """Let go of a result. It is called by destructors, too, and so in the midst of anything: it takes no lock."""
        self.callbacks.remove(result)
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

        `on_message(meta)` is called with every state that is seen, `on_interval()` every `interval` seconds. *Raises*
        `TimeoutError` after `timeout` seconds, but not before all that is ready was yielded. `before` are the ids of tasks that
        run before these: their results are yielded as well, after others that came with them, but are not waited for.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        awaited = {self.get_key_for_task(task_id) for task_id in task_ids}
        ids = {self.get_key_for_task(task_id): task_id for task_id in (*task_ids, *before)}
        found: list[Document | None] = []
        try:
            if len(awaited) == 1:  # the tasks before it matter only if it is not ready
                found = [doc := self.read_ahead.read(next(iter(awaited)))]
                if before and not is_final(doc or {}):
                    found += self.store.read_many(self.get_key_for_task(task_id) for task_id in before)
            else:
                found = self.store.read_many(ids)
        except RETRIED:
            if not self.always_retry:
                raise
        waiter: Waiter | None = None
        try:
            while True:
                for doc in (
                    sorted(found, key=lambda doc: doc is not None and doc['_id'] not in awaited) if before else found
                ):
                    if doc is None or doc['_id'] not in ids:
                        continue
                    meta = self.decode_document(doc)
                    if on_message is not None and doc['_id'] in awaited:
                        on_message(meta)
                    if meta['status'] in states.READY_STATES:
                        if waiter is not None:
                            self.subscriber.drop(waiter, [doc['_id']])
                        yield ids.pop(doc['_id']), meta
                if ids.keys().isdisjoint(awaited):
                    return
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError('The operation timed out.')
                if waiter is None:
                    waiter = Waiter()
                    self.subscriber.watch(waiter, ids)
                elif on_interval is not None:
                    on_interval()
                found = [*waiter.take(min(left if left is not None else interval or 0.5, interval or 0.5))]
        finally:
            if waiter is not None:
                self.subscriber.drop(waiter, ids)


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
    """Yield the results of tasks in a set and in the sets within."""
    if getattr(result, 'results', None) is None:
        yield result
    else:
        for node in result.results:
            yield from tasks_in(node)


def _tasks_before(result: AsyncResult | ResultSet) -> Iterator[AsyncResult]:
    """Yield the results of tasks that run before a set, or before one within it, the earliest first.

    If one of them fails the set is never sent, and nobody stores results for its tasks. Celery does that for a single task.
    """
    if getattr(result, 'results', None) is None:
        return
    yield from _ancestors(result)
    for node in result.results:
        yield from _tasks_before(node)


def _never_sent(result: AsyncResult | ResultSet, failed: str) -> Iterator[str]:
    """Yield the ids of the tasks in those sets that are never sent because the task `failed` has failed."""
    if getattr(result, 'results', None) is None:
        return
    if any(task.id == failed for task in _ancestors(result)):
        yield from (task.id for task in tasks_in(result))
    else:
        for node in result.results:
            yield from _never_sent(node, failed)
