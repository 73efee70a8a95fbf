"""A Celery app on CouchDB, as an example: `celery -A examples.tasks worker -l INFO`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery import Celery

app = Celery(
    'examples',
    broker=os.environ.get('CELERY_BROKER_URL', 'couchdb://user:password@localhost:5984/celery'),
    backend=os.environ.get('CELERY_RESULT_BACKEND', 'couchdb://user:password@localhost:5984/celery_results'),
)
app.conf.update(
    # A message is acknowledged when its task has ended, so that the task is delivered again if its worker ends, …
    task_acks_late=True,
    # … or only the process that runs the task.
    task_reject_on_worker_lost=True,
    # A worker that writes no heartbeat for 6 s loses its tasks to other workers; the default is 60 s.
    broker_transport_options={'visibility_timeout': 6},
    # How many seconds a worker waits for the result of a killed pool process; the default is 10.
    worker_lost_wait=1.0,
    # While the server does not respond, storing a result is retried without end.
    result_backend_always_retry=True,
    broker_connection_retry_on_startup=True,
)


@app.task
def add(x: int, y: int) -> int:
    """Return the sum of two numbers."""
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    """Return the sum of many numbers."""
    return sum(numbers)


@app.task(bind=True, max_retries=10)
def flaky(self: Any, succeeds_at: int) -> int:
    """Fail and be retried 1 s later until the try `succeeds_at`."""
    tries: int = self.request.retries + 1
    if tries < succeeds_at:
        raise self.retry(countdown=1)
    return tries


@app.task
def remember(when: float) -> float:
    """Return how many seconds after `when` the task runs."""
    return time.time() - when


@app.task(bind=True)
def crash(self: Any) -> str:
    """Kill the process that runs the task, as the kernel does when memory runs out. A second delivery succeeds."""
    if not self.request.delivery_info['redelivered']:
        os.kill(os.getpid(), signal.SIGKILL)
    return 'survived'


@app.task(bind=True)
def work_long(self: Any, seconds: float) -> str:
    """Work for a long time, in which the worker is killed. A second delivery returns at once."""
    if not self.request.delivery_info['redelivered']:
        time.sleep(seconds)
    return 'done'
