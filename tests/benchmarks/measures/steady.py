"""Measure: what a task costs while tasks are sent at a steady rate, run and collected.

The requests are counted in the client: those of the publisher, of the worker and its children, and of the program that
waits for the results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

from celery import Celery
from celery.result import AsyncResult

from .. import sending
from ..cases import Case, Figure, NotMeasured
from ..counting import counting, recorded
from ..processes import Spent
from ..sizes import Size
from ..systems import System
from ..worker import app_of, working

__all__ = ['TITLE', 'cases']

TITLE = 'Requests and writes for each task at a steady rate'
#: Tasks are sent at this rate, per second, this many together.
_RATE, _TOGETHER = 300.0, 10
_PATIENCE = 300.0
#: How long the worker may still write after the last result, in seconds.
_REST = 0.5


def cases(size: Size) -> Iterator[Case]:
    """Yield the one case."""
    figures = (
        Figure('tasks/s', name='collected'),
        *(
            Figure('requests', False, f'requests, {part}')
            for part in ('publisher', 'worker', 'waiting program', 'all together')
        ),
        Figure('writes', False, 'writes'),
        Figure('ms', False, 'CPU of the server'),
    )
    label = f'{_RATE:g} tasks/s, {_TOGETHER} at a time, prefork 2'
    yield Case('steady', label, figures, partial(cost, int(size.steady * _RATE)), size.long_rounds)


def cost(tasks: int, system: System) -> Sequence[float | None]:
    """Return tasks per second, and per task the requests of each part, the writes, and CPU milliseconds."""
    with system.place() as place, TemporaryDirectory() as folder:
        if place.raw:
            raise NotMeasured('no Celery')
        app, file = app_of(place), Path(folder) / 'requests'
        try:
            with working(place, app, requests=file):
                before, spent = recorded(file), Spent(system.host, system.port)
                with counting(database_of(place.broker)) as sent, counting(database_of(place.backend)) as waited:
                    rate = send_and_collect(app, tasks)
                time.sleep(_REST)
                after, used = recorded(file), spent.milliseconds()
        finally:
            app.close()
    values: list[float | None] = [None] * 5
    worker = after.requests - before.requests
    if worker:  # it uses HTTP
        parts = [sent.requests, worker, waited.requests]
        writes = sent.writes + waited.writes + after.writes - before.writes
        values = [number / tasks for number in (*parts, sum(parts), writes)]
    return [rate, *values, None if used is None else used / tasks]


def send_and_collect(app: Celery, tasks: int) -> float:
    """Send tasks at the rate while another thread collects their results; return the collected tasks per second."""
    waiting: SimpleQueue[AsyncResult] = SimpleQueue()

    def publish() -> None:
        due = time.monotonic()
        for start in range(0, tasks, _TOGETHER):
            time.sleep(max(0.0, due - time.monotonic()))
            numbers = range(start, min(tasks, start + _TOGETHER))
            for result in sending.send(app, 'add', ((number, 1) for number in numbers)):
                waiting.put(result)
            due += _TOGETHER / _RATE

    publisher = threading.Thread(target=publish, daemon=True)
    started = time.monotonic()
    publisher.start()
    for number in range(tasks):
        if waiting.get(timeout=_PATIENCE).get(timeout=_PATIENCE) != number + 1:
            raise ValueError('a result is wrong')
    ended = time.monotonic()
    publisher.join()
    return tasks / (ended - started)


def database_of(url: str | None) -> str:
    """Return the path of a URL without its slash, which is the name of the database."""
    return unquote(urlsplit(url or '').path).lstrip('/')
