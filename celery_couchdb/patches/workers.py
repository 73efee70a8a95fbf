"""Workers: signals of their start and end and of those of tasks, tasks that must not begin, and messages with errors.

Celery sends `worker_ready` and `worker_shutdown` in the `celery` program and for `app.Worker()`, but not for the
fixture `celery_worker` of `celery.contrib.pytest` (seen up to 5.7). Celery could send them in `Consumer.on_ready` and
`Consumer.shutdown`; this module wraps these methods so that the signals are sent.

Only with task events enabled (`-E`) does the main process of a worker tell anybody that a task has ended, and Celery's
signals of tasks are sent in the children of a prefork pool. Celery could send signals from `Request`. The function
`create_request_cls` of `celery.worker.strategy` makes the class of the requests of each task. This module wraps it, so
that its classes send `TASK_STARTED` and `TASK_ENDED` in the main process, whatever class of requests a task has.

Celery (up to 5.7) catches only some of the errors of reading a message: any other ends the worker, which gives its
messages back, and the next worker fails in the same way. With this module such a message becomes a dead letter, and the
worker goes on. Celery could reject the message itself. Two methods are wrapped, for messages of our transport only:
`Consumer.create_task_handler`, whose function receives each message, and `WorkController._process_task`, which gives a
task to the pool, possibly later: at its `eta`, when its rate limit allows, or when a process is free. Errors that say
something about the worker are raised as before. Then the delivery of the message counts as an attempt.

A worker that stops (up to Celery 5.7) keeps the messages of tasks that have not begun until its last task has ended. It
forgets jobs that pool processes have received but not accepted: these run, and their messages go back. With this module
no task begins in a worker that was told to stop, or that has lost the message; `Consumer.stop`, which each shutdown
calls before it waits for tasks, gives the messages back, and the pool waits for the jobs that its processes have.
Celery could do so itself: in `WorkController.stop` and in `AsynPool.flush`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.exceptions import BackendError, TimeLimitExceeded
from celery.utils.dispatch import Signal
from kombu.exceptions import OperationalError

from kombu_couchdb.errors import AccessDenied, CouchDBError, NotCouchDB
from kombu_couchdb.log import get_logger

from . import early_acks, failed_tasks

logger = get_logger(__name__)

_started = Signal(name='worker_started', providing_args=set())
_stopped = Signal(name='worker_stopped', providing_args=set())

#: The signals of which every worker sends one when it has begun to consume, and of those when it has stopped. The
#: sender has the attribute `app`.
READY, SHUTDOWN = (signals.worker_ready, _started), (signals.worker_shutdown, _stopped)

#: A task has begun to run, or a request has ended: once for each, with the request as the sender. `outcome` is one of
#: `OUTCOMES`, and `seconds` how long the task ran; None if it did not run.
TASK_STARTED = Signal(name='couchdb_task_started', providing_args=set())
TASK_ENDED = Signal(name='couchdb_task_ended', providing_args={'outcome', 'seconds'})

#: The connection or the result backend fails, or the worker is out of memory, files or threads. (A `RecursionError` is
#: a `RuntimeError`, too, but it is caused by a message.)
_OF_WORKER = (OSError, MemoryError, RuntimeError, BackendError, OperationalError, AccessDenied, NotCouchDB)


def install() -> None:
    """Complete Celery's methods in a process that starts a worker, perhaps just now. The backend calls this, too."""
    signals.worker_init.connect(_install)
    if 'celery.worker.consumer' in sys.modules:
        _install()


def _install(**_: Any) -> None:
    controller, consumer = (
        import_module('celery.worker').WorkController,
        import_module('celery.worker.consumer').Consumer,
    )
    if not hasattr(consumer.on_ready, '__wrapped__'):
        consumer.on_ready = _reporting(consumer.on_ready, _started)
        consumer.shutdown = _reporting(consumer.shutdown, _stopped)
        consumer.stop = _giving_back(consumer.stop)
        consumer.create_task_handler = _guarding_messages(consumer.create_task_handler)
        controller._process_task = early_acks.asking(_guarding_tasks(controller._process_task), _is_ours)
        early_acks.install()
        pidbox: Any = import_module('celery.worker.pidbox').gPidbox
        pidbox.loop = _in_one_sentence(pidbox.loop)
        strategy: Any = import_module('celery.worker.strategy')
        strategy.create_request_cls = _reporting_tasks(strategy.create_request_cls)


def _reporting(method: Callable[[Any], None], signal: Signal) -> Callable[[Any], None]:
    worker_of_program = import_module('celery.apps.worker').Worker

    @wraps(method)
    def report(consumer: Any) -> None:
        if signal is _stopped:
            consumer.perform_pending_operations()  # Celery 5.4 forgets the last acknowledgements of gevent and eventlet
        is_again = signal is _started and consumer.init_callback is None  # after a reconnect
        method(consumer)
        if not (is_again or isinstance(consumer.controller, worker_of_program)):
            signal.send(sender=consumer)

    return report


# -- the start and the end of tasks


def _reporting_tasks(function: Callable[..., type[Any]]) -> Callable[..., type[Any]]:
    @wraps(function)
    def create_request_cls(base: type[Any], task: Any, pool: Any, *args: Any, **kwargs: Any) -> type[Any]:
        if not pool.uses_semaphore:
            tracing: Any = import_module('celery.app.trace')
            run = tracing.fast_trace_task if task.app.use_fast_trace_task else tracing.trace_task_ret
            kwargs['trace'] = _returning(run)
        return _reporting_class(function(base, task, pool, *args, **kwargs), pool)

    return create_request_cls


def _returning(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Celery's function that runs a task: an error that escapes it is returned as that of the task.

    For example an error in the task's `on_failure`. A process of a prefork pool sends it to the main process; the other
    pools would lose it, and with it the message.
    """

    @wraps(run)
    def trace(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception:
            return ExceptionInfo()

    return trace


def _reporting_class(base: type[Any], pool: Any) -> type[Any]:
    class Request(base):
        couchdb_has_ended = False
        couchdb_failure: dict[str, Any] | None = None
        couchdb_is_kept = False
        couchdb_asks = couchdb_confirms = couchdb_is_confirmed = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if _is_ours(self.message):
                # What Celery finds out when the task begins or ends, or never.
                _, options, workflow = self._payload
                steps = dict(**workflow or {}).get('chain') or ()
                for each in (options, *steps):
                    dict(**each)
                self.message.set_waiting(True)

        def on_accepted(self, pid: int, time_accepted: float) -> None:
            if not early_acks.on_accepted(self):
                _begin(self, pool)
            super().on_accepted(pid, time_accepted)
            TASK_STARTED.send(sender=self)

        def on_success(self, failed__retval__runtime: tuple[bool, Any, float], **kwargs: Any) -> Any:
            if isinstance(failed__retval__runtime, ExceptionInfo):  # in a pool without processes; also `sys.exit`
                return self.on_failure(failed__retval__runtime)
            failed, _, seconds = failed__retval__runtime
            found = super().on_success(failed__retval__runtime, **kwargs)  # calls on_failure if it has failed
            if not failed:
                self.couchdb_end('succeeded', seconds)
            return found

        def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
            outcome = failed_tasks.outcome_of(exc_info.exception)
            try:
                with failed_tasks.keeping(self, outcome, exc_info.exception, exc_info.traceback):
                    return super().on_failure(exc_info, *args, **kwargs)
            finally:
                self.couchdb_end(outcome)

        def on_retry(self, exc_info: Any) -> Any:
            self.couchdb_end('retried')
            return super().on_retry(exc_info)

        def on_timeout(self, soft: bool, timeout: float) -> Any:
            if soft:
                return super().on_timeout(soft, timeout)
            try:
                with failed_tasks.keeping(self, 'failed', TimeLimitExceeded(timeout), ''):
                    return super().on_timeout(soft, timeout)
            finally:
                self.couchdb_end('failed')

        def acknowledge(self) -> Any:
            failed_tasks.note(self)
            return super().acknowledge()

        def reject(self, requeue: bool = False) -> Any:
            if requeue:
                self.couchdb_failure = None
                self.couchdb_end('rejected')
            failed_tasks.note(self)
            return super().reject(requeue=requeue)

        def _success_was_stored(self) -> Any:
            return failed_tasks.unless(self, super()._success_was_stored)

        def _retry_worker_lost(self, *args: Any) -> Any:
            return failed_tasks.unless(self, super()._retry_worker_lost, *args)

        def _announce_revoked(self, *args: Any) -> Any:
            self.couchdb_end('revoked')
            return super()._announce_revoked(*args)

        def _announce_cancelled(self, *args: Any, **kwargs: Any) -> Any:
            self.couchdb_end('retried')
            return super()._announce_cancelled(*args, **kwargs)

        def couchdb_end(self, outcome: str, seconds: float | None = None) -> None:
            if not self.couchdb_has_ended:  # the first call knows best
                self.couchdb_has_ended = True
                if seconds is None and self.time_start is not None:
                    seconds = max(0.0, time.time() - self.time_start)
                TASK_ENDED.send(sender=self, outcome=outcome, seconds=seconds)

    return Request


# -- messages of tasks that have not begun


class _NotBegun(Exception):
    """A task must not begin in this worker."""


def _begin(request: Any, pool: Any) -> None:
    """Note that a task begins; *raise* an error that keeps the pool from running it if it must not begin.

    A process of a prefork pool tells this when it has begun already.
    """
    if not _is_ours(message := request.message):
        return
    if pool.uses_semaphore:
        message.set_waiting(False)
    elif not (_may_begin(request) and message.set_waiting(False)):
        raise import_module('greenlet').GreenletExit if pool.is_green else _NotBegun  # neither is logged


def _may_begin(request: Any) -> bool:
    """Tell whether a task may begin in this worker now: the worker does not stop, and still holds the message."""
    state, message = import_module('celery.worker.state'), request.message
    if early_acks.must_stop():
        return bool(not message.needs_ack)  # `Consumer.stop` gives it back
    if message.is_held():
        return True
    state.task_ready(request)
    logger.info(
        'task %s is not started here: this worker gave its message back, or lost it while it was paused or cut off',
        request.id,
    )
    return False


def _giving_back(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `Consumer.stop`, which each shutdown calls before it waits for the tasks that run."""

    @wraps(method)
    def stop(consumer: Any) -> None:
        channel = getattr(consumer.task_consumer, 'channel', None)
        if channel is None or not issubclass(channel.Message, _message_class()) or channel.connection is None:
            method(consumer)
            return
        pool = getattr(consumer.pool, '_pool', None)
        written = _written_jobs(pool)
        method(consumer)  # cancels the subscriptions: so nothing is claimed in place of what is released
        if number := channel.qos.release_waiting():
            logger.info('this worker stops; tasks that have not begun and go back to their queues: %d', number)
        _keep(pool, written)

    return stop


def _written_jobs(pool: Any) -> dict[Any, Any]:
    """Return the jobs that processes of a prefork pool have received, at least a part of them, and not yet accepted.

    With the functions that write the rest, or None. Such a process runs the job, so its message must not be released.
    """
    asynpool = sys.modules.get('celery.concurrency.asynpool')
    found: dict[Any, Any] = {}
    if asynpool is not None and isinstance(pool, asynpool.AsynPool):
        for job in tuple(pool._cache.values()):
            if not job._accepted and job._write_to is not None and job._write_to._is_alive():
                found[job] = asynpool._get_job_writer(job)
                message: Any = getattr(getattr(job._accept_callback, '__self__', None), 'message', None)
                if _is_ours(message):
                    message.set_waiting(False)
    return found


def _keep(pool: Any, jobs: Mapping[Any, Any]) -> None:
    """Write jobs to their end, and let the pool wait for them: `AsynPool.flush` has forgotten them."""
    asynpool: Any = sys.modules.get('celery.concurrency.asynpool')  # there, if there are jobs
    for job, writer in jobs.items():
        while writer is not None and job._write_to._is_alive():
            # Not `AsynPool._flush_writer`: that of Celery 5.4 never sees that it can write.
            _, writable, _ = asynpool._select(writers={job._write_to.inq._writer}, timeout=0.5)
            try:
                if writable:
                    next(writer)
            except (StopIteration, OSError):
                break
        if not job.ready():
            pool._cache[job._job] = job


# -- messages that cause an error


def _guarding_messages(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def create_task_handler(consumer: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        handle, of_worker = method(consumer, *args, **kwargs), (*consumer.connection_errors, *_OF_WORKER)

        def on_task_received(message: Any) -> Any:
            try:
                return handle(message)
            except Exception as exc:
                if not _is_ours(message) or _is_one_of(exc, of_worker):
                    raise
                _make_dead_letter(message, exc)

        return on_task_received

    return create_task_handler


def _guarding_tasks(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def process_task(worker: Any, request: Any) -> Any:
        message = getattr(request, 'message', None)
        try:
            if _is_ours(message):
                if not (early_acks.is_confirmed(request) or _may_begin(request)):
                    raise _NotBegun
                # The pool adds the time limits to the time when the task has started; an error then ends the worker.
                [time.monotonic() + (limit or 0) for limit in request.time_limits]
            return method(worker, request)
        except _NotBegun:
            if worker.hub and worker.pool.uses_semaphore:
                worker.hub.call_soon(worker._quick_release)  # later: it calls this function again for the next task
        except Exception as exc:
            if not _is_ours(message) or _is_one_of(exc, _OF_WORKER):
                raise
            import_module('celery.worker.state').task_ready(request)
            with suppress(AttributeError):  # only a pool of processes counts its free ones
                worker._quick_release()
            _make_dead_letter(message, exc, is_decided=request.acknowledged)

    return process_task


def _in_one_sentence(method: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap the loop of a greenlet: gevent shows the traceback of an error that ends one."""

    @wraps(method)
    def loop(pidbox: Any, consumer: Any) -> None:
        try:
            method(pidbox, consumer)
        except CouchDBError as exc:
            logger.error('remote control of this worker has ended: %s', exc)

    return loop


def _is_ours(message: Any) -> bool:
    return isinstance(message, _message_class())


def _message_class() -> Any:
    return import_module('kombu_couchdb.transport').Transport.Channel.Message


def _is_one_of(exc: Exception, kinds: tuple[type[BaseException], ...]) -> bool:
    return isinstance(exc, kinds) and not isinstance(exc, RecursionError)


def _make_dead_letter(message: Any, exc: Exception, *, is_decided: bool = False) -> None:
    """Reject a message while its error is handled, unless Celery has already decided about it, perhaps just now."""
    name, reason = message.delivery_tag.rpartition(':')[0], message.reason_for(exc)
    if message.acknowledged or is_decided:
        logger.error('message %s caused an error after it was acknowledged or rejected: %s', name, reason)
    else:
        message.reject()
