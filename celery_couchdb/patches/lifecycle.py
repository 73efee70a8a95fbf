"""The start and the end of a worker that does not report them, such as one in a thread of tests.

Celery sends `worker_ready` and `worker_shutdown` in the `celery` program and for `app.Worker()`, but not for the
fixture `celery_worker` of `celery.contrib.pytest` (seen up to 5.7). Celery could send them in `Consumer.on_ready` and
`Consumer.shutdown`, which this module completes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from celery import signals
from celery.utils.dispatch import Signal

_started = Signal(name='worker_started', providing_args=set())
_stopped = Signal(name='worker_stopped', providing_args=set())

#: The signals of which every worker sends one when it has begun to consume, and of those when it has stopped. The
#: sender has the attribute `app`.
READY, SHUTDOWN = (signals.worker_ready, _started), (signals.worker_shutdown, _stopped)


def install() -> None:
    """Complete Celery's methods in a process that starts a worker, perhaps just now. The backend calls this, too."""
    signals.worker_init.connect(_install)
    if 'celery.worker.consumer' in sys.modules:
        _install()


def _install(**_: Any) -> None:
    import_module('celery_couchdb.patches.message_errors').install()
    consumer = import_module('celery.worker.consumer').Consumer
    if not hasattr(consumer.on_ready, '__wrapped__'):
        consumer.on_ready = _reporting(consumer.on_ready, _started)
        consumer.shutdown = _reporting(consumer.shutdown, _stopped)


def _reporting(method: Callable[[Any], None], signal: Signal) -> Callable[[Any], None]:
    worker_of_program = import_module('celery.apps.worker').Worker

    @wraps(method)
    def report(consumer: Any) -> None:
        is_again = signal is _started and consumer.init_callback is None  # after a reconnect
        method(consumer)
        if not (is_again or isinstance(consumer.controller, worker_of_program)):
            signal.send(sender=consumer)

    return report
