"""Measure: the memory of a worker while tasks are scheduled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from .. import sending
from ..cases import Case, Figure, NotMeasured
from ..processes import memory_of
from ..sizes import Size
from ..systems import System
from ..worker import app_of, working

__all__ = ['TITLE', 'cases']

TITLE = "A worker's memory while tasks wait for their time"
#: When the tasks are due, in seconds: after the end of the benchmark.
_LATER = 86_400
#: How many tasks are sent at a time.
_PART = 10_000


def cases(size: Size) -> Iterator[Case]:
    """Yield the one case."""
    figures = (Figure('MB', False, 'none planned'), Figure('MB', False, 'planned'), Figure('tasks', name='how many'))
    yield Case('memory', 'prefork 2', figures, partial(memory, size.planned, size.idle), rounds=1)


def memory(planned: Mapping[bool, int], seconds: float, system: System) -> Sequence[float]:
    """Return the memory of the worker in MB before and after tasks are scheduled, and their number."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        app = app_of(place)
        try:
            with working(place, app) as worker:
                time.sleep(seconds)
                before, number = memory_of(worker.pid), planned[sending.in_batches(app)]
                for start in range(0, number, _PART):
                    part = min(_PART, number - start)
                    sending.send(app, 'add', ((n, 1) for n in range(part)), countdown=_LATER)
                time.sleep(seconds)  # a worker that prefetches scheduled tasks does so now
                return [before, memory_of(worker.pid), number]
        finally:
            app.close()
