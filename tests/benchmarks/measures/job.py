"""Measure: send tasks, run them in a Celery worker, and collect their results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from celery import Celery, chain, chord, group
from celery.result import AsyncResult

from .. import sending
from ..cases import Case, Figure, NotMeasured
from ..processes import Spent, cpu_of
from ..sizes import Size
from ..systems import System
from ..worker import app_of, working

__all__ = ['TITLE', 'cases']

TITLE = 'A whole Celery job'
_PATIENCE = 300.0
#: The pool size of the headline cases.
_FEW = 2
#: The number of steps of each chain.
_STEPS = 10
#: How long a server may still work after the last result, on acknowledgements for example, in seconds.
_REST = 0.5

_SENT, _COLLECTED = Figure('tasks/s', name='sent'), Figure('tasks/s', name='sent, run and collected')
_SHARE = Figure('share', name='collected, of the rate of sending alone')
_JOINED, _BODY = Figure('s', False, 'sent, run and joined'), Figure('s', False, "sent, run, and the body's result")
#: Processor time for each task: of the server, the worker's main process, the processes of its pool, and the program
#: that sends the tasks and waits.
_CPU = tuple(Figure('ms', False, f'CPU of the {part}, per task') for part in ('server', 'worker', 'pool', 'program'))


def cases(size: Size) -> Iterator[Case]:
    """Yield the cases: tasks one by one, in batches to two pools with late and early acks, a group, a chord, chains."""
    tasks = size.tasks
    many = f'{tasks:,} tasks'

    def case(
        label: str,
        figures: tuple[Figure, ...],
        run: Callable[[System], Sequence[float | None]],
        pool: int = _FEW,
        *,
        headline: bool = False,
    ) -> Case:
        return Case('job', f'{label}, prefork {pool}', (*figures, *_CPU), run, size.long_rounds, headline)

    yield case(many, (_SENT, _COLLECTED, _SHARE), partial(one_by_one, tasks), headline=True)
    for pool in (_FEW, 8):
        for late, how in ((True, ', acknowledged late'), (False, '')):
            run = partial(in_a_batch, tasks, pool, late)
            yield case(f'{many} in a batch{how}', (_SENT, _COLLECTED), run, pool, headline=late and pool == _FEW)
    yield case(f'group of {size.group}', (_JOINED,), partial(joined_group, size.group))
    yield case(f'chord of {size.chord}', (_BODY,), partial(whole_chord, size.chord))
    yield case(f'{size.chains} chains of {_STEPS} steps', (_JOINED,), partial(joined_chains, size.chains))


def one_by_one(tasks: int, system: System) -> Sequence[float | None]:
    """Return tasks per second sent and collected, the latter also as a share of what is sent to no worker, and CPU."""
    alone = sending_alone(max(1, tasks // 4), system)

    def send(app: Celery) -> list[AsyncResult]:
        return [app.send_task('add', (number, 1)) for number in range(tasks)]

    sent, collected, *spent = measured(system, _FEW, tasks, partial(rates, tasks, send))
    return [sent, collected, None if collected is None else collected / alone, *spent]


def in_a_batch(tasks: int, pool: int, late: bool, system: System) -> Sequence[float | None]:
    """Return tasks per second sent and collected, and CPU; with `late` the tasks are acknowledged late."""

    def send(app: Celery) -> list[AsyncResult]:
        if not sending.in_batches(app):
            raise NotMeasured('kombu has no batches for it')
        return sending.send(app, 'add', ((number, 1) for number in range(tasks)))

    return measured(system, pool, tasks, partial(rates, tasks, send), late=late)


def joined_group(tasks: int, system: System) -> Sequence[float | None]:
    """Return the seconds from sending a group to its joined results, and CPU."""

    def join(app: Celery) -> list[float]:
        started = time.monotonic()
        result = group([app.signature('add', (number, 1)) for number in range(tasks)]).apply_async()
        verify(sum(result.get(timeout=_PATIENCE)), tasks)
        return [time.monotonic() - started]

    return measured(system, _FEW, tasks, join)


def whole_chord(tasks: int, system: System) -> Sequence[float | None]:
    """Return the seconds from sending a chord to the result of its body, and CPU."""
    if not system.keeps_results:
        raise NotMeasured('its result backend has no chords')

    def wait(app: Celery) -> list[float]:
        started = time.monotonic()
        result = chord([app.signature('add', (number, 1)) for number in range(tasks)])(app.signature('total'))
        verify(result.get(timeout=_PATIENCE), tasks)
        return [time.monotonic() - started]

    return measured(system, _FEW, tasks, wait)


def joined_chains(chains: int, system: System) -> Sequence[float | None]:
    """Return the seconds from sending chains to the results of their last steps, and CPU."""

    def join(app: Celery) -> list[float]:
        started = time.monotonic()
        steps = [app.signature('add', (1,)) for _ in range(_STEPS - 1)]
        results = [chain(app.signature('add', (number, 0)), *steps, app=app).apply_async() for number in range(chains)]
        if [result.get(timeout=_PATIENCE) for result in results] != [number + len(steps) for number in range(chains)]:
            raise ValueError('a result is wrong')
        return [time.monotonic() - started]

    return measured(system, _FEW, chains * _STEPS, join)


def measured(
    system: System, pool: int, tasks: int, work: Callable[[Celery], Sequence[float]], *, late: bool = False
) -> Sequence[float | None]:
    """Return what `work` returns with a running worker, and the CPU milliseconds per task, see `_CPU`."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        place = replace(place, settings={**place.settings, 'task_acks_late': late})
        app = app_of(place)
        try:
            with working(place, app, pool) as worker:
                spent, before = Spent(system.host, system.port), _ours(worker.pid)
                values = work(app)
                time.sleep(_REST)
                used, after = spent.milliseconds(), _ours(worker.pid)
        finally:
            app.close()
    ours = [(now - then) * 1000 / tasks for now, then in zip(after, before, strict=True)]
    return [*values, None if used is None else used / tasks, *ours]


def _ours(worker: int) -> list[float]:
    """Return the CPU seconds of the worker's main process, of the processes of its pool, and of this process."""
    main = cpu_of(worker, alone=True)
    return [main, cpu_of(worker) - main, cpu_of(os.getpid(), alone=True)]


def rates(tasks: int, send: Callable[[Celery], Sequence[AsyncResult]], app: Celery) -> Sequence[float]:
    """Return the tasks per second that were sent, and that were sent, run and collected."""
    started = time.monotonic()
    results = send(app)
    sent = time.monotonic()
    verify(sum(result.get(timeout=_PATIENCE) for result in results), tasks)
    return [tasks / (sent - started), tasks / (time.monotonic() - started)]


def sending_alone(tasks: int, system: System) -> float:
    """Return the tasks per second that are sent one by one while no worker runs."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        app = app_of(place)
        try:
            app.send_task('add', (0, 1))  # what the first task creates is created now
            started = time.monotonic()
            for number in range(tasks):
                app.send_task('add', (number, 1))
            return tasks / (time.monotonic() - started)
        finally:
            app.close()


def verify(total: int, tasks: int) -> None:
    """Raise `ValueError` if the sum of all results is wrong."""
    if total != tasks * (tasks + 1) // 2:
        raise ValueError('a result is wrong')
