"""The shop of the guide: an app and its tasks. `celery -A shop worker` runs them."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_couchdb.unique import UniqueTask

app = Celery(
    'shop',
    broker=os.environ.get('CELERY_BROKER_URL', 'couchdb://user:password@localhost:5984/celery'),
    backend=os.environ.get('CELERY_RESULT_BACKEND', 'couchdb://user:password@localhost:5984/celery_results'),
)
app.conf.update(
    # A message is acknowledged when its task has ended, so that it comes back if its worker dies, …
    task_acks_late=True,
    # … or only the process of the pool that runs it.
    task_reject_on_worker_lost=True,
    # While the server is away a result is stored again and again, and not given up.
    result_backend_always_retry=True,
    # A worker that is started before the server waits for it.
    broker_connection_retry_on_startup=True,
)


@app.task
def add(x: int, y: int) -> int:
    """Return the sum of two numbers."""
    return x + y


@app.task(bind=True, max_retries=5)
def charge(self: Any, order: int) -> str:
    """Charge an order. The bank does not answer at once: it is tried again, and later each time."""
    if self.request.retries < 2:
        raise self.retry(countdown=2**self.request.retries)
    return f'order {order} is paid, at try {self.request.retries + 1}'


@app.task
def remind(customer: str) -> str:
    """Remind a customer of what is in the basket."""
    return f'{customer} was reminded'


@app.task
def price(product: int) -> int:
    """Return the price of a product."""
    return 10 * product


@app.task
def total(prices: list[int]) -> int:
    """Return what all cost together."""
    return sum(prices)


@app.task(base=UniqueTask)
def reindex(customer: int) -> None:
    """Make what can be searched of a customer anew."""
