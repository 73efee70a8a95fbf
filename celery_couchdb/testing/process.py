"""Processes with the interface of Docker containers, for pytest-celery without Docker."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docker.models.containers import ExecResult

from kombu_couchdb.embedded import EmbeddedServer

from .server import Server

__all__ = ['Process', 'ServerProcess']

#: Programs that run with this interpreter instead of the one on PATH.
_PROGRAMS = {'celery': [sys.executable, '-m', 'celery'], 'python': [sys.executable]}


class _Container:
    """The common attributes of Docker containers. The host name is derived from the random id."""

    def __init__(self, kind: str, environment: Mapping[str, str]) -> None:
        self.id = uuid.uuid4().hex
        self.hostname = self.id[:12]
        self.name = f'{kind}-{self.hostname}'
        self.attrs: dict[str, Any] = {
            'Config': {'Hostname': self.hostname, 'Env': [f'{name}={value}' for name, value in environment.items()]},
            'HostConfig': {'PortBindings': {}},
            'NetworkSettings': {'Networks': {}, 'Ports': {}},
        }

    def reload(self) -> None:
        """Do nothing: the attributes are never cached."""


class Process(_Container):
    """A process that runs in a folder, with the interface of a container. Its output goes to a file beside the folder.

    `%h` in the command is replaced by the host name; `celery` and `python` run with this interpreter. The process can
    import the modules in its folder, and those that this process can import.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        super().__init__('process', environment)
        self._command = [word.replace('%h', self.hostname) for word in command]
        self._folder, self._log = folder, folder.with_name(f'{folder.name}.log')
        path = os.pathsep.join([str(folder), *filter(None, [environment.get('PYTHONPATH')]), *sys.path])
        self._environment = {**os.environ, **environment, 'PYTHONPATH': path}
        self._log.touch()
        self.start()

    def start(self) -> None:
        """Start the process, or start it again. A new start appends to the log."""
        self._log_start = self._log.stat().st_size
        with self._log.open('ab') as log:
            self._process = subprocess.Popen(
                _of_this_interpreter(self._command),
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def status(self) -> str:
        """'running' or 'exited'."""
        return 'running' if self._process.poll() is None else 'exited'

    def logs(self) -> bytes:
        """Return the whole log."""
        return self._log.read_bytes()

    def latest_logs(self) -> bytes:
        """Return the log since the latest start."""
        return self.logs()[self._log_start :]

    def kill(self, which: str | int | None = None) -> None:
        """Send a signal to the process. SIGKILL, the default, also goes to its children, and the call waits for it."""
        number = _signal_number(which)
        if number != signal.SIGKILL:
            self._process.send_signal(number)
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # all of them have ended
        self._process.wait()

    def stop(self, timeout: float = 10) -> None:
        """Stop the process with SIGTERM. Kill it after `timeout` seconds."""
        self.kill('SIGTERM')
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self, timeout: float = 10) -> None:
        """Stop the process, as `stop` does, and start it again."""
        self.stop(timeout)
        self.start()

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        """Wait until the process ends and return `{'StatusCode': …}`.

        *Raises* `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        return {'StatusCode': self._process.wait(timeout)}

    def exec_run(self, cmd: str | Sequence[str]) -> ExecResult:
        """Run another program in the same folder and environment; return `exit_code` and `output`.

        The environment variable `WORKER_PID` has the id of the process.
        """
        words = shlex.split(cmd) if isinstance(cmd, str) else cmd
        done = subprocess.run(
            _of_this_interpreter(words),
            cwd=self._folder,
            env={**self._environment, 'WORKER_PID': str(self.pid)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return ExecResult(done.returncode, done.stdout)


class ServerProcess(_Container):
    """The server under test, with the interface of a container.

    Only the embedded server can be killed and restarted. It then loses its data.
    """

    def __init__(self, server: Server) -> None:
        super().__init__('couchdb', {'COUCHDB_USER': server.user, 'COUCHDB_PASSWORD': server.password})
        self._server = server

    @property
    def status(self) -> str:
        """'running' or 'exited'. For a server that `COUCHDB_URL` names it is always 'running'."""
        own = self._server.process
        running = own is None or (own.process is not None and own.process.poll() is None)
        return 'running' if running else 'exited'

    def logs(self) -> bytes:
        """Return an empty log: the embedded server has none, and another server's log is not accessible."""
        return b''

    def kill(self, which: str | int | None = None) -> None:
        """Send a signal to the embedded server; *raises* `RuntimeError` for another server."""
        number, own = _signal_number(which), self._own()
        if number in (signal.SIGKILL, signal.SIGTERM):
            own.stop(kill=number == signal.SIGKILL)
        else:
            os.kill(own.pid, number)

    def restart(self, timeout: float = 10) -> None:
        """Stop the embedded server and start it at the same address; *raises* `RuntimeError` for another server.

        `timeout` is not used.
        """
        own = self._own()
        own.stop()
        own.start()

    def _own(self) -> EmbeddedServer:
        if self._server.process is None:
            raise RuntimeError(
                'the server in COUCHDB_URL was not started by the tests, so they do not kill or restart it; '
                'unset COUCHDB_URL to use an embedded server'
            )
        return self._server.process


def _signal_number(given: str | int | None) -> int:
    """Return the number for a signal in Docker's notation: a number, `TERM`, `SIGTERM`, or None for SIGKILL."""
    if isinstance(given, str) and not given.isdigit():
        return signal.Signals[f'SIG{given.upper().removeprefix("SIG")}']
    return signal.SIGKILL if given is None else int(given)


def _of_this_interpreter(words: Sequence[str]) -> list[str]:
    return [*_PROGRAMS.get(words[0], words[:1]), *words[1:]]
