"""A process with the interface of a pytest-celery container. Needs neither server nor worker."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pytest_docker_tools.exceptions import ContainerFailed

from celery_couchdb.testing import LocalWorkerContainer
from celery_couchdb.testing.process import Process
from tests.conftest import PATIENCE, wait_for

#: A program that prints that it is ready, and ends with a message on SIGTERM. A signal before `sigwait` is not lost.
SERVICE = """
import signal, sys
awaited = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print('ready.', flush=True)
while signal.sigwait(awaited) == signal.SIGUSR1:
    print('nudged', flush=True)
sys.exit('asked to end')
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """A function that starts Python with a program and arguments."""
    started: list[Process] = []

    def start(program: str, *arguments: str, **environment: str) -> Process:
        folder = tmp_path / f'place{len(started)}'
        folder.mkdir()
        started.append(Process(['python', '-c', program, *arguments], environment, folder))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def log(process: Process) -> str:
    return process.logs().decode()


def ready(process: Process) -> Process:
    wait_for(lambda: 'ready.' in process.latest_logs().decode(), 'the program to be ready')
    return process


def test_process_runs_in_its_folder_with_this_python(start: Callable[..., Process], tmp_path: Path) -> None:
    process = start(
        'import os, sys; print(sys.executable, os.getcwd(), sys.argv[1], os.environ["NAME"])', 'at@%h', NAME='value'
    )
    assert process.wait(PATIENCE) == {'StatusCode': 0}
    assert log(process).split() == [sys.executable, str(tmp_path / 'place0'), f'at@{process.hostname}', 'value']
    assert process.attrs['Config'] == {'Hostname': process.hostname, 'Env': ['NAME=value']}
    assert process.hostname == process.id[:12]


def test_import_path_has_the_folder_first_and_then_that_of_the_tests(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    process = ready(start(SERVICE, PYTHONPATH='/elsewhere'))
    (tmp_path / 'place0' / 'celery.py').write_text('')
    script = tmp_path / 'script.py'
    script.write_text('import celery, kombu_couchdb, sys; print(celery.__file__, "/elsewhere" in sys.path)')
    exit_code, output = process.exec_run(f'python {script}')
    assert (exit_code, output.decode().strip()) == (0, f'{tmp_path / "place0" / "celery.py"} True')


def test_exec_run_returns_status_and_output(start: Callable[..., Process]) -> None:
    process = ready(start(SERVICE))
    program = 'import os, sys; print("oh", file=sys.stderr, flush=True); print(os.environ["WORKER_PID"]); sys.exit(3)'
    assert process.exec_run(['python', '-c', program]) == (3, f'oh\n{process.pid}\n'.encode())


@pytest.mark.parametrize('which', ['SIGUSR1', 'usr1', signal.SIGUSR1.value, str(signal.SIGUSR1.value)])
def test_signals_have_the_names_of_docker(start: Callable[..., Process], which: Any) -> None:
    process = ready(start(SERVICE))
    process.kill(which)
    wait_for(lambda: 'nudged' in log(process), 'the signal')
    assert process.status == 'running'


def test_children_are_killed_with_the_process(start: Callable[..., Process]) -> None:
    program = f'import subprocess, sys; subprocess.Popen([sys.executable, "-c", {SERVICE!r}]).wait()'
    process = ready(start(program))
    [child] = psutil.Process(process.pid).children()
    process.kill()
    assert process.status == 'exited'
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 'the child to end')
    process.kill()  # a second call has no effect


def test_restart_stops_cleanly_and_keeps_the_log(start: Callable[..., Process]) -> None:
    process = ready(start(SERVICE))
    first, identity = process.pid, process.id
    process.restart(PATIENCE)
    assert process.pid != first
    assert process.id == identity
    ready(process)
    assert log(process).split('\n')[:3] == ['ready.', 'asked to end', 'ready.']
    assert 'asked' not in process.latest_logs().decode()


def test_stop_kills_a_process_that_does_not_end(start: Callable[..., Process]) -> None:
    program = (
        'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print("ready.", flush=True); signal.pause()'
    )
    process = ready(start(program))
    process.stop(timeout=0.1)
    assert process.wait(PATIENCE) == {'StatusCode': -signal.SIGKILL}


# -- workers


def test_restarted_worker_is_ready_only_after_a_new_log_line(start: Callable[..., Process]) -> None:
    worker = LocalWorkerContainer(
        start('import os; os.path.exists("ran") and os._exit(5); open("ran", "w")\n' + SERVICE)
    )
    assert worker.ready()
    assert worker.terminate(PATIENCE) == 1
    with pytest.raises(ContainerFailed):
        worker.restart()


def test_worker_that_cannot_start_is_not_awaited(start: Callable[..., Process]) -> None:
    worker = LocalWorkerContainer(start('import sys; sys.exit("no such app")'))
    with pytest.raises(ContainerFailed, match=r'ended before it was ready|already exited'):
        worker.ready()
    assert 'no such app' in worker.logs()
