"""A whole Celery job: tasks are sent, a real worker runs them, and their results are collected."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from ..cases import Case, Figure, NotMeasured
from ..sizes import Size
from ..systems import System
from ..worker import app_of, working

__all__ = ['TITLE', 'cases']

TITLE = 'A whole Celery job'
_PATIENCE = 300.0


def cases(size: Size) -> Iterator[Case]:
    """Yield the one case."""
    figures = (Figure('tasks/s', name='sent'), Figure('tasks/s', name='sent, run and collected'))
    yield Case('job', f'{size.tasks:,} tasks, prefork 2', figures, partial(job, size.tasks), rounds=size.long_rounds)


def job(tasks: int, system: System) -> Sequence[float]:
    """Return how many tasks a second were sent, and how many went all the way, broker and results of the same kind."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        app = app_of(place)
        try:
            with working(place, app):
                started = time.monotonic()
                results = [app.send_task('add', (number, 1)) for number in range(tasks)]
                sent = time.monotonic()
                for number, result in enumerate(results):
                    if result.get(timeout=_PATIENCE) != number + 1:
                        raise ValueError('a wrong result was collected')
                done = time.monotonic()
        finally:
            app.close()
    return [tasks / (sent - started), tasks / (done - started)]
