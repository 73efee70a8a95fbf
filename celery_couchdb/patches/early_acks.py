"""Tasks that are acknowledged early: whether one may begin now.

Celery acknowledges such a task when it has begun, and the broker stores that a moment later. If the worker is killed
between, the task runs again. Celery could ask the transport before a task begins. This module does: a task waits while
CouchDB does not store the acks of those before it, and with the transport option `confirm_acks` until its own ack is
stored. If its message went to another worker meanwhile, the task does not begin here. `consumer.unacked` decides that.

With a prefork pool a task begins in another process, so the main process gives it to the pool when it may begin. That
happens when a process is free, and not before: a task that was acknowledged and has not begun is lost with its worker.
With the other pools, what runs the task waits itself. And Celery lets the event loop acknowledge a task that begins in
a thread; here the thread does it. `patches.workers` installs this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any
from weakref import WeakSet

#: How often a task that waits looks whether the worker is told to stop, in seconds.
_CHECK_SECONDS = 0.1

#: The requests that waited, or wait, before they are given to a prefork pool, and that it has not accepted yet.
_beginning: WeakSet[Any] = WeakSet()


def install() -> None:
    """Let a warm shutdown wait for the tasks that are acknowledged and have not begun: nobody else would run them."""
    state: Any = import_module('celery.worker.state')
    state.maybe_shutdown = _when_begun(state.maybe_shutdown)


def asking(method: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return `WorkController._process_task` with the question whether a task that is acknowledged early may begin."""

    @wraps(method)
    def process_task(worker: Any, request: Any) -> Any:
        message: Any = getattr(request, 'message', None)
        has_our_class = hasattr(request, 'couchdb_asks')  # a strategy of the application may use another one
        if not (is_ours(message) and has_our_class) or request.task.acks_late:
            return method(worker, request)
        if (transport := message.channel.connection) is None:
            return method(worker, request)  # the connection was lost, and the message with it: it does not begin
        request.couchdb_confirms = transport.options.confirm_acks
        request._on_ack = message.ack_log_error  # at once, in the thread that begins the task
        request.couchdb_asks = not worker.pool.uses_semaphore
        if request.couchdb_asks:
            return method(worker, request)
        if must_stop():
            return None  # `Consumer.stop` gives its message back
        begin = partial(_begin, method, worker, request)
        may_begin = transport.unacked.begin(
            message.delivery_tag, lambda may_begin: transport.call_soon(partial(begin, may_begin))
        )
        if may_begin is None:
            _beginning.add(request)
            return None
        return begin(may_begin)

    return process_task


def is_confirmed(request: Any) -> bool:
    """Tell whether the ack of a task that has not begun is stored: the task must run here, whatever happens."""
    return bool(getattr(request, 'couchdb_is_confirmed', False))


def on_accepted(request: Any) -> bool:
    """Note that the pool begins a task; wait until it may begin, if the caller runs it. Return `is_confirmed`.

    If the task must not begin, its message is not held any more: `patches.workers` asks for that.
    """
    _beginning.discard(request)
    if not request.couchdb_asks or must_stop() or request.message.channel.connection is None:
        return is_confirmed(request)
    unacked, tag = request.message.channel.unacked, request.message.delivery_tag
    decided, answers = threading.Event(), list[bool]()

    def decide(may_begin: bool) -> None:
        answers.append(may_begin)
        decided.set()

    if (may_begin := unacked.begin(tag, decide)) is None:
        while not decided.wait(_CHECK_SECONDS):
            if must_stop() and unacked.withdraw(tag):
                return False
        may_begin = answers[0]
    return _note(request, may_begin)


def _note(request: Any, may_begin: bool) -> bool:
    request.couchdb_is_confirmed = may_begin and request.couchdb_confirms
    return is_confirmed(request)


def _begin(method: Callable[..., Any], worker: Any, request: Any, may_begin: bool) -> Any:
    """Give a task to the prefork pool; `method` ends its request if it must not begin."""
    if not may_begin:
        _beginning.discard(request)
    _note(request, may_begin)
    return method(worker, request)


def must_stop() -> bool:
    """Tell whether this worker was told to stop, at once or after the tasks that run."""
    state = import_module('celery.worker.state')
    return any(value is not None and value is not False for value in (state.should_stop, state.should_terminate))


def _when_begun(method: Callable[[], None]) -> Callable[[], None]:
    @wraps(method)
    def maybe_shutdown() -> None:
        state = import_module('celery.worker.state')
        if _beginning and must_stop() and state.should_terminate in (None, False):
            for request in list(_beginning):
                message = request.message
                # A request that has ended, because its task was revoked, is not reserved any more.
                is_reserved = request in state.reserved_requests and message.channel.connection is not None
                if not is_reserved or message.channel.unacked.withdraw(message.delivery_tag):
                    _beginning.discard(request)
            if _beginning:
                return
        method()

    return maybe_shutdown
