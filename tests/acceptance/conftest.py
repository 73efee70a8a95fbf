"""A site: two databases, an app that publishes, and real workers."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import Result
from pytest_celery import CeleryTestWorker

import celery_couchdb.design
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.queues.databases import broadcasts_of
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, PATIENT, PATIENT_BROKER, wait_for
from tests.parcels import database_of_parcels
from tests.support import ROOT, command_of, end
from tests.worker_process import WorkerProcess

#: The files in the folder of a worker.
APP = {'app.py': b'from tests.acceptance.app import app'}


class Site:
    """A broker's database and a result database, with an app and workers."""

    def __init__(self, server: Server, database: str, results: str, folder: Path) -> None:
        self.server, self.database, self.results, self.folder = server, database, results, folder
        self.environment: dict[str, Any] = {
            'BROKER_URL': server.couchdb_url(database),
            'RESULT_URL': server.couchdb_url(results),
        }
        self.app = self._app()
        #: A client for the broker's database, as an administrator.
        self.client = server.client(database)
        self.journal = folder / 'journal'
        self.workers: list[CeleryTestWorker] = []

    def set_up(self, *members: str) -> None:
        """Set up the databases for these members, as an administrator."""
        broker, results = (self.server.client(name) for name in (self.database, self.results))
        for wanted in (
            Wanted(broker, design.documents(), members),
            Wanted(broadcasts_of(broker), [], members, users_of=broker),
            Wanted(results, [celery_couchdb.design.document()], members),
        ):
            for step in plan(wanted):
                if step.do:
                    step.do()

    def use(self, broker_url: str, result_url: str) -> None:
        """Use these URLs from now on, in the app and in new workers."""
        end(self.app)
        self.environment = {'BROKER_URL': broker_url, 'RESULT_URL': result_url}
        self.app = self._app()

    def _app(self) -> Celery:
        app = Celery(
            'acceptance',
            set_as_current=False,
            broker=self.environment['BROKER_URL'],
            backend=self.environment['RESULT_URL'],
        )
        app.conf.update(broker_transport_options=PATIENT_BROKER, result_backend_transport_options=PATIENT)
        return app

    def use_results(self, url: str) -> None:
        """Store results at this URL, unless it is '', in the app before it has used its backend and in new workers."""
        if url:
            self.environment['RESULT_URL'] = self.app.conf.result_backend = url

    def use_as(self, user: str, password: str = '') -> None:
        """Use the databases as this user from now on; '' is anonymous."""
        self.use(*(self.server.couchdb_url(name, user, password) for name in (self.database, self.results)))

    def start(self, *arguments: str, pool: str = 'threads', concurrency: int = 2, **settings: Any) -> CeleryTestWorker:
        """Start a worker with Celery settings, without waiting until it is ready.

        pytest shows its log if the test fails.
        """
        command = WorkerProcess.command('--pool', pool, '--concurrency', str(concurrency), *arguments)
        environment = {**self.environment, 'SETTINGS': json.dumps(settings)}
        return self.run(command, environment, APP)

    def run(self, command: list[str], environment: dict[str, str], content: dict[str, bytes]) -> CeleryTestWorker:
        """Start a worker of any app, in a folder with `content`, without waiting until it is ready."""
        folder = self.folder / f'worker{len(self.workers) + 1}'
        self.workers.append(CeleryTestWorker(WorkerProcess(command, environment, content, folder), self.app))
        return self.workers[-1]

    def worker(self, *arguments: str, **settings: Any) -> CeleryTestWorker:
        """Start a worker and wait until it is ready."""
        worker = self.start(*arguments, **settings)
        worker.ready()
        return worker

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        """Send a task and return its result."""
        return self.app.send_task(name, args, **options)

    def through(self, proxy: Proxy, url: str) -> str:
        """Return the URL that leads through the proxy."""
        return url.replace(f':{self.server.port}/', f':{proxy.port}/')

    def reroute(self, proxy: Proxy, *variables: str) -> None:
        """Let new workers use the proxy for these URLs."""
        for variable in variables:
            self.environment[variable] = self.through(proxy, self.environment[variable])

    def go_on(self) -> None:
        """Let the tasks end that wait for the file `go on`."""
        self.journal.with_name('go on').touch()

    def journalled(self) -> list[str]:
        """Return the lines that tasks have written to the journal."""
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def close(self) -> None:
        """Stop all workers, print their logs, and close the app."""
        for worker in self.workers:
            worker.teardown()
            print(f'---- log of {worker.hostname()}\n{worker.logs()}')
        # A result that the garbage collector finds later would ask Redis, which has ended then, to unsubscribe.
        self.app.backend.remove_pending_result = lambda result: result
        end(self.app)
        self.client.close()


def celery(*given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `celery` command with the app of the workers in a process of its own."""
    return subprocess.run(
        [sys.executable, '-m', 'celery', '-A', 'tests.acceptance.app', *given],
        cwd=ROOT,
        env={**os.environ, 'SETTINGS': '{}', **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def couchdb(site: Site, *given: str, **environment: str) -> Result:
    """Run a command of `celery couchdb` in this process, and check that its output contains no password."""
    done = command_of(site.app, **environment)(*given)
    assert f'{site.server.user}:{site.server.password}' not in done.output
    return done


def succeeded(done: Result) -> str:
    """Return the output of a command; fail the test if the command failed."""
    assert (done.exit_code, done.stderr) == (0, '')
    return done.stdout


def sentence(done: Result) -> str:
    """Return the error message of a failed command, which is one sentence."""
    assert (done.exit_code, done.stdout) == (1, '')
    [line] = done.stderr.splitlines()
    return line


def listed(site: Site, *given: str) -> list[dict[str, Any]]:
    """Return what a command prints with `--json`, one object for each line."""
    return [json.loads(line) for line in succeeded(couchdb(site, *given, '--json')).splitlines()]


@pytest.fixture
def site(server: Server, database: str, tmp_path: Path) -> Iterator[Site]:
    """A site without workers."""
    with server.fresh_database() as results:
        site = Site(server, database, results, tmp_path)
        yield site
        site.close()


@pytest.fixture
def proxy(site: Site) -> Iterator[Proxy]:
    """A proxy in front of the server, which nobody uses yet."""
    with Proxy(site.server.host, site.server.port) as proxy:
        yield proxy
        proxy.go_on()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is closed at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def parcels(site: Site, stack: ExitStack) -> Client:
    """A client for a database of parcels, which is set up, as an administrator."""
    return stack.enter_context(database_of_parcels(site.server))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The URL of a Redis server for this test alone."""
    program = shutil.which('redis-server')
    if program is None or importlib.util.find_spec('redis') is None:
        pytest.skip('redis-server or redis-py is not installed')
    socket = tmp_path / 'redis'
    with subprocess.Popen(
        [program, '--port', '0', '--unixsocket', str(socket), '--save', ''], cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as process:
        wait_for(socket.exists, 'Redis to be ready')
        yield f'redis+socket://{socket}'
        process.terminate()


@pytest.fixture
def results(backend: str, request: pytest.FixtureRequest) -> str:
    """The URL for the parameter `backend`, "" for CouchDB; a test names it before `site`, which ends first."""
    known = {'couchdb': '', 'disabled': 'disabled://'}
    return known[backend] if backend in known else request.getfixturevalue(backend)
