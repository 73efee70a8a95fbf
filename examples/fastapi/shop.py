"""A shop in FastAPI. Start it with `uvicorn shop:web` and `celery -A shop worker -l INFO`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from celery import Celery
from celery.exceptions import TimeoutError
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from kombu.exceptions import OperationalError
from pydantic import BaseModel

from celery_couchdb import aio
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


@web.post('/invoices', status_code=202)
async def order_invoice(order: Order) -> dict[str, str]:
    """Send the task that makes the invoice."""
    result = await asyncio.wait_for(aio.delay(invoice, order.amounts), timeout=10)
    return {'id': result.id}


@web.exception_handler(OperationalError)
@web.exception_handler(asyncio.TimeoutError)
async def unavailable(request: Request, error: Exception) -> JSONResponse:
    """Ask the client to try again: CouchDB does not respond."""
    return JSONResponse({'detail': 'try again later'}, status_code=503)


@web.get('/invoices/{task_id}')
async def show_invoice(task_id: str, wait: Seconds = 0) -> dict[str, Any]:
    """Return the state of the task and the invoice, after at most `wait` seconds."""
    result = invoice.AsyncResult(task_id)
    try:
        await aio.get(result, timeout=wait, propagate=False)
    except TimeoutError:
        return {'state': 'PENDING', 'invoice': None}
    # The result is known now: these attributes need no request to CouchDB.
    ready = result.successful()
    return {'state': result.state, 'invoice': result.result if ready else None}
