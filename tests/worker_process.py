"""A worker that is a process on this machine, with the methods of a container that pytest-celery's worker calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.patience import PATIENCE

__all__ = ['WorkerProcess']


class WorkerProcess:
    """A worker that runs in a folder with an app. Its output goes to a file beside the folder.

    `%h` in the command is replaced by a random host name. The worker can import the modules in its folder, and those
    that this process can import.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], content: Mapping[str, bytes], folder: Path
    ) -> None:
        """Create `folder`, write the files in `content` (text by name) into it, and start a worker there."""
        self.id = uuid.uuid4().hex
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_bytes(text)
        self._log = folder.with_name(f'{folder.name}.log')
        path = os.pathsep.join([str(folder), *filter(None, [environment.get('PYTHONPATH')]), *sys.path])
        with self._log.open('wb') as log:
            self._process = subprocess.Popen(
                [word.replace('%h', self.id[:12]) for word in command],
                cwd=folder,
                env={**os.environ, **environment, 'PYTHONPATH': path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """Return the command of a worker for the module `app`."""
        words = '-m celery -A app worker --loglevel=INFO -n celery_test_worker@%h -Q celery'
        return [sys.executable, *words.split(), *arguments]

    def worker_name(self) -> str:
        """Return the part of the worker's name before the host name."""
        return 'celery_test_worker'

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def status(self) -> str:
        """'running' or 'exited'."""
        return 'running' if self._process.poll() is None else 'exited'

    def reload(self) -> None:
        """Do nothing: the status is never cached."""

    def logs(self) -> str:
        """Return the log."""
        return self._log.read_text('utf-8', errors='replace')

    def ready(self) -> bool:
        """Wait until the worker logs that it is ready; fail the test if it ends before."""
        deadline = time.monotonic() + PATIENCE
        while 'ready.' not in self.logs():
            if self.status == 'exited' or time.monotonic() > deadline:
                pytest.fail(f'the worker ended, or took too long, before it was ready; it logged:\n{self.logs()}')
            time.sleep(0.02)
        return True

    def kill(self, signal: str = 'SIGKILL') -> None:
        """Send a signal to the process. SIGKILL also goes to its children, and the call waits for it."""
        if signal != 'SIGKILL':
            self._process.send_signal(_number(signal))
            return
        try:
            os.killpg(self.pid, _number(signal))
        except ProcessLookupError:
            pass  # all of them have ended
        self._process.wait()

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait until the worker ends and return its exit status; *raises* `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout)

    def terminate(self, timeout: float = PATIENCE) -> int:
        """Start a warm shutdown of the worker, wait until it ends, and return its exit status."""
        self.kill('SIGTERM')
        return self.wait(timeout)

    def teardown(self) -> None:
        """Kill the worker and its child processes."""
        self.kill()


def _number(name: str) -> int:
    return signal.Signals[name]
