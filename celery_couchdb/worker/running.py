"""The tasks that a worker runs, for the heartbeats of its consumer: see `kombu_couchdb.consumer.report`.

Celery's own list in the worker's main process is read, which all pools keep.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from celery.worker import state

from kombu_couchdb.consumer.worker_hooks import RunningTask, report_running

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
