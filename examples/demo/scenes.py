"""The scenes of the demo: kinds of work, each with a check of its outcome."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any, ClassVar

from celery import chain, chord, group

from examples import tasks

from .journal import Journal, Run

#: In seconds: how late a task may start; how long reading the result of a finished task may take.
_LATE, _RESULT = 2.0, 3.0


class Scene(ABC):
    """One row of the table. Times are seconds since the epoch."""

    #: Its name in the table, and a short one for the progress line.
    what: str
    short: str
    #: How many times each task must start.
    starts: ClassVar[int] = 1

    def __init__(self, patience: float) -> None:
        #: How many seconds after its due date a task may start.
        self.late = _LATE * patience
        self._timeout = _RESULT * patience
        self.ids: list[str] = []
        self.sent: float | None = None
        self.due: float | None = None
        #: The outcome in a few words, and what is wrong, in sentences.
        self.outcome = '-'
        self.flaws = ['its outcome is unknown']

    def send(self) -> None:
        """Send the tasks."""
        self.sent = time.time()
        self.pending = self._send()

    def done(self, journal: Journal) -> bool:
        """Return whether every task has succeeded."""
        return bool(self.ids) and all(journal.succeeded(task_id) for task_id in self.ids)

    def progress(self, journal: Journal) -> str:
        """Return the progress, such as `3/10`."""
        if self.starts > 1:
            return f'{sum(1 for _ in self.runs(journal))}/{self.starts}'
        return f'{sum(journal.succeeded(task_id) for task_id in self.ids)}/{len(self.ids)}'

    def runs(self, journal: Journal) -> Iterator[Run]:
        """Return the runs of all tasks."""
        return (run for task_id in self.ids for run in journal.runs[task_id])

    def judge(self, journal: Journal) -> None:
        """Check the outcome and set `flaws`."""
        self.flaws = self._flaws(journal)

    def _flaws(self, journal: Journal) -> list[str]:
        if self.sent is None:
            return ['was not sent']
        if not self.ids:
            return ['was sent only in part']
        unfinished = sum(not journal.succeeded(task_id) for task_id in self.ids)
        if unfinished:
            never = sum(not journal.runs[task_id] for task_id in self.ids)
            return [f'{unfinished} of {len(self.ids)} not finished, {never} of them never started']
        try:
            flaw = self.check(self.pending.get(timeout=self._timeout))
        except Exception as exc:
            flaw = f'no result: {type(exc).__name__}: {exc}'
        flaws = [flaw] if flaw else []
        for task_id in self.ids:
            runs = journal.runs[task_id]
            if len(runs) != self.starts:
                where = ', '.join(f'{run.worker} at {run.started:.3f}' for run in runs)
                flaws.append(f'{task_id} ran {len(runs)} times instead of {self.starts}: on {where}')
        return flaws or self.check_runs([journal.runs[task_id] for task_id in self.ids])

    @abstractmethod
    def _send(self) -> Any:
        """Send the tasks, set `ids` and return Celery's result."""

    @abstractmethod
    def check(self, result: Any) -> str | None:
        """Set `outcome` from the result; return what is wrong with it, or None."""

    def check_runs(self, runs: list[list[Run]]) -> list[str]:
        """Return what is wrong with the times and places of the runs; `runs` has a list for each task."""
        return []

    def expect(self, result: Any, expected: Any, outcome: str) -> str | None:
        """Set `outcome`; return what is wrong if the result is not the expected one."""
        self.outcome = outcome if result == expected else 'wrong'
        return None if result == expected else f'the result is {str(result)[:60]} instead of {str(expected)[:60]}'


class Burst(Scene):
    """Many small tasks at once."""

    short = 'group'
    size = 300
    what = f'{size} tasks in a group'

    def _send(self) -> Any:
        result = group(tasks.add.s(i, i) for i in range(self.size)).apply_async()
        self.ids = [task.id for task in result.results]
        return result

    def check(self, result: Any) -> str | None:
        return self.expect(result, [2 * i for i in range(self.size)], f'{self.size} right')


class Retry(Scene):
    """A task that fails twice and is retried 1 s later each time."""

    short = 'retry'
    what = 'a task that fails twice'
    starts = 3

    def _send(self) -> Any:
        result = tasks.flaky.delay(self.starts)
        self.ids = [result.id]
        return result

    def check(self, result: Any) -> str | None:
        return self.expect(result, self.starts, 'third try')

    def check_runs(self, runs: list[list[Run]]) -> list[str]:
        flaws = []
        for failed, again in pairwise(runs[0]):
            # The retry is scheduled at some moment of the failed run.
            assert failed.finished is not None
            self.due = failed.finished + 1.0
            if again.started - failed.started < 1.0:
                flaws.append(f'was retried after {again.started - failed.started:.2f} s instead of 1 s')
            if again.started - self.due > self.late:
                flaws.append(f'was retried {again.started - self.due:.1f} s late')
        return flaws


class Chain(Scene):
    """Tasks that each need the result of the previous one."""

    short = 'chain'
    what = 'a chain of 3 tasks'

    def _send(self) -> Any:
        result = chain(tasks.add.s(1, 2), tasks.add.s(3), tasks.add.s(4))()
        self.ids = [result.parent.parent.id, result.parent.id, result.id]
        return result

    def check(self, result: Any) -> str | None:
        return self.expect(result, 10, '1+2+3+4=10')

    def check_runs(self, runs: list[list[Run]]) -> list[str]:
        early = any(second[0].started < first[0].started for first, second in pairwise(runs))
        return ['the tasks did not run one after the other'] if early else []


class Chord(Scene):
    """Tasks whose results another task combines."""

    short = 'chord'
    size = 10
    what = f'a chord of {size} tasks'

    def _send(self) -> Any:
        result = chord(tasks.add.s(i, i) for i in range(self.size))(tasks.total.s())
        self.ids = [*(task.id for task in result.parent.results), result.id]
        return result

    def check(self, result: Any) -> str | None:
        return self.expect(result, self.size * (self.size - 1), f'sum {result}')

    def check_runs(self, runs: list[list[Run]]) -> list[str]:
        *header, last = runs
        early = any(run[0].started > last[0].started for run in header)
        return ['the last task did not wait for the others'] if early else []


class Crash(Scene):
    """A task whose process is killed while the worker runs on."""

    short = 'crash'
    what = 'a task, process killed'
    starts = 2

    def _send(self) -> Any:
        result = tasks.crash.delay()
        self.ids = [result.id]
        return result

    def check(self, result: Any) -> str | None:
        return self.expect(result, 'survived', 'came back')

    def check_runs(self, runs: list[list[Run]]) -> list[str]:
        first, second = runs[0]
        return ['ran twice in one process'] if first.pid == second.pid else []


class WorkerKilled(Scene):
    """A task whose worker is killed with all its processes."""

    short = 'killed'
    what = 'a task, worker killed'
    starts = 2

    def _send(self) -> Any:
        result = tasks.work_long.delay(3600)
        self.ids = [result.id]
        return result

    def check(self, result: Any) -> str | None:
        return self.expect(result, 'done', 'came back')

    def check_runs(self, runs: list[list[Run]]) -> list[str]:
        first, second = runs[0]
        return ['ran twice on one worker'] if first.worker == second.worker else []

    def holder(self, journal: Journal) -> str | None:
        """Return the name of the worker that runs the task, or None before it starts."""
        return next((run.worker for run in self.runs(journal)), None)


class Scheduled(Scene):
    """Tasks that are due some seconds later."""

    size = 10

    def __init__(self, patience: float, ahead: int) -> None:
        super().__init__(patience)
        self.ahead, self.short, self.what = ahead, f'due in {ahead} s', f'{self.size} tasks due in {ahead} s'

    def _send(self) -> Any:
        self.due = when = time.time() + self.ahead
        eta = datetime.fromtimestamp(when, timezone.utc)
        result = group(tasks.remember.s(when) for _ in range(self.size)).apply_async(eta=eta)
        self.ids = [task.id for task in result.results]
        return result

    def check(self, result: Any) -> str | None:
        self.outcome = f'{max(0.0, *result):.2f} s late'
        if min(result) < 0:
            return f'a task ran {-min(result):.2f} s early'
        return f'a task ran {max(result):.1f} s late' if max(result) > self.late else None

    def check_runs(self, runs: list[list[Run]]) -> list[str]:
        early = self.due is not None and any(run[0].started < self.due for run in runs)
        return ['a task started early'] if early else []
