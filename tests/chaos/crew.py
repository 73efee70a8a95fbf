"""The processes of a run: workers, publishers and a listener, which faults stop, pause and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from .proxy import Proxy

__all__ = ['POOLS', 'Listener', 'Place', 'Publisher', 'Settings']

_ROOT = Path(__file__).parents[2]

#: The pool and its size of each place. With six or more children, these store results through their parent.
POOLS = (('prefork', 6), ('threads', 4), ('prefork', 2))

#: How long a worker may take for a warm shutdown, in seconds.
_WARM = 60.0

#: Environment variables that pass settings and passwords to a process.
Settings = Mapping[str, str]


class Place:
    """One worker at a time, behind its own proxy."""

    def __init__(
        self,
        name: str,
        pool: tuple[str, int],
        proxy: Proxy,
        settings: Settings,
        folder: Path,
        tasks: str = 'tests.chaos.tasks',
    ) -> None:
        self.name, self.proxy, self._pool, self._settings, self._folder = name, proxy, pool, settings, folder
        self._tasks = tasks
        #: A fault of this worker holds it until the fault is healed.
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._number = 0

    @property
    def has_children(self) -> bool:
        """Tell whether its workers run tasks in child processes."""
        return self._pool[0] == 'prefork'

    @property
    def worker(self) -> str:
        """The name of the current worker."""
        return f'{self.name}.{self._number}@chaos'

    def start(self, astray: float = 0.0) -> None:
        """Start a worker whose clock is wrong by `astray` seconds."""
        self._number += 1
        pool, size = self._pool
        arguments = [
            '-A',
            self._tasks,
            'worker',
            '-l',
            'INFO',
            '-n',
            self.worker,
            '--pool',
            pool,
            '--concurrency',
            str(size),
        ]
        with (self._folder / f'{self.name}.log').open('a') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'celery', *arguments],
                cwd=_ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._settings, 'CHAOS_ASTRAY': str(astray)},
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """Send a signal to the worker and all its children."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the worker and all its children."""
        assert self.process is not None
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def stop(self) -> bool:
        """Stop the worker by a warm shutdown. If it does not end, kill it and return False."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(_WARM)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True


class Publisher:
    """A process that sends orders."""

    def __init__(self, settings: Settings, log: Path) -> None:
        with log.open('a') as file:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'tests.chaos.publisher'],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                text=True,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    def send(self, order: str) -> None:
        """Make the process send an order; *raises* `RuntimeError` if the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(order + '\n')
            self.process.stdin.flush()
        except BrokenPipeError as exc:
            raise RuntimeError('a publisher ended unexpectedly; see its log') from exc

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.communicate()


class Listener:
    """A process that listens to events."""

    def __init__(self, settings: Settings, log: Path) -> None:
        #: A fault of the listener holds it until the fault is healed.
        self.lock = threading.Lock()
        with log.open('a') as file:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'tests.chaos.listener'],
                cwd=_ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    def close(self) -> None:
        """Stop the process, which closes its connection; kill it if it does not end."""
        self.process.terminate()
        try:
            self.process.wait(_WARM)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
