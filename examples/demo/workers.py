"""Celery workers as processes. Each has its pool in one process group, which is killed as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[2]

#: How many lines of each worker's log are shown on failure.
_TAIL = 20


class Worker:
    """One `celery worker` of an app, with two pool processes."""

    def __init__(self, name: str, host: str, folder: Path, app: str = 'examples.tasks') -> None:
        self.name, self.killed, self._over = name, False, False
        self._log = folder / f'{name}.log'
        with self._log.open('wb') as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    '-m',
                    'celery',
                    '-A',
                    app,
                    'worker',
                    '-n',
                    f'{name}@{host}',
                    '-c',
                    '2',
                    '-l',
                    'INFO',
                    '-I',
                    'examples.demo.journal',
                ],
                # A killed worker leaves its temporary files: they go into the folder that the demo deletes.
                cwd=_ROOT,
                env={**os.environ, 'TMPDIR': str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status; None while the worker runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End the worker and its pool at once, as if its machine had lost power."""
        self.killed = True
        self._end_group()

    def terminate(self) -> None:
        """Ask the worker to finish its tasks and end."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Wait for the worker to end and return whether its status is 0. Afterwards all its processes have ended."""
        try:
            return self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._end_group()

    def log_tail(self, count: int) -> list[str]:
        """Return the last `count` lines of the log, preceded by the last warnings and errors before them."""
        lines = self._log.read_text(encoding='utf-8', errors='replace').splitlines()
        warnings = [
            line for line in lines[:-count] if ': WARNING/' in line or ': ERROR/' in line or ': CRITICAL/' in line
        ]
        return warnings[-count:] + lines[-count:]

    def _end_group(self) -> None:
        if self._over:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the group has ended: the errors of Linux and macOS
            pass
        self._process.wait()
        self._over = True


def logs_of(workers: Iterable[Worker]) -> list[str]:
    """Return the lines at the end of the log of each worker, with headings."""
    return [
        line
        for worker in workers
        for line in ('', f'The end of the log of {worker.name}:', *(f'  {line}' for line in worker.log_tail(_TAIL)))
    ]
