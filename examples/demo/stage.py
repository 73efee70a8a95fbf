"""The course of the demo: workers, scenes and the final report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from celery.signals import after_task_publish
from kombu.exceptions import KombuError

from kombu_couchdb.errors import CouchDBError

from . import journal as journals
from .interrupts import Interrupts, TimeIsUp
from .journal import Journal
from .scenes import Burst, Chain, Chord, Crash, Retry, Scene, Scheduled, WorkerKilled
from .screen import Screen
from .server import DemoError, databases
from .workers import Worker, logs_of

#: Time limits in seconds: for the work, for reading the results, for the end of a worker.
_LIMIT, _JUDGE, _END = 42.0, 5.0, 6.0


class Stage:
    """One run of the demo."""

    def __init__(self, interrupts: Interrupts, patience: float) -> None:
        self._interrupts, self._patience = interrupts, patience
        self._screen = Screen()
        self._workers: list[Worker] = []
        self._killed = WorkerKilled(patience)
        self._first: list[Scene] = [kind(patience) for kind in (Burst, Retry, Chain, Chord, Crash)]
        self._second: list[Scene] = [self._killed, Scheduled(patience, 4), Scheduled(patience, 8)]
        #: Problems outside the scenes, in sentences.
        self._troubles: list[str] = []

    @property
    def _scenes(self) -> list[Scene]:
        return [*self._first, *self._second]

    def play(self) -> bool:
        """Run the demo, clean up, show the outcome, and return whether everything succeeded.

        *Raises* `DemoError`, `CouchDBError` or `EmbeddedServerError` if it cannot begin, and `Stopped`.
        """
        with ExitStack() as stack:
            try:
                folder = Path(
                    stack.enter_context(TemporaryDirectory(prefix='celery-couchdb-demo-', ignore_cleanup_errors=True))
                )
                self._journal = Journal(folder / 'journal')
                stack.callback(self._journal.close)
                self._database = stack.enter_context(databases(self._screen, self._interrupts))
                # These settings would take precedence.
                for name in ('CELERY_BROKER_READ_URL', 'CELERY_BROKER_WRITE_URL'):
                    os.environ.pop(name, None)
                os.environ.update(self._database.environment)
                os.environ[journals.VARIABLE] = str(folder / 'journal')
                stack.callback(self._kill_workers)
                after_task_publish.connect(self._on_published)
                self._perform(folder)
                if not self._troubles:
                    self._end_workers()
                logs = logs_of(self._workers) if self._failed else []
            finally:
                self._interrupts.hold()
        self._troubles += self._database.left
        self._interrupts.check()
        self._report(logs)
        return not self._failed

    @property
    def _failed(self) -> bool:
        return bool(self._troubles or any(scene.flaws for scene in self._scenes))

    # -- the run

    def _perform(self, folder: Path) -> None:
        """Run all scenes; record problems in `_troubles` and in the scenes."""
        try:
            with self._interrupts.limit(_LIMIT * self._patience):
                self._start_workers(folder)
                self._send(*self._first)
                self._wait_for(self._first)
                self._send(self._killed)
                self._wait(lambda: self._killed.holder(self._journal), 'starting a task whose worker will be killed')
                victim = next(w for w in self._workers if w.name == self._killed.holder(self._journal))
                victim.kill()
                self._screen.report(f'{victim.name} was killed with all its processes while it ran a task')
                self._send(*self._second[1:])
                self._wait_for(self._second)
        except TimeIsUp:
            self._troubles.append(f'it did not finish within {self._screen.now():.0f} s')
        except (DemoError, CouchDBError, KombuError) as exc:
            self._troubles.append(str(exc))
        self._journal.read()
        try:
            with self._interrupts.limit(_JUDGE * self._patience):
                for scene in self._scenes:
                    scene.judge(self._journal)
        except TimeIsUp:
            self._troubles.append('the results could not be read in time')

    def _start_workers(self, folder: Path) -> None:
        for name in ('w1', 'w2'):
            with self._interrupts.held():  # a started process must be in the list, so that it is killed at the end
                self._workers.append(Worker(name, self._database.name, folder))
        self._wait(lambda: len(self._journal.ready) == len(self._workers), 'starting two workers')
        self._screen.report('the workers w1 and w2 are ready')

    def _send(self, *scenes: Scene) -> None:
        for scene in scenes:
            self._sending, self._sent = scene, 0
            scene.send()

    def _on_published(self, **_: Any) -> None:
        self._sent += 1
        self._screen.show(f'sending {self._sending.what}: {self._sent}')

    def _wait_for(self, scenes: list[Scene]) -> None:
        self._wait(lambda: all(scene.done(self._journal) for scene in scenes), '')

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
            self._screen.show(doing or self._progress())
            time.sleep(0.05)

    def _progress(self) -> str:
        running = [scene for scene in self._scenes if scene.sent and not scene.done(self._journal)]
        return ' | '.join(f'{scene.short} {scene.progress(self._journal)}' for scene in running)

    def _end_workers(self) -> None:
        """Let the running workers finish their tasks and end."""
        living = [worker for worker in self._workers if worker.status is None]
        for worker in living:
            worker.terminate()
        for worker in living:
            self._screen.show(f'stopping {worker.name}')
            if not worker.wait(_END * self._patience):
                self._troubles.append(f'{worker.name} did not stop correctly')

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()

    # -- afterwards

    def _report(self, logs: list[str]) -> None:
        if any(scene.sent for scene in self._scenes):
            self._screen.table(self._scenes, self._journal)
        if not self._failed:
            count = sum(len(scene.ids) for scene in self._scenes)
            self._screen.say(
                f'Everything succeeded in {self._screen.now():.0f} s: {count} tasks, none lost, and none run again '
                f'except\nafter a failure or a killed process. All processes have ended; the databases are deleted.'
            )
            return
        self._screen.say('Something failed:')
        for trouble in self._troubles:
            self._screen.say(f'- {trouble}')
        for scene in self._scenes:
            for flaw in scene.flaws:
                self._screen.say(f'- {scene.what}: {flaw}')
        for line in logs:
            self._screen.say(line)
