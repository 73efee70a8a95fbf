"""Measure: programs that each send a task and wait for its result, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from .. import peers
from ..cases import Case, Figure, NotMeasured
from ..figures import percentile
from ..processes import Spent
from ..sizes import Size, count
from ..systems import System
from ..worker import app_of, working

__all__ = ['TITLE', 'cases']

TITLE = 'Programs that wait, each for a result of its own'
#: How long a task takes, in seconds.
_TASK_SECONDS = 0.2
#: The threads of the worker: more than there are waiting programs.
_THREADS = 48


def cases(size: Size) -> Iterator[Case]:
    """Yield a case for each number of processes."""
    figures = (
        Figure('ms', False, 'beyond the task, p50'),
        Figure('tasks/s'),
        Figure('ms', False, 'CPU of the server, per task'),
    )
    for processes, tasks in size.waiting.items():
        label = f'{count(processes, "process").replace("processs", "processes")}, a task of {_TASK_SECONDS:g} s'
        yield Case('waiting', label, figures, partial(waits, processes, tasks), size.long_rounds)


def waits(processes: int, tasks: int, system: System) -> Sequence[float | None]:
    """Return the median wait beyond the task in milliseconds, tasks per second, and CPU milliseconds per task."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        app = app_of(place)
        try:
            with (
                working(place, app, _THREADS, pool='threads'),
                peers.waiting(place, processes, tasks, _TASK_SECONDS) as answer,
            ):
                spent = Spent(system.host, system.port)
                found, seconds = answer()
                used = spent.milliseconds()
        finally:
            app.close()
    done = processes * tasks
    return [
        percentile([wait - _TASK_SECONDS for wait in found], 0.5) * 1000,
        done / seconds,
        None if used is None else used / done,
    ]
