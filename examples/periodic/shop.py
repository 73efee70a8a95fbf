"""Periodic tasks: `celery -A shop beat -S couchdb` sends them, a worker runs them."""

from __future__ import annotations

from celery import Celery
from celery.schedules import crontab

from celery_couchdb.unique import UniqueTask

app = Celery(
    'shop',
    broker='couchdb://user:password@localhost:5984/celery',
    backend='couchdb://user:password@localhost:5984/celery_results',
)
app.conf.beat_schedule = {
    'look for orders': {
        'task': 'shop.look_for_orders',
        'schedule': 1.0,
        # While one message waits, another one is not enqueued.
        'options': {'job_key': 'look for orders'},
    },
    'close the books': {
        'task': 'shop.close_the_books',
        'schedule': crontab(hour='3', minute='30'),
        # If no worker runs the task within an hour, it is skipped.
        'options': {'expires': 3600},
    },
}


@app.task(base=UniqueTask)
def look_for_orders() -> None:
    """Look for new orders."""


@app.task
def close_the_books() -> None:
    """Add up the sales of a day."""
