"""What can happen to the processes of a worker."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from ..crew import Place
from ..site import LEASE
from .base import PAST_LEASE, Fault

__all__ = [
    'ChildKilled',
    'ChildPaused',
    'ClockAstray',
    'ListenerPaused',
    'WorkerKilled',
    'WorkerPaused',
    'WorkerStopped',
]

#: How long a worker may take to begin a task, in seconds.
_PATIENCE = 120.0


class WorkerFault(Fault):
    """One that hits a worker."""

    @property
    def place(self) -> Place:
        """Where the worker is."""
        return self.site.places[self.target % len(self.site.places)]

    @property
    def locks(self) -> list[threading.Lock]:
        """The place."""
        return [self.place.lock]

    def begin(self, children: Mapping[str, int]) -> None:
        """Note which worker it is."""
        self.workers = [self.place.worker]


class WorkerKilled(WorkerFault):
    """SIGKILL to a worker and all its children; another one is started in its place."""

    name, span, deadly = 'worker killed', (0.5, 4.0), True

    def begin(self, children: Mapping[str, int]) -> None:
        """Kill it."""
        super().begin(children)
        self.place.kill()

    def heal(self) -> None:
        """Start another one."""
        self.place.start()


class WorkerPaused(WorkerFault):
    """SIGSTOP to a worker and all its children, for longer than its lease."""

    name, span = 'worker paused past its lease', PAST_LEASE

    def begin(self, children: Mapping[str, int]) -> None:
        """Stop it from running."""
        super().begin(children)
        self.place.signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Let it run."""
        self.place.signal(signal.SIGCONT)


class WorkerStopped(WorkerFault):
    """SIGTERM to a worker, which ends its tasks and gives back the others.

    Celery's prefork pool then forgets what it gave to a child that has not confirmed it yet, though it runs: only such runs,
    which began at that very moment, may be repeated.
    """

    name = 'worker stopped'
    touches: float | None = 1.0
    #: By how many seconds the clock of the next one is wrong.
    astray = 0.0

    def begin(self, children: Mapping[str, int]) -> None:
        """Stop it."""
        super().begin(children)
        if not self.place.stop():
            self.touches, self.deadly = None, True

    def heal(self) -> None:
        """Start another one."""
        self.place.start(self.astray)


class ClockAstray(WorkerStopped):
    """A worker with a clock that is minutes fast or slow takes the place of another."""

    name = 'clock off by minutes'

    @property
    def astray(self) -> float:  # type: ignore[override]
        """Up to five minutes, one way or the other."""
        return (60.0 + self.target % 240) * (1 if self.target % 2 else -1)


class ChildFault(WorkerFault):
    """One that hits a single child of a pool, the one that began a run last."""

    _place: Place | None = None

    @property
    def place(self) -> Place:
        """Where the worker is: one with children."""
        return self._place or self._places[0]

    @property
    def _places(self) -> list[Place]:
        able = [place for place in self.site.places if place.has_children]
        first = self.target % len(able)
        return able[first:] + able[:first]

    def happen(self, seconds: float, children: Mapping[str, int]) -> None:
        """Let it happen to a worker that has begun a run: near the end a new one may never begin any."""
        self._place = next((place for place in self._places if place.worker in children), None)
        super().happen(seconds, children)

    def strike(self, children: Mapping[str, int], number: int) -> None:
        """Send it a signal."""
        super().begin(children)
        deadline = time.monotonic() + _PATIENCE
        while self.pid is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f'{self.place.worker} has begun no task for {_PATIENCE:g} s')
            child = children.get(self.place.worker)  # a new worker's first run may be yet to come
            try:
                if child is not None:
                    os.kill(child, number)
                    self.pid = child
            except ProcessLookupError:
                pass
            if self.pid is None:
                time.sleep(0.1)


class ChildKilled(ChildFault):
    """SIGKILL to a child; the pool replaces it."""

    name, deadly = 'pool child killed', True

    def begin(self, children: Mapping[str, int]) -> None:
        """Kill it."""
        self.strike(children, signal.SIGKILL)


class ChildPaused(ChildFault):
    """SIGSTOP to a child, for longer than the lease, which its parent keeps: no reason for anything to run twice."""

    name, span, interrupts = 'pool child paused past the lease', PAST_LEASE, False

    def begin(self, children: Mapping[str, int]) -> None:
        """Stop it from running."""
        self.strike(children, signal.SIGSTOP)

    def heal(self) -> None:
        """Let it run."""
        assert self.pid is not None
        with suppress(ProcessLookupError):  # its worker may have ended it meanwhile, when it was asked to stop
            os.kill(self.pid, signal.SIGCONT)


class ListenerPaused(Fault):
    """SIGSTOP to the listener, until others have ended its lease and removed its queue; no task has to do with it."""

    name, span, interrupts = 'listener paused past its lease', (LEASE + 11, LEASE + 13), False

    @property
    def locks(self) -> list[threading.Lock]:
        """The listener."""
        assert self.site.listener is not None
        return [self.site.listener.lock]

    def begin(self, children: Mapping[str, int]) -> None:
        """Stop it from running."""
        assert self.site.listener is not None
        self.workers = []
        self.site.listener.process.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Let it run."""
        assert self.site.listener is not None
        self.site.listener.process.send_signal(signal.SIGCONT)
