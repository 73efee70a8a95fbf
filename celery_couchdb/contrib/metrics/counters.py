"""The counters of one worker process: its tasks by name and outcome, how long they ran, and how long they waited.

The heartbeat of the worker's consumer has them as the member `tasks`: `{since, counts}`, where `counts` has for each
task its outcomes, `run` and `waited`. The last two are histograms: the sum in seconds, and the number of values up to
each of `BOUNDS` that are above the one before; zeros are left out.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from kombu_couchdb.consumer.worker_hooks import report_member
from kombu_couchdb.couchdb.shapes import number
from kombu_couchdb.values import MAX_NUMBER

from ...patches.workers import OUTCOMES, TASK_ENDED, TASK_STARTED
from ...worker.running import delivery_info

#: The upper bounds of the histograms, in seconds; the last one is infinite.
BOUNDS = ('0.01', '0.05', '0.1', '0.5', '1', '5', '30', '60', '300', '1800', '+Inf')

_LIMITS = [float(bound) for bound in BOUNDS]

#: The names of the histograms: how long tasks ran, and how long their messages waited since they were published or due.
HISTOGRAMS = ('run', 'waited')

#: The most tasks that are counted by name, and the name under which all others are counted.
MAX_TASKS, OTHER = 200, '(other)'

#: Longer names are counted as others, in characters.
_MAX_NAME = 200

#: The largest number that is believed of a document.
_MAX_COUNT = 1e15


class Histogram:
    """Numbers of seconds, counted by the bound that they do not exceed."""

    def __init__(self) -> None:
        self.sum, self.counts = 0.0, [0] * len(BOUNDS)

    def add(self, seconds: float) -> None:
        """Count one number; one that cannot be right is left out."""
        if 0 <= seconds <= MAX_NUMBER:  # a longer time only says that the date in a message is wrong
            self.sum += seconds
            self.counts[bisect_left(_LIMITS, seconds)] += 1

    def document(self) -> dict[str, float]:
        """Return the histogram as the heartbeat has it."""
        counts = {bound: count for bound, count in zip(BOUNDS, self.counts, strict=True) if count}
        return {'sum': round(self.sum, 3), **counts} if counts else {}

    @classmethod
    def of(cls, document: Any) -> Histogram:
        """Read a histogram in a heartbeat, which may be anything."""
        found = cls()
        if isinstance(document, dict):
            found.sum = count_in(document, 'sum')
            found.counts = [int(count_in(document, bound)) for bound in BOUNDS]
        return found


class TaskCounts:
    """What happened to the tasks of one name."""

    def __init__(self) -> None:
        self.outcomes = Counter[str]()
        self.histograms = {name: Histogram() for name in HISTOGRAMS}

    def document(self) -> dict[str, Any]:
        """Return the counts as the heartbeat has them."""
        histograms = {name: found for name, one in self.histograms.items() if (found := one.document())}
        return {**self.outcomes, **histograms}

    @classmethod
    def of(cls, document: Any) -> TaskCounts:
        """Read counts in a heartbeat, which may be anything."""
        found = cls()
        if isinstance(document, dict):
            outcomes = {outcome: int(count_in(document, outcome)) for outcome in OUTCOMES}
            found.outcomes.update({outcome: count for outcome, count in outcomes.items() if count})
            found.histograms = {name: Histogram.of(document.get(name)) for name in HISTOGRAMS}
        return found


def count_in(document: Mapping[str, Any], name: str) -> float:
    """Return a number from 0 on in a document, which may be anything."""
    value = document.get(name)
    return max(0.0, min(float(value or 0), _MAX_COUNT)) if number(value) else 0.0


def since_in(tasks: Any) -> float:
    """Return since when the process counts whose heartbeat has this member `tasks`."""
    return count_in(tasks, 'since') if isinstance(tasks, dict) else 0.0


def counts_in(tasks: Any) -> dict[str, TaskCounts]:
    """Return the counts in the member `tasks` of a heartbeat, by task. The document may be anything."""
    counts = tasks.get('counts') if isinstance(tasks, dict) else None
    return {name: TaskCounts.of(found) for name, found in counts.items()} if isinstance(counts, dict) else {}


class Counters:
    """The counters of this process. Any thread may call any method: pools of threads end tasks in theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = round(time.time(), 3)
        self._tasks: defaultdict[str, TaskCounts] = defaultdict(TaskCounts)

    def begin(self, task: str, waited: float) -> None:
        """Count a task that begins to run; its message has waited for so many seconds."""
        with self._lock:
            self._of(task).histograms['waited'].add(waited)

    def end(self, task: str, outcome: str, seconds: float | None) -> None:
        """Count a request that has ended; the task ran for `seconds`, or not at all."""
        with self._lock:
            counts = self._of(task)
            counts.outcomes[outcome] += 1
            if seconds is not None:
                counts.histograms['run'].add(seconds)

    def document(self) -> dict[str, Any] | None:
        """Return the member `tasks` of the heartbeat; None before the first task."""
        with self._lock:
            counts = {name: found.document() for name, found in self._tasks.items()}
        return {'since': self._since, 'counts': counts} if counts else None

    def _of(self, task: str) -> TaskCounts:
        is_new = task not in self._tasks
        return self._tasks[OTHER if is_new and (len(self._tasks) >= MAX_TASKS or len(task) > _MAX_NAME) else task]


_counters: list[Counters] = []


def install() -> None:
    """Count the tasks of this process from now on, and report them with the heartbeats of its worker."""
    if not _counters:
        _counters.append(Counters())
        report_member('tasks', _counters[0].document)
        TASK_STARTED.connect(_on_start)
        TASK_ENDED.connect(_on_end)


def _on_start(sender: Any = None, **_: Any) -> None:
    ready_since = delivery_info(sender).get('ready_since')
    if number(ready_since) and sender.time_start is not None:
        _counters[0].begin(sender.type, max(0.0, sender.time_start - ready_since))


def _on_end(sender: Any = None, outcome: str = '', seconds: float | None = None, **_: Any) -> None:
    if 'ready_since' in delivery_info(sender):  # otherwise another broker has delivered it
        _counters[0].end(sender.type, outcome, seconds)
