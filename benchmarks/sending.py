"""Many tasks sent by a Celery app: one by one, or together where the broker takes batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery import Celery
from celery.result import AsyncResult

__all__ = ['in_batches', 'send']


def in_batches(app: Celery) -> bool:
    """Tell whether the app's broker takes many tasks in one request; kombu before 5.7 has no such thing."""
    with app.producer_pool.acquire(block=True) as producer:
        return bool(getattr(producer, 'supports_batch_publish', False))


def send(app: Celery, name: str, arguments: Iterable[tuple[Any, ...]], **options: Any) -> list[AsyncResult]:
    """Send a task for each of the arguments, together if that can be, and return their results."""
    if not in_batches(app):
        return [app.send_task(name, args, **options) for args in arguments]
    with app.producer_pool.acquire(block=True) as producer, producer.batch():
        # A batch is tried once: kombu refuses to try single messages of it again.
        return [app.send_task(name, args, producer=producer, retry=False, **options) for args in arguments]
