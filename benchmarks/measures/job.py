"""Measure: send tasks, run them in a Celery worker, and collect their results."""

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
#: The pool size of the headline cases.
_FEW = 2


def cases(size: Size) -> Iterator[Case]:
    """Yield the cases: tasks sent one by one, in a batch, and in a batch to a larger pool."""
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
    """Return the tasks per second that were sent, and that were sent, run and collected."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        app = app_of(place)
        try:
            if together and not sending.in_batches(app):
                raise NotMeasured('kombu has no batches for it')
            with working(place, app, concurrency):
                started = time.monotonic()
                if together:
                    results = sending.send(app, 'add', ((number, 1) for number in range(tasks)))
                else:
                    results = [app.send_task('add', (number, 1)) for number in range(tasks)]
                sent = time.monotonic()
                for number, result in enumerate(results):
                    if result.get(timeout=_PATIENCE) != number + 1:
                        raise ValueError('a result is wrong')
                done = time.monotonic()
        finally:
            app.close()
    return [tasks / (sent - started), tasks / (done - started)]
