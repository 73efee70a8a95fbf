"""A shop in FastAPI: `uvicorn shop:web` serves it, and `celery -A shop worker` runs its tasks."""

from __future__ import annotations

import os
from typing import Annotated, Any

from celery import Celery
from celery.exceptions import TimeoutError
from fastapi import FastAPI, Query
from pydantic import BaseModel

app = Celery(
    'shop',
    broker=os.environ.get('CELERY_BROKER_URL', 'couchdb://user:password@localhost:5984/celery'),
    backend=os.environ.get('CELERY_RESULT_BACKEND', 'couchdb://user:password@localhost:5984/celery_results'),
)
web = FastAPI()


@app.task
def invoice(amounts: list[float]) -> dict[str, float]:
    """Return what is to be paid."""
    net = sum(amounts)
    return {'net': net, 'gross': net * 1.25}


class Order(BaseModel):
    """What a customer wants to have an invoice for."""

    amounts: list[float]


# Sending a task and waiting for its result block. In functions without `async` FastAPI has them do so in threads of theirs.


@web.post('/invoices', status_code=202)
def order_invoice(order: Order) -> dict[str, str]:
    """Have an invoice made."""
    return {'id': invoice.delay(order.amounts).id}


@web.get('/invoices/{task_id}')
def show_invoice(task_id: str, wait: Annotated[float, Query(ge=0, le=30)] = 0) -> dict[str, Any]:
    """Tell how far an invoice is; with `wait`, as soon as it is there, or after so many seconds."""
    result = invoice.AsyncResult(task_id)
    if wait:
        try:
            result.get(timeout=wait, propagate=False)
        except TimeoutError:
            pass
    return {'state': result.state, 'invoice': result.result if result.successful() else None}
