"""The pool of a worker and the tasks that it runs, for the heartbeats of its consumer.

Celery's own list in the worker's main process is read, which all pools keep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from celery import signals
from celery.worker import state

from kombu_couchdb.consumer.worker_hooks import RunningTask, report_member, report_running

#: How often Celery's list is read while other threads change it.
_MAX_TRIES = 10


def install(app: Any) -> None:
    """Let the heartbeats of this process tell which tasks it runs, if they are those of a worker of `app`."""
    own = os.getpid()

    def running(queues: Collection[str]) -> list[RunningTask] | None:
        # A child of a pool has a copy of its parent's list.
        if os.getpid() != own or not any(queue in app.amqp.queues.consume_from for queue in queues):
            return None
        return [found for request in _active() if (found := _described(request))]

    report_running(running)
    report_member('pool', lambda: _pool(own))


@signals.worker_ready.connect
def _on_worker_ready(sender: Any = None, **_: Any) -> None:
    """Note the pool of the worker, and when it was ready."""
    _ready[:] = [(sender.pool, round(time.time(), 3))]


#: The worker's pool, and since when it runs; nothing before that.
_ready = list[tuple[Any, float]]()


def _pool(own: int) -> dict[str, Any] | None:
    """Return what the heartbeats of the process `own` say of its pool."""
    if os.getpid() != own or not _ready:
        return None
    [(pool, since)] = _ready
    name = type(pool).__module__.rpartition('.')[2]
    versions = [f'{package} {version(package)}' for package in ('celery', 'celery-couchdb')]
    with suppress(AttributeError):  # Celery's pool of processes has none any more when it has ended
        return {'name': name, 'processes': pool.num_processes, 'since': since, 'versions': versions}
    return None


def delivery_info(request: Any) -> dict[str, Any]:
    """Return what the transport says of a request's delivery."""
    found = (request.request_dict.get('properties') or {}).get('delivery_info')
    return found if isinstance(found, dict) else {}


def _active() -> list[Any]:
    for _ in range(_MAX_TRIES):
        try:
            return list(state.active_requests)
        except RuntimeError:  # another thread has begun or ended a task
            continue
    return []


def _described(request: Any) -> RunningTask | None:
    queue, since = delivery_info(request).get('queue'), request.time_start
    if not isinstance(queue, str) or since is None:
        return None
    return RunningTask(request.id, request.type, queue, since, not request.acknowledged)
