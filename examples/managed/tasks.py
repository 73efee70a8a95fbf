"""The Celery app of the demo of a managed service."""

from __future__ import annotations

import os
import time

from celery import Celery

app = Celery('managed', broker=os.environ['CELERY_BROKER_URL'], backend=os.environ['CELERY_RESULT_BACKEND'])
app.conf.update(
    # A task whose worker is killed runs again.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_transport_options={
        # The password in the URLs is an API key. IBM Cloud's token server is the default.
        'auth': 'iam',
        'token_url': os.environ['TOKEN_URL'],
        # A worker that writes no heartbeat for 10 s loses its tasks to other workers; the default is 60 s.
        'visibility_timeout': 10,
    },
    result_backend_always_retry=True,
    broker_connection_retry_on_startup=True,
)


@app.task
def add(x: int, y: int) -> int:
    """Return the sum of two numbers, after a moment."""
    time.sleep(0.2)
    return x + y
