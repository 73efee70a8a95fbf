"""The demo of a managed service: two workers behind the limits of the smallest plan, one of which is killed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from celery.exceptions import CeleryError
from kombu.exceptions import KombuError

from examples.demo import journal as journals
from examples.demo.interrupts import Interrupts, TimeIsUp
from examples.demo.journal import Journal
from examples.demo.run import run_demo
from examples.demo.screen import Screen
from examples.demo.server import Databases, DemoError, databases
from examples.demo.workers import Worker, logs_of
from kombu_couchdb.couchdb.pacing import RequestKind
from kombu_couchdb.errors import CouchDBError

from .service import PLANS, TOKENS, Service

#: The plan, how many tasks are sent, and after how many of them a worker is killed.
_PLAN, _TASKS, _KILL_AFTER = 'lite', 100, 30

#: For how many seconds a token is valid.
_TOKEN = 60.0

#: Time limits in seconds: for the tasks, for reading their results, for the end of a worker.
_LIMIT, _RESULTS, _END = 150.0, 30.0, 20.0

_NAMES = {RequestKind.READ: 'reads', RequestKind.WRITE: 'writes', RequestKind.QUERY: 'queries'}

#: A row of the table.
_ROW = '{:<12} {:>6} {:>19} {:>11} {:>8}'


def run(interrupts: Interrupts) -> int:
    """Read the command line, run the demo and return its exit status."""
    return run_demo(
        lambda patience: Demo(interrupts, patience).play(),
        'python -m examples.managed',
        'Run tasks behind the limits of a managed service, on $COUCHDB_URL or else on an embedded server.',
    )


class Demo:
    """One run of the demo."""

    def __init__(self, interrupts: Interrupts, patience: float) -> None:
        self._interrupts, self._patience = interrupts, patience
        self._screen = Screen()
        self._workers: list[Worker] = []
        self._results: list[Any] = []
        #: What is wrong, in sentences.
        self._troubles: list[str] = []

    def play(self) -> bool:
        """Run the demo, clean up, show the outcome, and return whether everything succeeded.

        *Raises* `DemoError`, `CouchDBError` or `EmbeddedServerError` if it cannot begin, and `Stopped`.
        """
        with ExitStack() as stack:
            try:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix='celery-couchdb-demo-')))
                self._journal = Journal(folder / 'journal')
                stack.callback(self._journal.close)
                own = stack.enter_context(databases(self._screen, self._interrupts))
                key = secrets.token_urlsafe()
                self._service = Service(own.server.geturl(), PLANS[_PLAN], api_key=key, token_seconds=_TOKEN)
                stack.enter_context(self._service)
                through = urlsplit(self._service.url.replace('//', f'//:{key}@'))
                os.environ.update(Databases(through, own.name).environment, TOKEN_URL=self._service.url + TOKENS)
                os.environ[journals.VARIABLE] = str(folder / 'journal')
                stack.callback(self._kill_workers)
                limits = ', '.join(f'{limit} {_NAMES[kind]}' for kind, limit in PLANS[_PLAN].items())
                self._screen.say(f'Service:   at most {limits} in a second; tokens end after {_TOKEN:.0f} s')
                self._perform(folder, own.name)
                logs = logs_of(self._workers) if self._troubles else []
            finally:
                self._interrupts.hold()
        self._troubles += own.left
        self._interrupts.check()
        self._report(logs)
        return not self._troubles

    # -- the run

    def _perform(self, folder: Path, name: str) -> None:
        """Send the tasks, kill a worker, and read the results; record what is wrong."""
        try:
            with self._interrupts.limit(_LIMIT * self._patience):
                for worker in ('w1', 'w2'):
                    with self._interrupts.held():  # a started process must be in the list, to be killed at the end
                        self._workers.append(Worker(worker, name, folder, 'examples.managed.tasks'))
                self._wait(lambda: len(self._journal.ready) == 2, 'starting two workers')
                self._screen.report('the workers w1 and w2 are ready')
                self._send()
                self._wait(lambda: self._finished() >= _KILL_AFTER and self._holder(), '')
                victim = next(worker for worker in self._workers if worker.name == self._holder())
                victim.kill()
                self._screen.report(f'{victim.name} was killed with all its processes while it ran a task')
                self._wait(lambda: self._finished() == _TASKS, '')
                self._screen.report('all tasks have ended')
            with self._interrupts.limit(_RESULTS * self._patience):
                self._check()
            self._end_workers()
        except TimeIsUp:
            self._troubles.append(f'it did not finish within {self._screen.now():.0f} s')
        except (DemoError, CouchDBError, KombuError, CeleryError) as exc:
            self._troubles.append(str(exc))

    def _send(self) -> None:
        from .tasks import add  # only now the environment names the databases

        for number in range(_TASKS):
            self._results.append(add.delay(number, number))
            self._journal.read()
            self._show()

    def _wait(self, condition: Callable[[], object], doing: str) -> None:
        """Wait until the condition is true; *raises* `DemoError` if a worker ends unexpectedly."""
        while True:
            self._journal.read()
            if condition():
                return
            for worker in self._workers:
                if worker.status is not None and not worker.killed:
                    raise DemoError(f'{worker.name} ended unexpectedly, with status {worker.status}')
            self._interrupts.check()
            self._show(doing)
            time.sleep(0.05)

    def _show(self, doing: str = '') -> None:
        counts = self._service.snapshot()
        used = ', '.join(f'{counts["units"].get(kind.value, 0)} {_NAMES[kind]}' for kind in PLANS[_PLAN])
        tasks = doing or f'{len(self._results)} tasks sent, {self._finished()} have ended'
        self._screen.show(f'{tasks} | {used}; refused: {sum(counts["refused"].values())}')

    def _finished(self) -> int:
        return sum(self._journal.succeeded(result.id) for result in self._results)

    def _holder(self) -> str | None:
        """Return the name of a worker that runs a task."""
        runs = (runs[-1] for runs in self._journal.runs.values() if runs)
        return next((run.worker for run in runs if run.finished is None), None)

    def _check(self) -> None:
        values = [result.get(timeout=_RESULTS * self._patience) for result in self._results]
        if values != [2 * number for number in range(_TASKS)]:
            self._troubles.append('some results are wrong')
        killed = {worker.name for worker in self._workers if worker.killed}
        for task_id, runs in self._journal.runs.items():
            if len(runs) > 1 and runs[0].worker not in killed:
                self._troubles.append(f'{task_id} ran {len(runs)} times, although its worker was not killed')

    def _end_workers(self) -> None:
        for worker in [worker for worker in self._workers if worker.status is None]:
            worker.terminate()
            self._screen.show(f'stopping {worker.name}')
            if not worker.wait(_END * self._patience):
                self._troubles.append(f'{worker.name} did not stop correctly')

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()

    # -- afterwards

    def _report(self, logs: list[str]) -> None:
        counts = self._service.snapshot()
        self._screen.say('')
        self._screen.say(_ROW.format('in this run', 'limit', 'most in one second', 'on average', 'refused'))
        for kind, limit in PLANS[_PLAN].items():
            units, busiest, refused = (counts[name].get(kind.value, 0) for name in ('units', 'busiest', 'refused'))
            self._screen.say(_ROW.format(_NAMES[kind], limit, busiest, f'{units / counts["seconds"]:.1f}', refused))
        self._screen.say(f'\nrefused again when they were sent again: {len(counts["refused_again"])} requests')
        if self._service.tokens is not None:
            self._screen.say(f'{self._service.tokens.count} tokens were handed out')
        self._screen.say('')
        if self._troubles:
            self._screen.say('\n'.join(['Something failed:', *(f'- {trouble}' for trouble in self._troubles), *logs]))
        else:
            self._screen.say(
                f'Everything succeeded in {self._screen.now():.0f} s: {_TASKS} tasks, none lost, and none run again '
                f'except\nthose of the killed worker. All processes have ended; the databases are deleted.'
            )
