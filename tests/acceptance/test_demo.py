"""The demo, run as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.errors import DatabaseMissing
from tests.conftest import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]

#: How long the whole demo may take on a slow machine, in seconds.
WHOLE = 600.0

WORK = (
    '300 tasks in a group',
    'a task that fails twice',
    'a chain of 3 tasks',
    'a chord of 10 tasks',
    'a task, process killed',
    'a task, worker killed',
    '10 tasks due in 4 s',
    '10 tasks due in 8 s',
)


class Demo:
    """A running demo and its output."""

    def __init__(self, folder: Path, url: str) -> None:
        self._output = folder / 'output'
        self.temporary = folder / 'temporary'
        self.temporary.mkdir()
        environment = {**os.environ, 'COUCHDB_URL': url, 'TMPDIR': str(self.temporary), 'PYTHONUNBUFFERED': '1'}
        with self._output.open('wb') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'examples.demo', '--patient'],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        """The output on standard output and standard error."""
        return self._output.read_text(encoding='utf-8', errors='replace')

    @property
    def databases(self) -> list[str]:
        """The names of the demo's databases; empty before the demo has printed them."""
        found = re.search(r'^Databases: (\S+), (\S+); deleted at the end$', self.output, re.M)
        return list(found.groups()) if found else []

    def processes(self) -> list[psutil.Process]:
        """Return the demo's workers and their pools."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers_left(self) -> list[list[str]]:
        """Return the command lines of processes that contain the name of one of the databases."""
        lines = (process.info['cmdline'] or [] for process in psutil.process_iter(['cmdline']))
        return [line for line in lines if any(self.databases[0] in word for word in line)]


def runs(process: psutil.Process) -> bool:
    """Tell whether a process runs. A zombie counts as ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Demo]]:
    """A function that starts a demo on the server with this URL. A demo that still runs is stopped after the test."""
    demos: list[Demo] = []

    def start(url: str) -> Demo:
        demos.append(Demo(tmp_path, url))
        return demos[-1]

    yield start
    for demo in demos:
        demo.process.terminate()
        demo.process.wait(PATIENCE)


def assert_nothing_left(demo: Demo, server: Server) -> None:
    """Check that an ended demo has left no process, database or file."""
    wait_for(lambda: not demo.workers_left(), 'the workers to end')
    assert len(demo.databases) == 2
    for name in demo.databases:
        with pytest.raises(DatabaseMissing):
            server.client(name).sequence()
    assert not list(demo.temporary.iterdir())


def test_demo_succeeds(start: Callable[[str], Demo], server: Server) -> None:
    demo = start(server.url)
    status = demo.process.wait(WHOLE)
    assert status == 0, demo.output
    for what in WORK:
        assert re.search(rf'^{what} .* ok$', demo.output, re.M), demo.output
    assert 'Everything succeeded' in demo.output
    assert_nothing_left(demo, server)


@pytest.mark.parametrize(('number', 'status'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_demo_cleans_up(start: Callable[[str], Demo], server: Server, number: int, status: int) -> None:
    demo = start(server.url)
    wait_for(lambda: 'workers w1 and w2 are ready' in demo.output, 'the workers to be ready', WHOLE)
    workers = demo.processes()
    assert len(workers) >= 6  # two workers, each with a pool of two
    demo.process.send_signal(number)
    assert demo.process.wait(PATIENCE) == status, demo.output
    assert 'Traceback' not in demo.output
    wait_for(lambda: not any(runs(process) for process in workers), 'the processes to end')
    assert_nothing_left(demo, server)
