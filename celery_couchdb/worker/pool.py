"""A function in the pool of a worker: where tasks run, with what their processes have opened, but without a message.

Celery gives a pool nothing but tasks. The pool of processes accepts any function. There, a semaphore counts the free
processes, and tasks wait for it: such a function is the first to get a process (up to Celery 5.7, the list of those who
wait is private). A function in the solo pool runs in its loop, between two tasks, and in a pool of threads or greenlets
in one more thread, because those pools have one queue, in which it would wait for all tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool

from kombu_couchdb.log import get_logger

logger = get_logger(__name__)


def run_in_pool(consumer: Any, function: Callable[..., None], *args: Any) -> None:
    """Run a function soon in the pool of a worker; any thread may call this. The time limits of all tasks apply.

    If the worker stops before, the function is not run. `consumer` is the worker's; a pool of processes needs a
    function that can be pickled, with its arguments.
    """
    controller, pool = consumer.controller, consumer.pool
    semaphore = getattr(controller, 'semaphore', None)
    if pool.uses_semaphore:
        submit = partial(_submit, pool, consumer.app.conf, function, args)
        if semaphore is None:  # without an event loop, it waits for a free process
            threading.Thread(target=submit, daemon=True).start()
        else:
            _call_soon(consumer, partial(_in_front, semaphore, submit))
    elif isinstance(pool, SoloPool) and consumer.hub is not None:
        _call_soon(consumer, partial(function, *args))
    else:
        threading.Thread(target=function, args=args, daemon=True).start()


def _call_soon(consumer: Any, function: Callable[[], Any]) -> None:
    """Let the loop of a worker call a function. Our own transport wakes the loop; older versions of kombu do not."""
    connection = getattr(getattr(consumer.task_consumer, 'channel', None), 'connection', None)
    getattr(connection, 'call_soon', consumer.hub.call_soon)(function)


def _in_front(semaphore: Any, submit: Callable[[], Any]) -> None:
    if not semaphore.acquire(submit):
        semaphore._waiting.rotate(1)


def _submit(pool: Any, conf: Any, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    pool.apply_async(
        function,
        args,
        soft_timeout=conf.task_soft_time_limit,
        timeout=conf.task_time_limit,
        timeout_callback=_log_timeout,
    )


def _log_timeout(soft: bool, seconds: float) -> None:
    if not soft:
        logger.error('the completion of a chord was ended, because it took %s seconds', seconds)
