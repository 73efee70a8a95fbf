"""The crew: places for workers, in which real `celery worker` processes are started, stopped, paused and killed."""

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

_ROOT = Path(__file__).parents[1]

#: The pools of the places, with their sizes: with six children and more, these store results through their parent.
POOLS = (('prefork', 6), ('threads', 4), ('prefork', 2))

#: How long a worker may take to stop when it is asked to, in seconds.
_WARM = 60.0

#: Environment variables, with which settings and passwords reach a process.
Settings = Mapping[str, str]


class Place:
    """One worker after the other, behind a proxy of their own."""

    def __init__(self, name: str, pool: tuple[str, int], proxy: Proxy, settings: Settings, folder: Path) -> None:
        self.name, self.proxy, self._pool, self._settings, self._folder = name, proxy, pool, settings, folder
        #: Who breaks something here holds this until it is healed.
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._number = 0

    @property
    def has_children(self) -> bool:
        """Whether its workers run tasks in child processes."""
        return self._pool[0] == 'prefork'

    @property
    def worker(self) -> str:
        """The name of the worker that is here now."""
        return f'{self.name}.{self._number}@chaos'

    def start(self, astray: float = 0.0) -> None:
        """Start a worker, whose clock is wrong by so many seconds."""
        self._number += 1
        pool, size = self._pool
        arguments = [
            '-A',
            'chaos.tasks',
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
        """Kill it with all its children."""
        assert self.process is not None
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def stop(self) -> bool:
        """Stop it warmly; if it does not stop, kill it and return False."""
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
                [sys.executable, '-m', 'chaos.publisher'],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                text=True,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    def send(self, order: str) -> None:
        """Have it send an order; *raises* `RuntimeError` if it is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(order + '\n')
            self.process.stdin.flush()
        except BrokenPipeError as exc:
            raise RuntimeError('a publisher ended by itself; see its log') from exc

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.communicate()


class Listener:
    """A process that listens to events."""

    def __init__(self, settings: Settings, log: Path) -> None:
        #: Who breaks it holds this until it is healed.
        self.lock = threading.Lock()
        with log.open('a') as file:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'chaos.listener'],
                cwd=_ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    def close(self) -> None:
        """Have it end its connection, or kill it."""
        self.process.terminate()
        try:
            self.process.wait(_WARM)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
