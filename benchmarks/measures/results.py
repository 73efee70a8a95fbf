"""Measure: store results as a worker does, and get them one by one as a caller does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from .. import loops, raw
from ..cases import Case, Figure, NotMeasured
from ..sizes import Size
from ..systems import Place, System
from ..worker import app_of

__all__ = ['TITLE', 'cases']

TITLE = 'Store and get results'


def cases(size: Size) -> Iterator[Case]:
    """Yield the one case."""
    figures = (Figure('results/s', name='store'), Figure('results/s', name='get'))
    yield Case('results', '200 B', figures, partial(store_and_get, size.results), headline=True)


def store_and_get(number: int, system: System) -> Sequence[float]:
    """Return the results per second that are stored, and that are read."""
    if not system.keeps_results:
        raise NotMeasured('its results are messages to the sender')
    with system.place() as place:
        value, ids = loops.body_of(200), [str(uuid4()) for _ in range(number + 1)]
        store, get, close = _raw(place) if place.raw else _celery(place)
        store(ids[0], value)  # what the first result creates is created now
        get(ids.pop(0))
        started = time.monotonic()
        for task_id in ids:
            store(task_id, value)
        stored = time.monotonic()
        for task_id in ids:
            get(task_id)
        got = time.monotonic()
        close()
    return [number / (stored - started), number / (got - stored)]


def _celery(place: Place) -> tuple[Any, Any, Any]:
    app = app_of(place)

    def store(task_id: str, value: Any) -> None:
        app.backend.store_result(task_id, value, 'SUCCESS')

    def get(task_id: str) -> Any:
        return app.AsyncResult(task_id).get(timeout=60)

    return store, get, app.close


def _raw(place: Place) -> tuple[Any, Any, Any]:
    database = raw.Database(place.broker)

    def store(task_id: str, value: Any) -> None:
        database.request('PUT', f'/{task_id}', json={'type': 'Result', 'status': 'SUCCESS', 'value': {'result': value}})

    def get(task_id: str) -> Any:
        return database.request('GET', f'/{task_id}')

    return store, get, database.session.close
