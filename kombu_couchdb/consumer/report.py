"""The report of a Celery worker in the heartbeats of its consumer: its running tasks, and members of optional rooms.

Only tasks that have run for a second are reported: shorter ones need no heartbeat of their own, however many there are.
When the tasks that should be reported differ from those of the last heartbeat, the next one is written early, but at
most one in `_EARLY_SECONDS`. The I/O thread looks at the running tasks only after messages were claimed or decided
about, and while tasks run. A look makes no request.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from math import inf

from ..couchdb.clock import ServerClock
from ..documents.shared_documents import ReportedTask, Running, WorkerReport
from .worker_hooks import RunningTask, members_of_heartbeat, reports_running, running_tasks

#: How long a task must have run to be reported, in seconds.
_LEAST_SECONDS = 1.0

#: The least time between a heartbeat and an early one, and between two looks at tasks that run for long, in seconds.
_EARLY_SECONDS = 5.0

#: The most tasks that a heartbeat names, and the longest id or name in it, in characters.
_MAX_TASKS, _MAX_TEXT = 100, 300


class TaskReport:
    """The report of one consumer; for its I/O thread alone."""

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._queues: frozenset[str] = frozenset()  # that it consumes, or has consumed
        #: The ids of the tasks in the stored heartbeat, and in the one that was made and is not stored yet.
        self._stored: frozenset[str] = frozenset()
        self._made: frozenset[str] = frozenset()
        self._look_at = inf

    def expect(self) -> None:
        """Note that messages were claimed or decided about: tasks may have begun or ended."""
        if reports_running():
            self._look_at = min(self._look_at, time.monotonic() + _LEAST_SECONDS)

    def due_at(self, sent: float) -> float:
        """Return the monotonic time of the next look, if the last heartbeat was made at the time `sent`."""
        return max(self._look_at, sent + _EARLY_SECONDS)

    def is_due(self, queues: Collection[str], sent: float) -> bool:
        """Tell whether an early heartbeat is due for this consumer of `queues`; look at the tasks if it is time to."""
        now = time.monotonic()
        if now < self.due_at(sent):
            return False
        tasks = self._tasks(queues) or ()
        ages = [time.time() - task.since for task in tasks]
        coming = min((_LEAST_SECONDS - age for age in ages if age < _LEAST_SECONDS), default=inf)
        long = frozenset(task.id for task, age in zip(tasks, ages, strict=True) if age >= _LEAST_SECONDS)
        self._look_at = now + min(coming, _EARLY_SECONDS if long or self._stored else inf)
        return long != self._stored

    def members(self, queues: Collection[str]) -> WorkerReport:
        """Return the members for the next heartbeat of a consumer of `queues`."""
        now, tasks = time.time(), self._tasks(queues)
        if tasks is None:
            self._made = frozenset()
            return {}
        long = sorted((task for task in tasks if now - task.since >= _LEAST_SECONDS), key=lambda task: task.since)
        self._made = frozenset(task.id for task in long)
        found: WorkerReport = {'running': _described(long, self._clock.now() - now)} if long else {}
        return {**found, **self.last_members()}

    def last_members(self) -> WorkerReport:
        """Return the members that the deletion of the heartbeat has, too."""
        found: WorkerReport = {}
        if running_tasks(self._queues) is not None:
            found.update(members_of_heartbeat())  # type: ignore[typeddict-item]  # optional rooms define them
        return found

    def stored(self) -> None:
        """Note that the last heartbeat was stored."""
        self._stored = self._made

    def _tasks(self, queues: Collection[str]) -> Collection[RunningTask] | None:
        # A worker that consumes no queue any more still runs the tasks that it has.
        self._queues |= frozenset(queues)
        return running_tasks(self._queues)


def _described(tasks: Collection[RunningTask], ahead: float) -> Running:
    """Return the member `running`; the server's clock is `ahead` of this machine's."""
    queues: dict[str, list[int]] = {}
    for task in tasks:
        counts = queues.setdefault(task.queue, [0, 0])
        counts[0] += 1
        counts[1] += task.is_claimed
    named: list[ReportedTask] = [
        {'id': task.id, 'task': task.task, 'queue': task.queue, 'since': round(task.since + ahead, 3)}
        for task in tasks
        if max(map(len, (task.id, task.task, task.queue))) <= _MAX_TEXT
    ]
    return {'queues': queues, 'tasks': named[:_MAX_TASKS]}
