"""A whole Celery job: tasks are sent, a real worker runs them, and their results are collected."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from .. import sending
from ..cases import Case, Figure, NotMeasured
from ..sizes import Size
from ..systems import System
from ..worker import app_of, working

__all__ = ['TITLE', 'cases']

TITLE = 'A whole Celery job'
_PATIENCE = 300.0
#: The number of children of the cases that stand for all.
_FEW = 2


def cases(size: Size) -> Iterator[Case]:
    """Yield the cases: sent one by one, and in a batch; and in a batch for more children."""
    figures = (Figure('tasks/s', name='sent'), Figure('tasks/s', name='sent, run and collected'))
    for together, concurrency in ((False, 2), (True, 2), (True, 8)):
        label = f'{size.tasks:,} tasks{" in a batch" if together else ""}, prefork {concurrency}'
        yield Case(
            'job',
            label,
            figures,
            partial(job, size.tasks, together, concurrency),
            rounds=size.long_rounds,
            headline=concurrency == _FEW,
        )


def job(tasks: int, together: bool, concurrency: int, system: System) -> Sequence[float]:
    """Return how many tasks a second were sent, and how many went all the way, broker and results of the same kind."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        app = app_of(place)
        try:
            if together and not sending.in_batches(app):
                raise NotMeasured('kombu publishes no batches there')
            with working(place, app, concurrency):
                started = time.monotonic()
                if together:
                    results = sending.send(app, 'add', ((number, 1) for number in range(tasks)))
                else:
                    results = [app.send_task('add', (number, 1)) for number in range(tasks)]
                sent = time.monotonic()
                for number, result in enumerate(results):
                    if result.get(timeout=_PATIENCE) != number + 1:
                        raise ValueError('a wrong result was collected')
                done = time.monotonic()
        finally:
            app.close()
    return [tasks / (sent - started), tasks / (done - started)]
