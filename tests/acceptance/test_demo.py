"""The demo, run as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.errors import DatabaseMissing
from tests.conftest import PATIENCE, wait_for
from tests.support import ROOT

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

    def __init__(self, folder: Path, server: Server) -> None:
        self._server, self._output, self._temporary = server, folder / 'output', folder / 'temporary'
        self._temporary.mkdir()
        variables = {'COUCHDB_URL': server.url, 'TMPDIR': str(self._temporary), 'PYTHONUNBUFFERED': '1'}
        with self._output.open('wb') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'examples.demo', '--patient'],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        """The output on standard output and standard error."""
        return self._output.read_text(encoding='utf-8', errors='replace')

    def left_nothing(self) -> None:
        """Check that the ended demo has left no process, database or file."""
        found = re.search(r'^Databases: (\S+), (\S+); deleted at the end$', self.output, re.M)
        assert found is not None, self.output

        def workers() -> list[list[str]]:
            lines = (process.info['cmdline'] or [] for process in psutil.process_iter(['cmdline']))
            return [line for line in lines if any(found[1] in word for word in line)]

        wait_for(lambda: not workers(), 'the workers to end')
        for name in found.groups():
            with pytest.raises(DatabaseMissing):
                self._server.client(name).sequence()
        assert not list(self._temporary.iterdir())


@pytest.fixture
def demo(tmp_path: Path, server: Server) -> Iterator[Demo]:
    """A demo. If it still runs after the test, it is stopped."""
    demo = Demo(tmp_path, server)
    yield demo
    demo.process.terminate()
    demo.process.wait(PATIENCE)


@pytest.mark.slow
def test_demo_succeeds(demo: Demo) -> None:
    status = demo.process.wait(WHOLE)
    assert status == 0, demo.output
    for what in WORK:
        assert re.search(rf'^{what} .* ok$', demo.output, re.M), demo.output
    assert 'Everything succeeded' in demo.output
    demo.left_nothing()


def test_interrupted_demo_cleans_up(demo: Demo) -> None:
    wait_for(lambda: 'workers w1 and w2 are ready' in demo.output, 'the workers to be ready', WHOLE)
    workers = psutil.Process(demo.process.pid).children(recursive=True)
    assert len(workers) >= 6  # two workers, each with a pool of two
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(PATIENCE) == 130, demo.output
    assert 'Traceback' not in demo.output
    _, running = psutil.wait_procs(workers, timeout=PATIENCE)
    assert not running
    demo.left_nothing()


def test_interrupt_while_a_class_is_made() -> None:
    """Python 3.11 and earlier raise a RuntimeError then, whose cause is the interrupt."""
    program = (
        'import os, signal, sys, types\n'
        'from examples.demo.__main__ import main\n'
        'class Field:\n'
        '    def __set_name__(self, owner, name): os.kill(os.getpid(), signal.SIGINT)\n'
        "sys.modules['made'] = types.SimpleNamespace(run=lambda interrupts: type('Made', (), {'field': Field()}))\n"
        "sys.exit(main('made'))\n"
    )
    ended = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (130, '')
