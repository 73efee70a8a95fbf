"""A site: databases of its own, an app that sends to it, and real workers that serve it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from kombu_couchdb.client import Client
from kombu_couchdb.errors import DatabaseMissing, NotFound
from tests.conftest import PATIENCE, Server, wait_for
from tests.support import ROOT


class Worker:
    """A `celery worker` process. Its log is shown when a test fails."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open('w') as file:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'celery', '-A', 'tests.acceptance.app', 'worker', '-l', 'INFO', '-n', name, *arguments],
                cwd=ROOT, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    def ready(self) -> Worker:
        """Wait until it is ready."""
        wait_for(lambda: ' ready.' in self.log or self.process.poll() is not None, 'the worker to be ready')
        assert self.process.poll() is None, self.log
        return self

    def terminate(self) -> int:
        """Stop it warmly and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill it, with all its children."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(PATIENCE)


class Site:
    """A broker's database and a result database, and what uses them."""

    def __init__(self, server: Server, database: str, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.database, self.results = database, f'{database}-results'
        self.environment = {'BROKER_URL': server.couchdb_url(database), 'RESULT_URL': server.couchdb_url(self.results)}
        self.app = Celery('acceptance', set_as_current=False, broker=self.environment['BROKER_URL'],
                          backend=self.environment['RESULT_URL'])
        self.client: Client = server.client(database)
        self.journal = folder / 'journal'
        self.workers: list[Worker] = []

    def start(self, *arguments: str, pool: str = 'threads', concurrency: int = 2, **settings: Any) -> Worker:
        """Start a worker, with Celery's settings, and return before it is ready."""
        number = len(self.workers) + 1
        self.workers.append(Worker(
            f'worker{number}@{self.database}', ['--pool', pool, '--concurrency', str(concurrency), *arguments],
            {**self.environment, 'SETTINGS': json.dumps(settings)}, self.folder / f'worker{number}.log'))
        return self.workers[-1]

    def worker(self, *arguments: str, **settings: Any) -> Worker:
        """Start a worker and wait until it is ready."""
        return self.start(*arguments, **settings).ready()

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        """Send a task and return its result."""
        return self.app.send_task(name, args, **options)

    def journalled(self) -> list[str]:
        """Return what the tasks have noted."""
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def close(self) -> None:
        """End all of it."""
        for worker in self.workers:
            worker.kill()
            print(f'---- log of {worker.name}\n{worker.log}')
        self.app.close()
        try:
            self.server.client(self.results).delete()
        except (NotFound, DatabaseMissing):
            pass


@pytest.fixture
def site(server: Server, database: str, tmp_path: Path) -> Iterator[Site]:
    """A site without workers."""
    site = Site(server, database, tmp_path)
    yield site
    site.close()
