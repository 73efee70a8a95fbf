"""The results that a caller of `get` awaits, and those of the tasks before them. No I/O.

The callers are threads, see `mixin`, and coroutines, see `celery_couchdb.aio`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from celery import states

from ..results.documents import Document

if TYPE_CHECKING:
    from celery.result import AsyncResult, ResultSet

Meta = dict[str, Any]


class Awaited:
    """The documents of results that are not ready, and of results `before` them, for which nobody waits.

    `key_of` returns the document id of a task's result. `decode` returns the meta-data in a document.
    """

    def __init__(
        self,
        key_of: Callable[[str], str],
        decode: Callable[[Document], Meta],
        task_ids: Collection[str],
        before: Collection[str] = (),
        on_message: Callable[[Meta], Any] | None = None,
    ) -> None:
        """`on_message(meta)` is called for every state that is received of an awaited result."""
        self._decode, self._on_message = decode, on_message
        #: The ids of the documents for which the caller waits.
        self.docs = {key_of(task_id) for task_id in task_ids}
        #: By document id: the ids of the tasks whose results are not ready.
        self.ids = {key_of(task_id): task_id for task_id in (*task_ids, *before)}

    @property
    def is_over(self) -> bool:
        """Whether all awaited results are ready."""
        return self.ids.keys().isdisjoint(self.docs)

    def take(self, docs: Iterable[Document]) -> Iterator[tuple[str, Meta]]:
        """Yield `(task id, meta)` of the results among `docs`, those of tasks before the awaited ones last."""
        for doc in sorted(docs, key=lambda doc: doc['_id'] not in self.docs):
            if doc['_id'] not in self.ids:
                continue
            meta = self._decode(doc)
            if self._on_message is not None and doc['_id'] in self.docs:
                self._on_message(meta)
            if meta['status'] in states.READY_STATES:
                yield self.ids.pop(doc['_id']), meta


class AwaitedSet:
    """The results in a set that are not ready, and those of the tasks before the set and before its nested sets.

    If a task before a set fails, the set is never sent. Its unfinished results have that failure.
    `fulfil(result, meta)` sets the outcome of a result and calls its callbacks.
    """

    def __init__(self, results: ResultSet, fulfil: Callable[[AsyncResult, Meta], None]) -> None:
        self._set, self._fulfil = results, fulfil
        self._own = {id(node) for node in results.results or ()}
        self._failed: dict[str, Meta] = {}
        #: By task id: the results that are not ready.
        self.waiting: dict[str, list[AsyncResult]] = {}
        for node in tasks_in(results):
            if not node._cache:
                self.waiting.setdefault(node.id, []).append(node)
        #: By task id: the results of the tasks before the set.
        self.before = {task.id: task for task in _tasks_before(results)} if self.waiting else {}

    def known(self) -> Iterator[tuple[str, Meta]]:
        """Yield `(id, meta)` of the results in the set that are ready already; not those in nested sets."""
        for node in self._set.results or ():
            if getattr(node, '_cache', None):
                yield node.id, node._cache

    def take(self, task_id: str, meta: Meta) -> Iterator[tuple[str, Meta]]:
        """Fulfil the results of a task, and yield those in the set like `known`."""
        for node in self.waiting.get(task_id, ()):
            self._fulfil(node, meta)
            if id(node) in self._own:
                yield task_id, node._cache
        if task_id in self.before and meta['status'] in states.PROPAGATE_STATES:
            self._fulfil(self.before[task_id], meta)
            self._failed |= dict.fromkeys(_never_sent(self._set, task_id), self.before[task_id]._cache)

    @property
    def is_over(self) -> bool:
        """Whether all results are ready, or will never be because of a failure."""
        nodes = (node for nodes in self.waiting.values() for node in nodes)
        return bool(self._failed) and all(node._cache or node.id in self._failed for node in nodes)

    def rest(self) -> Iterator[tuple[str, Any]]:
        """At the end, yield `(id, children)` of nested sets, and `(id, meta)` of what was never sent."""
        for node in self._set.results or ():
            never_sent = (task for task in tasks_in(node) if task.id in self._failed and not task._cache)
            failure = next((self._failed[task.id] for task in never_sent), None)
            if failure is not None:
                yield node.id, failure
            elif not hasattr(node, '_cache'):
                yield node.id, node.children


def tasks_in(result: AsyncResult | ResultSet) -> Iterator[AsyncResult]:
    """Yield the results of the tasks in a set and in its nested sets; or the result itself if it is no set."""
    if getattr(result, 'results', None) is None:
        yield result
    else:
        for node in result.results:
            yield from tasks_in(node)


def ancestors(result: AsyncResult | ResultSet) -> Iterator[AsyncResult]:
    """Yield the results of the tasks before a result in its chain, the earliest first."""
    for parent in reversed(list(_parents(result))):
        yield from tasks_in(parent)


def _parents(result: AsyncResult | ResultSet) -> Iterator[AsyncResult | ResultSet]:
    parent = result.parent
    while parent is not None:
        yield parent
        parent = getattr(parent, 'parent', None)


def _tasks_before(result: AsyncResult | ResultSet) -> Iterator[AsyncResult]:
    """Yield the results of the tasks that run before a set or one of its nested sets, the earliest first.

    If one of them fails, the set is never sent, and no result is stored for its tasks. After a failure before a single
    task, Celery stores a result for that task.
    """
    if getattr(result, 'results', None) is None:
        return
    yield from ancestors(result)
    for node in result.results:
        yield from _tasks_before(node)


def _never_sent(result: AsyncResult | ResultSet, failed: str) -> Iterator[str]:
    """Yield the ids of the tasks in the sets that are never sent because the task `failed` has failed."""
    if getattr(result, 'results', None) is None:
        return
    if any(task.id == failed for task in ancestors(result)):
        yield from (task.id for task in tasks_in(result))
    else:
        for node in result.results:
            yield from _never_sent(node, failed)
