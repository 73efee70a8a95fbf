"""Send the tasks of the tutorial and print their results: `python send.py`."""

from __future__ import annotations

from celery import chain, chord
from shop import add, app, charge, price, reindex, remind, total

from celery_couchdb.jobs import Jobs


def send_one() -> None:
    """Send a task and wait for its result."""
    result = add.delay(2, 3)
    print('2 + 3 =', result.get(timeout=60))


def retry() -> None:
    """Send a task that is retried until it succeeds."""
    print(charge.delay(7).get(timeout=60))


def plan() -> None:
    """Send a task that is due in an hour, then remove it."""
    later = remind.apply_async(('Zoë',), countdown=3600)
    jobs = Jobs(app)
    print('the reminder is', jobs.state(later.id))
    jobs.remove(later.id)
    print('the reminder is', jobs.state(later.id))


def combine() -> None:
    """Send a chord and a chain."""
    prices = [price.s(product) for product in range(1, 11)]
    print('the total is', chord(prices, total.s())().get(timeout=60))
    print('1 + 2 + 3 =', chain(add.s(1, 2), add.s(3))().get(timeout=60))


def send_twice() -> None:
    """Send the same unique job twice. Only one message is in the queue."""
    first = reindex.apply_async((42,), job_key='customer-42', countdown=3600)
    second = reindex.apply_async((42,), job_key='customer-42', countdown=1800)
    print(f'the first was {first.outcome}, the second {second.outcome}')
    Jobs(app).remove(second.id)


if __name__ == '__main__':
    send_one()
    retry()
    plan()
    combine()
    send_twice()
