"""Celery workers as processes of their own, each with its pool in a process group that can be killed as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


class Worker:
    """One `celery worker` with two pool processes."""

    def __init__(self, name: str, host: str, folder: Path) -> None:
        self.name, self.killed, self._over = name, False, False
        self._log = folder / f'{name}.log'
        with self._log.open('wb') as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    '-m',
                    'celery',
                    '-A',
                    'examples.tasks',
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
                # A worker that is killed cannot remove its temporary files.
                cwd=_ROOT,
                env={**os.environ, 'TMPDIR': str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status, None while the worker runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End the worker and its pool at once, as if its machine had lost power."""
        self.killed = True
        self._end_group()

    def terminate(self) -> None:
        """Ask the worker to finish what it does and to end."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Wait for the worker to end; tell whether it did by itself, and well. Nothing of it is left afterwards."""
        try:
            return self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._end_group()

    def log_tail(self, count: int) -> list[str]:
        """Return the last lines of the log, and before them the last of those that warn."""
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
        except (ProcessLookupError, PermissionError):  # nobody is left, as Linux and macOS say it
            pass
        self._process.wait()
        self._over = True
