"""Tasks that are sent by the clock: `celery -A shop beat` sends them, and `celery -A shop worker` runs them."""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab

from celery_couchdb.unique import UniqueTask

app = Celery(
    'shop',
    broker=os.environ.get('CELERY_BROKER_URL', 'couchdb://user:password@localhost:5984/celery'),
    backend=os.environ.get('CELERY_RESULT_BACKEND', 'couchdb://user:password@localhost:5984/celery_results'),
)
app.conf.beat_schedule = {
    'look for orders': {
        'task': 'shop.look_for_orders',
        'schedule': 1.0,
        # While no worker takes it, one is enough.
        'options': {'job_key': 'look for orders'},
    },
    'close the books': {
        'task': 'shop.close_the_books',
        'schedule': crontab(hour='3', minute='30'),
        # Who comes too late for the night shall not do it by day.
        'options': {'expires': 3600},
    },
}


@app.task(base=UniqueTask)
def look_for_orders() -> None:
    """See whether there are new orders."""


@app.task
def close_the_books() -> None:
    """Add up what was sold in a day."""
