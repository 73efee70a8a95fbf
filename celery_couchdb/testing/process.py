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

#: The programs that are those of this interpreter, whatever is on PATH.
_PROGRAMS = {'celery': [sys.executable, '-m', 'celery'], 'python': [sys.executable]}


class _Container:
    """What is asked of every container. Its id stands for the name of a host."""

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
        """Do nothing: what is asked is looked up each time."""


class Process(_Container):
    """A program that runs in a folder and logs to a file beside it.

    In its command `%h` is its own host name, and `celery` and `python` are those of this interpreter. It imports what lies in
    its folder, and then what this process can import.
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
        """Start it, or start it again; the log goes on."""
        self._begins = self._log.stat().st_size
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
        """Return all that it has logged."""
        return self._log.read_bytes()

    def latest_logs(self) -> bytes:
        """Return what it has logged since it was started the last time."""
        return self.logs()[self._begins :]

    def kill(self, which: str | int | None = None) -> None:
        """Send it a signal; SIGKILL, the default, goes to its children, too, and is waited for."""
        number = _signal(which)
        if number != signal.SIGKILL:
            self._process.send_signal(number)
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # they are gone
        self._process.wait()

    def stop(self, timeout: float = 10) -> None:
        """Stop it with SIGTERM; after `timeout` seconds kill it."""
        self.kill('SIGTERM')
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self, timeout: float = 10) -> None:
        """Stop it, within `timeout` seconds, and start it again."""
        self.stop(timeout)
        self.start()

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        """Wait up to `timeout` seconds for its end and return its `StatusCode`; *raises* `subprocess.TimeoutExpired`."""
        return {'StatusCode': self._process.wait(timeout)}

    def exec_run(self, cmd: str | Sequence[str]) -> ExecResult:
        """Run another program in the same place; return `exit_code` and `output`. `WORKER_PID` tells it whom to ask about."""
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
    """The server under test. Only the embedded one can be killed and restarted, and loses its data then."""

    def __init__(self, server: Server) -> None:
        super().__init__('couchdb', {'COUCHDB_USER': server.user, 'COUCHDB_PASSWORD': server.password})
        self._server = server

    @property
    def status(self) -> str:
        """'running' or 'exited'; that of a server which is not ours is not known, and said to be 'running'."""
        own = self._server.process
        running = own is None or (own.process is not None and own.process.poll() is None)
        return 'running' if running else 'exited'

    def logs(self) -> bytes:
        """Return nothing: the embedded server has no log, and that of another one is out of reach."""
        return b''

    def kill(self, which: str | int | None = None) -> None:
        """Send the embedded server a signal; *raises* `RuntimeError` if the server is another one."""
        number, own = _signal(which), self._own()
        if number in (signal.SIGKILL, signal.SIGTERM):
            own.stop(kill=number == signal.SIGKILL)
        else:
            os.kill(own.pid, number)

    def restart(self, timeout: float = 10) -> None:
        """Start the embedded server anew, at the same address; *raises* `RuntimeError` if the server is another one."""
        own = self._own()
        own.stop()
        own.start()

    def _own(self) -> EmbeddedServer:
        if self._server.process is None:
            raise RuntimeError(
                "the server that COUCHDB_URL names is not the tests' own, and so not killed or restarted; "
                'unset COUCHDB_URL to test on an embedded one'
            )
        return self._server.process


def _signal(given: str | int | None) -> int:
    """Return a signal as Docker reads it: a number, a name with or without `SIG`, or None for SIGKILL."""
    if isinstance(given, str) and not given.isdigit():
        return signal.Signals[f'SIG{given.upper().removeprefix("SIG")}']
    return signal.SIGKILL if given is None else int(given)


def _of_this_interpreter(words: Sequence[str]) -> list[str]:
    return [*_PROGRAMS.get(words[0], words[:1]), *words[1:]]
