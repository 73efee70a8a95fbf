"""The Celery app of the tutorial. `celery -A shop worker -l INFO` runs its tasks."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_couchdb.unique import UniqueTask

app = Celery(
    'shop',
    broker='couchdb://user:password@localhost:5984/celery',
    backend='couchdb://user:password@localhost:5984/celery_results',
)
app.conf.update(
    # Acknowledge a message when its task has ended. If the worker is killed while the
    # task runs, the task runs again.
    task_acks_late=True,
    # Do the same if only the pool process that runs the task is killed.
    task_reject_on_worker_lost=True,
    # While CouchDB is unavailable, retry to store a result until it is stored.
    result_backend_always_retry=True,
    # A worker that starts while CouchDB is unavailable waits for it.
    broker_connection_retry_on_startup=True,
)


@app.task
def add(x: int, y: int) -> int:
    """Return the sum of two numbers."""
    return x + y


@app.task(bind=True, max_retries=5)
def charge(self: Any, order: int) -> str:
    """Charge an order. The bank fails twice; each retry waits longer."""
    if self.request.retries < 2:
        raise self.retry(countdown=2**self.request.retries)
    return f'order {order} is paid after {self.request.retries} retries'


@app.task
def remind(customer: str) -> str:
    """Remind a customer of the articles in the basket."""
    return f'{customer} was reminded'


@app.task
def price(product: int) -> int:
    """Return the price of a product."""
    return 10 * product


@app.task
def total(prices: list[int]) -> int:
    """Return the sum of some prices."""
    return sum(prices)


@app.task(base=UniqueTask)
def reindex(customer: int) -> None:
    """Build the search index of a customer again."""
