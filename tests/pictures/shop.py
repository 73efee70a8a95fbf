"""A shop with tasks that succeed, fail, wait and run for long."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_couchdb.limits import LimitedTask

app = Celery('shop', broker=os.environ['PICTURES_BROKER'], backend=os.environ['PICTURES_RESULTS'])
app.conf.update(
    result_extended=True,
    task_acks_late=True,
    worker_prefetch_multiplier=2,
    task_routes={'payments.*': 'payments', 'mail.*': 'mail', 'reports.*': 'reports', 'stock.*': 'stock'},
    timezone='Europe/Berlin',
)


class PaymentDeclined(Exception):
    """The bank refuses a payment."""


@app.task(name='orders.confirm')
def confirm(order: int) -> str:
    return f'order {order} confirmed'


@app.task(name='payments.charge')
def charge(order: int, cents: int) -> int:
    if order % 3 == 0:
        raise PaymentDeclined(f'order {order}: the card has expired')
    if order % 5 == 0:
        raise ConnectionError('bank.example did not respond within 10 s')
    return cents


@app.task(name='mail.send')
def send(to: str, subject: str) -> None:
    if 'invalid' in to:
        raise ValueError(f'{to!r} is no address')


@app.task(name='mail.unsubscribe')
def unsubscribe(to: str) -> None:
    raise Reject('the list of subscribers is locked', requeue=False)


@app.task(name='reports.build')
def build(month: str) -> None:
    """Run until the pictures are made."""
    while not os.path.exists(os.environ['PICTURES_END']):
        time.sleep(0.1)


@app.task(name='stock.sync', base=LimitedTask, concurrency_key='warehouse', concurrency_limit=1)
def sync(shelf: str) -> None:
    while not os.path.exists(os.environ['PICTURES_END']):
        time.sleep(0.1)


def late(minutes: float) -> dict[str, Any]:
    """Return the options of a task that is due in so many minutes."""
    return {'countdown': 60 * minutes}
