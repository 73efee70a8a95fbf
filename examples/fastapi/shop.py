"""A shop in FastAPI. Start it with `uvicorn shop:web` and `celery -A shop worker`."""

from __future__ import annotations

from typing import Annotated, Any

from celery import Celery
from celery.exceptions import TimeoutError
from fastapi import FastAPI, Query
from pydantic import BaseModel

from celery_couchdb.web import create_app

app = Celery(
    'shop',
    broker='couchdb://user:password@localhost:5984/celery',
    backend='couchdb://user:password@localhost:5984/celery_results',
)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    result_backend_always_retry=True,
    broker_connection_retry_on_startup=True,
)
web = FastAPI()
# The page of Celery's queues is at /celery/. You log in as a CouchDB user.
web.mount('/celery', create_app(app))

Seconds = Annotated[float, Query(ge=0, le=30)]


@app.task
def invoice(amounts: list[float]) -> dict[str, float]:
    """Return the net and the gross amount of an invoice."""
    net = sum(amounts)
    return {'net': net, 'gross': net * 1.25}


class Order(BaseModel):
    """The amounts on an invoice."""

    amounts: list[float]


# Sending a task and waiting for a result block the thread. FastAPI runs functions
# without `async` in a pool of threads, so that they do not block other requests.


@web.post('/invoices', status_code=202)
def order_invoice(order: Order) -> dict[str, str]:
    """Send the task that makes the invoice."""
    return {'id': invoice.delay(order.amounts).id}


@web.get('/invoices/{task_id}')
def show_invoice(task_id: str, wait: Seconds = 0) -> dict[str, Any]:
    """Return the state of the task and the invoice, after at most `wait` seconds."""
    result = invoice.AsyncResult(task_id)
    if wait:
        try:
            result.get(timeout=wait, propagate=False)
        except TimeoutError:
            pass
    ready = result.successful()
    return {'state': result.state, 'invoice': result.result if ready else None}
