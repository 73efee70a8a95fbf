"""A message that causes an error in a worker's own process becomes a dead letter, and the worker goes on.

Celery (up to 5.7) catches only some of the errors of reading a message: any other ends the worker, which gives its
messages back, and the next worker fails in the same way. Celery could reject such a message itself. This module
completes two methods, for messages of our transport only: `Consumer.create_task_handler`, whose function receives each
message, and `WorkController._process_task`, which gives a task to the pool, possibly later: at its `eta`, when its rate
limit allows, or when a process is free.

Errors that say something about the worker are raised as before. Then the delivery of the message counts as an attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery.exceptions import BackendError
from celery.worker import WorkController, state
from celery.worker.consumer import Consumer
from kombu.exceptions import OperationalError

from kombu_couchdb.errors import AccessDenied, NotCouchDB
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport import Transport

logger = get_logger(__name__)

#: The connection or the result backend fails, or the worker is out of memory, files or threads. (A `RecursionError` is
#: a `RuntimeError`, too, but it is caused by a message.)
_OF_WORKER = (OSError, MemoryError, RuntimeError, BackendError, OperationalError, AccessDenied, NotCouchDB)

_Message = Transport.Channel.Message

#: Celery's own methods.
_create_task_handler, _process_task = Consumer.create_task_handler, WorkController._process_task


def _create_guarded_handler(self: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return the function that receives messages."""
    handle, of_worker = _create_task_handler(self, *args, **kwargs), (*self.connection_errors, *_OF_WORKER)

    def on_task_received(message: Any) -> Any:
        try:
            return handle(message)
        except Exception as exc:
            if not isinstance(message, _Message) or _is_one_of(exc, of_worker):
                raise
            _make_dead_letter(message, exc)

    return on_task_received


def _process_guarded(self: Any, request: Any) -> Any:
    """Give a task to the pool."""
    message = getattr(request, 'message', None)
    try:
        if isinstance(message, _Message):
            # The pool adds the time limits to the time when the task has started, and an error then ends the worker.
            [time.monotonic() + (limit or 0) for limit in request.time_limits]
        return _process_task(self, request)
    except Exception as exc:
        if not isinstance(message, _Message) or _is_one_of(exc, _OF_WORKER):
            raise
        state.task_ready(request)
        with suppress(AttributeError):  # only a pool of processes counts its free ones
            self._quick_release()
        _make_dead_letter(message, exc)


def _is_one_of(exc: Exception, kinds: tuple[type[BaseException], ...]) -> bool:
    return isinstance(exc, kinds) and not isinstance(exc, RecursionError)


def _make_dead_letter(message: Any, exc: Exception) -> None:
    """Reject a message while its error is handled, unless Celery has already decided about it."""
    name, reason = message.delivery_tag.rpartition(':')[0], message.reason_for(exc)
    if message.acknowledged:
        logger.error('message %s caused an error after it was acknowledged or rejected: %s', name, reason)
    else:
        message.reject()
        logger.error('message %s was made a dead letter: %s', name, reason)


def install() -> None:
    """Replace Celery's methods in a process that starts a worker; see `lifecycle`."""
    Consumer.create_task_handler, WorkController._process_task = _create_guarded_handler, _process_guarded
