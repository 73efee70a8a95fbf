"""Send tasks and wait for their results in coroutines, without blocking the event loop::

    from celery_couchdb import aio

    result = await aio.delay(add, 2, 3)
    assert await aio.get(result, timeout=10) == 5

    async for result, value in aio.as_completed(results):
        total += value

Waiting needs no thread: all coroutines and threads of a process share one subscriber to the results. Tasks are sent by
a few threads. Any event loop of asyncio works, also several in one process. :doc:`/howto/asyncio` has examples.

These functions wait for results that `celery_couchdb` stores, and send tasks to any broker. Whoever cancels a coroutine
that waits stops waiting; whoever cancels one that sends cannot know whether the task was sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from math import inf
from typing import Any

import celery
from celery import states
from celery._state import _set_current_app, _tls, get_current_worker_task, pop_current_task, push_current_task
from celery.exceptions import TimeoutError
from celery.result import AsyncResult, EagerResult, GroupResult, ResultSet, assert_will_not_block

from kombu_couchdb.couchdb.fork_safety import reset_in_child
from kombu_couchdb.errors import RETRIED, ConfigurationError, CouchDBError

from .backend import CouchDBBackend
from .results.documents import Document
from .waiting.awaited import Awaited, AwaitedSet, Meta, ancestors, tasks_in
from .waiting.callbacks import groups_of
from .waiting.mixin import MIN_TIMEOUT_SECONDS
from .waiting.subscriber import Subscriber
from .waiting.watched import ResultMailbox

__all__ = ['apply_async', 'as_completed', 'delay', 'get', 'group']

#: The threads that send tasks. Each needs a connection from Celery's pool, which has 10 (`broker_pool_limit`).
_THREADS = 8


# -- sending


async def delay(task: Any, *args: Any, **kwargs: Any) -> Any:
    """Send a task or a signature with these arguments and return its result, as `task.delay(…)` does."""
    return await _in_thread(task.delay, *args, **kwargs)


async def apply_async(task: Any, *args: Any, **options: Any) -> Any:
    """Send a task, or a signature such as a chain, group or chord, as `task.apply_async(…)` does.

    The parameters are those of Celery's method, and so are the returned result and the errors.
    """
    return await _in_thread(task.apply_async, *args, **options)


async def group(*tasks: Any, **options: Any) -> GroupResult:
    """Send a group of signatures, given one by one or as one iterable, and return its `GroupResult`.

    `options` are those of `apply_async`.
    """
    found: GroupResult = await _in_thread(lambda: celery.group(*tasks).apply_async(**options))
    return found


# -- waiting


async def get(
    result: AsyncResult | ResultSet,
    timeout: float | None = None,
    propagate: bool = True,
    *,
    follow_parents: bool = True,
    on_message: Callable[[Meta], Any] | None = None,
    disable_sync_subtasks: bool = True,
) -> Any:
    """Wait until a result is ready and return its value; of a group or another set, the list of all values.

    The parameters, values and errors are those of Celery's `result.get()`; `timeout` is in seconds. While CouchDB does
    not respond, the coroutine goes on waiting. Without a `timeout`, that may be for ever.

    *Raises* the exception of the task if it has failed and `propagate` is true, or that of a task before it in its
    chain, unless `follow_parents` is false; `celery.exceptions.TimeoutError`; and `ConfigurationError` if the result is
    in another result backend.
    """
    if isinstance(result, AsyncResult) and result.ignored:
        return None
    if disable_sync_subtasks:
        assert_will_not_block()
    if all(isinstance(node, EagerResult) for node in tasks_in(result)):  # also for an empty set
        return result.get(propagate=propagate, disable_sync_subtasks=disable_sync_subtasks)
    if isinstance(result, AsyncResult):
        return await _get_one(result, timeout, propagate, follow_parents, on_message)
    return await _get_set(result, timeout, propagate, on_message)


async def as_completed(
    results: Iterable[AsyncResult | ResultSet], timeout: float | None = None, propagate: bool = True
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield each result with its value, the first that is ready first: `async for result, value in …`.

    `results` is a set of results, such as a `GroupResult`, or any iterable of results and sets. `timeout` is for all of
    them together, in seconds.

    *Raises* the errors of `get`, which end the iteration. With `propagate=False`, the value of a failed task is its
    exception.
    """
    ready: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
    waits: dict[asyncio.Task[Any], AsyncResult | ResultSet] = {}
    try:
        for result in results:
            wait = asyncio.ensure_future(get(result, timeout, propagate))
            waits[wait] = result
            wait.add_done_callback(ready.put_nowait)
        for _ in range(len(waits)):
            wait = await ready.get()
            yield waits[wait], wait.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _get_one(
    result: AsyncResult,
    timeout: float | None,
    propagate: bool,
    follow_parents: bool,
    on_message: Callable[[Meta], Any] | None,
) -> Any:
    parents = {task.id: task for task in ancestors(result)} if propagate and follow_parents else {}
    before = {task.id: task for group in groups_of(result) for task in ancestors(group)} | parents

    def take(task_id: str, meta: Meta) -> bool:
        backend.callbacks.fulfil(before.get(task_id, result), meta)
        return meta['status'] in states.PROPAGATE_STATES

    if result._cache is None:
        backend = _backend_of(result)
        await _wait(backend, backend.awaited([result.id], before, on_message), timeout, take)
    if result._cache is None or _has_failed(result):
        for task in (before if result._cache is None else parents).values():
            if _has_failed(task):
                return task.maybe_throw(propagate=propagate)
    return result.maybe_throw(propagate=propagate)


def _has_failed(result: AsyncResult) -> bool:
    return result._cache is not None and result._cache['status'] in states.PROPAGATE_STATES


async def _get_set(
    result: ResultSet, timeout: float | None, propagate: bool, on_message: Callable[[Meta], Any] | None
) -> list[Any]:
    backend = _backend_of(result)
    awaited = AwaitedSet(result, backend.callbacks.fulfil)
    values = dict[str, Any]()

    def note(found: Iterable[tuple[str, Any]]) -> None:
        for task_id, meta in found:
            values[task_id] = meta if isinstance(meta, list) else meta['result']
            if propagate and not isinstance(meta, list) and meta['status'] in states.PROPAGATE_STATES:
                raise meta['result']

    def take(task_id: str, meta: Meta) -> bool:
        note(awaited.take(task_id, meta))
        return awaited.is_over

    note(awaited.known())
    await _wait(backend, backend.awaited(awaited.waiting, awaited.before, on_message), timeout, take)
    note(awaited.rest())
    for node in result.results:
        if isinstance(values[node.id], list) and not hasattr(node, '_cache'):
            values[node.id] = [await get(child, propagate=propagate, disable_sync_subtasks=False) for child in node]
    return [values[node.id] for node in result.results]


async def _wait(
    backend: CouchDBBackend, awaited: Awaited, timeout: float | None, take: Callable[[str, Meta], bool]
) -> None:
    """Pass results to `take(task_id, meta)` until all awaited ones are ready or it returns true, because of a failure.

    After a failure all results are read that are stored: an earlier task may have caused it, and others may have ended.
    """
    loop = _process.running_loop()
    deadline = inf if timeout is None else loop.loop.time() + timeout
    # Before a short timeout, the subscriber might not deliver what is there.
    found = await _read(backend, awaited) if timeout is not None and timeout < MIN_TIMEOUT_SECONDS else []
    mailbox = _Mailbox(loop, backend.subscriber)
    try:
        while True:
            taken = [take(*result) for result in awaited.take(found)]
            if awaited.is_over or any(taken):
                break
            if loop.loop.time() >= deadline:
                raise TimeoutError('The operation timed out.')
            if not mailbox.revs:
                backend.subscriber.watch(mailbox, awaited.ids)
            found = await mailbox.next(deadline)
    finally:
        mailbox.close()
    if any(taken) and awaited.ids:
        with suppress(TimeoutError, *RETRIED):
            for result in awaited.take(await _read(backend, awaited)):
                take(*result)


async def _read(backend: CouchDBBackend, awaited: Awaited) -> list[Document]:
    """Return the documents that exist, read in a thread; *raises* `TimeoutError` after `MIN_TIMEOUT_SECONDS`."""
    try:
        # Not all threads may be free.
        return await asyncio.wait_for(_in_thread(backend.read_now, list(awaited.ids)), MIN_TIMEOUT_SECONDS)
    except asyncio.TimeoutError:
        raise TimeoutError('The operation timed out.') from None


class _Mailbox(ResultMailbox):
    """Documents for one waiting coroutine."""

    def __init__(self, loop: _Loop, subscriber: Subscriber) -> None:
        super().__init__()
        self._loop, self._subscriber = loop, subscriber
        self._arrival: asyncio.Future[None] | None = None
        loop.mailboxes.add(self)

    async def next(self, deadline: float) -> list[Document]:
        """Return the delivered documents, waiting for the first until `deadline` by the clock of the loop.

        *Raises* an error that was delivered instead.
        """
        if self._items.empty():
            self._arrival = self._loop.loop.create_future()
            timer = self._loop.loop.call_at(deadline, self.wake) if deadline < inf else None
            try:
                await self._arrival
            finally:
                if timer is not None:
                    timer.cancel()
        return self.receive(0)

    def wake(self) -> None:
        """Let `next` continue."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def close(self) -> None:
        """Watch nothing any more."""
        self._subscriber.unwatch(self, self.revs)
        self._loop.mailboxes.discard(self)

    def _put(self, item: Document | CouchDBError | None) -> None:
        super()._put(item)
        self._loop.tell(self)


class _Loop:
    """Wakes the coroutines of one event loop: all for which something arrives before the loop runs, with one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        #: Of the coroutines that wait.
        self.mailboxes: set[_Mailbox] = set()
        self._arrived: deque[_Mailbox] = deque()
        self._is_told = False

    def tell(self, mailbox: _Mailbox) -> None:
        """Wake the coroutine of a mailbox. Any thread may call this."""
        self._arrived.append(mailbox)
        if not self._is_told:
            self._is_told = True
            try:
                self.loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop was closed while coroutines wait
                self.close()

    def _wake(self) -> None:
        self._is_told = False  # before the mailboxes are processed, so that none is missed
        while self._arrived:
            self._arrived.popleft().wake()

    def close(self) -> None:
        """Watch nothing for this loop any more."""
        for mailbox in list(self.mailboxes):
            mailbox.close()


class _Process:
    """The event loops of this process in which coroutines have waited, and the threads that send tasks."""

    def __init__(self) -> None:
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Start over in a forked child: loops and threads belong to the parent process."""
        self.threads = ThreadPoolExecutor(_THREADS, 'celery-couchdb-aio')
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}

    def running_loop(self) -> _Loop:
        """Return the object for the loop that runs in this thread."""
        for loop in list(self._loops):
            if loop.is_closed() and (closed := self._loops.pop(loop, None)) is not None:
                closed.close()
        running = asyncio.get_running_loop()
        return self._loops.setdefault(running, _Loop(running))


_process = _Process()


async def _in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread, with the context variables, the current app and the current task of the caller."""
    app, task = _tls.current_app, get_current_worker_task()
    request = task and task.request

    def run() -> Any:
        _set_current_app(app)
        if task is None:
            return call(*args, **kwargs)
        push_current_task(task)
        task.request_stack.push(request)
        try:
            return call(*args, **kwargs)
        finally:
            task.request_stack.pop()
            pop_current_task()

    return await asyncio.get_running_loop().run_in_executor(_process.threads, partial(copy_context().run, run))


def _backend_of(result: AsyncResult | ResultSet) -> CouchDBBackend:
    backend = result.backend
    if not isinstance(backend, CouchDBBackend):
        raise ConfigurationError(
            f'celery_couchdb.aio cannot wait for results in {type(backend).__name__}: set result_backend to couchdb://…'
        )
    backend._ensure_not_eager()
    return backend
