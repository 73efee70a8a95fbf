"""The journal: a file in which the workers record their events. The demo reads it.

A worker that includes this module (`celery worker -I examples.demo.journal`) writes to the file in `$DEMO_JOURNAL`.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import signals

VARIABLE = 'DEMO_JOURNAL'


def note(event: str, worker: str, **more: Any) -> None:
    """Append one line by a single write in append mode, so that lines of several processes do not mix."""
    line = json.dumps(
        {'event': event, 'worker': worker.partition('@')[0], 'pid': os.getpid(), 'at': time.time(), **more}
    )
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f'{line}\n'.encode())
    finally:
        os.close(file)


@signals.worker_ready.connect
def worker_ready(sender: Any, **_: Any) -> None:
    """Record that a worker is ready."""
    note('ready', sender.hostname)


@signals.task_prerun.connect
def task_started(task: Any, task_id: str, **_: Any) -> None:
    """Record that a task starts."""
    note('started', task.request.hostname, task=task_id)


@signals.task_postrun.connect
def task_finished(task: Any, task_id: str, state: str | None, **_: Any) -> None:
    """Record that a task has ended, with its state."""
    note('finished', task.request.hostname, task=task_id, state=state)


@dataclass
class Run:
    """One run of a task."""

    worker: str
    pid: int
    started: float
    finished: float | None = None
    state: str | None = None


class Journal:
    """The content of the journal so far."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open(encoding='utf-8')
        self._rest = ''
        #: The names of the workers that are ready.
        self.ready: set[str] = set()
        #: The runs of each task in the order of their starts.
        self.runs: dict[str, list[Run]] = defaultdict(list)

    def read(self) -> None:
        """Read the new lines."""
        *lines, self._rest = (self._rest + self._file.read()).split('\n')
        for line in lines:
            self._take(json.loads(line))

    def succeeded(self, task_id: str) -> bool:
        """Return whether a run of the task succeeded."""
        return any(run.state == 'SUCCESS' for run in self.runs[task_id])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _take(self, line: dict[str, Any]) -> None:
        event, worker, pid, at = line['event'], line['worker'], line['pid'], line['at']
        if event == 'ready':
            self.ready.add(worker)
        elif event == 'started':
            self.runs[line['task']].append(Run(worker, pid, at))
        else:
            run = next(run for run in reversed(self.runs[line['task']]) if (run.worker, run.pid) == (worker, pid))
            run.finished, run.state = at, line['state']
