"""Many tasks from a Celery app: one by one, or in a batch if the broker supports batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery import Celery
from celery.result import AsyncResult

__all__ = ['in_batches', 'send']


def in_batches(app: Celery) -> bool:
    """Return whether the app's broker supports many tasks in one request; kombu before 5.7 does not."""
    with app.producer_pool.acquire(block=True) as producer:
        return bool(getattr(producer, 'supports_batch_publish', False))


def send(app: Celery, name: str, arguments: Iterable[tuple[Any, ...]], **options: Any) -> list[AsyncResult]:
    """Send a task for each of the arguments, in a batch if possible, and return their results."""
    if not in_batches(app):
        return [app.send_task(name, args, **options) for args in arguments]
    with app.producer_pool.acquire(block=True) as producer, producer.batch():
        # kombu cannot retry single messages of a batch.
        return [app.send_task(name, args, producer=producer, retry=False, **options) for args in arguments]
