"""Measure: store results as a worker does, get them one by one as a caller does, and wait for one that is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from .. import loops, peers, raw
from ..cases import Case, Figure, NotMeasured
from ..figures import percentile
from ..sizes import Size
from ..systems import Place, System
from ..worker import app_of

__all__ = ['TITLE', 'cases']

TITLE = 'Store and get results'
#: The first results are not counted: connections and changes feeds are still being opened.
_FIRST = 3


def cases(size: Size) -> Iterator[Case]:
    """Yield the cases: many results, and a single one that a program waits for."""
    figures = (Figure('results/s', name='store'), Figure('results/s', name='get'))
    yield Case('results', '200 B', figures, partial(store_and_get, size.results), headline=True)
    pushed = (Figure('ms', False, 'from its storing, p50'), Figure('ms', False, 'since it is stored, p50'))
    yield Case('results', 'push of a single result', pushed, partial(push, size.probes))


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


def push(number: int, system: System) -> Sequence[float]:
    """Return the median time until a program that waits for a result has it, in milliseconds.

    The first figure is the time since the other process called `store_result`, the second the time since that returned.
    The second is negative if the result arrives before the confirmation of its storage.
    """
    if not system.keeps_results:
        raise NotMeasured('its results are messages to the sender')
    with system.place() as place:
        if place.raw:
            raise NotMeasured('its loop does not wait for results')
        app = app_of(place)
        arrived: list[float] = []
        with peers.storing(place) as (store, times):
            for task_id in (str(uuid4()) for _ in range(_FIRST + number)):
                result = app.AsyncResult(task_id)
                store(task_id)
                result.get(timeout=60)
                arrived.append(time.time())
            called, stored = zip(*times(), strict=True)
        app.close()
    return [
        percentile([end - start for start, end in zip(starts, arrived, strict=True)][_FIRST:], 0.5) * 1000
        for starts in (called, stored)
    ]


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
