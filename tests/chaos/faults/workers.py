"""Faults of worker processes and of the listener."""

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
    """A fault of a worker."""

    @property
    def place(self) -> Place:
        """The place of the worker."""
        return self.site.places[self.target % len(self.site.places)]

    @property
    def locks(self) -> list[threading.Lock]:
        """The lock of the place."""
        return [self.place.lock]

    def begin(self, children: Mapping[str, int]) -> None:
        """Record the name of the worker."""
        self.workers = [self.place.worker]


class WorkerKilled(WorkerFault):
    """SIGKILL to a worker and all its children; another worker replaces it."""

    name, span, deadly = 'worker killed', (0.5, 4.0), True

    def begin(self, children: Mapping[str, int]) -> None:
        """Send SIGKILL."""
        super().begin(children)
        self.place.kill()

    def heal(self) -> None:
        """Start another worker."""
        self.place.start()


class WorkerPaused(WorkerFault):
    """SIGSTOP to a worker and all its children for longer than its lease."""

    name, span = 'worker paused past its lease', PAST_LEASE

    def begin(self, children: Mapping[str, int]) -> None:
        """Send SIGSTOP."""
        super().begin(children)
        self.place.signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Send SIGCONT."""
        self.place.signal(signal.SIGCONT)


class WorkerStopped(WorkerFault):
    """SIGTERM to a worker, which finishes its running tasks and releases the others.

    Celery's prefork pool then forgets tasks that a child has received and not yet confirmed, although they run: only
    such runs, which began within the last second, may be repeated.
    """

    name = 'worker stopped'
    touches: float | None = 1.0
    #: How many seconds the clock of the next worker is wrong.
    astray = 0.0

    def begin(self, children: Mapping[str, int]) -> None:
        """Send SIGTERM, and SIGKILL if the worker does not end."""
        super().begin(children)
        if not self.place.stop():
            self.touches, self.deadly = None, True

    def heal(self) -> None:
        """Start another worker."""
        self.place.start(self.astray)


class ClockAstray(WorkerStopped):
    """A worker whose clock is minutes fast or slow replaces another."""

    name = 'clock off by minutes'

    @property
    def astray(self) -> float:  # type: ignore[override]
        """Between one and five minutes, fast or slow."""
        return (60.0 + self.target % 240) * (1 if self.target % 2 else -1)


class ChildFault(WorkerFault):
    """A fault of one child of a pool: the one that last began a run."""

    _place: Place | None = None

    @property
    def place(self) -> Place:
        """The place of a worker with child processes."""
        return self._place or self._places[0]

    @property
    def _places(self) -> list[Place]:
        able = [place for place in self.site.places if place.has_children]
        first = self.target % len(able)
        return able[first:] + able[:first]

    def happen(self, seconds: float, children: Mapping[str, int]) -> None:
        """Choose a worker that has begun a run of a task: near the end a new worker may never begin one."""
        self._place = next((place for place in self._places if place.worker in children), None)
        super().happen(seconds, children)

    def strike(self, children: Mapping[str, int], number: int) -> None:
        """Send a signal to the child."""
        super().begin(children)
        deadline = time.monotonic() + _PATIENCE
        while self.pid is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f'{self.place.worker} has begun no task for {_PATIENCE:g} s')
            child = children.get(self.place.worker)  # a new worker may not have begun its first run
            try:
                if child is not None:
                    os.kill(child, number)
                    self.pid = child
            except ProcessLookupError:
                pass
            if self.pid is None:
                time.sleep(0.1)


class ChildKilled(ChildFault):
    """SIGKILL to a child, which the pool replaces."""

    name, deadly = 'pool child killed', True

    def begin(self, children: Mapping[str, int]) -> None:
        """Send SIGKILL."""
        self.strike(children, signal.SIGKILL)


class ChildPaused(ChildFault):
    """SIGSTOP to a child for longer than the lease. Its parent renews the lease, so nothing may run twice."""

    name, span, interrupts = 'pool child paused past the lease', PAST_LEASE, False

    def begin(self, children: Mapping[str, int]) -> None:
        """Send SIGSTOP."""
        self.strike(children, signal.SIGSTOP)

    def heal(self) -> None:
        """Send SIGCONT."""
        assert self.pid is not None
        with suppress(ProcessLookupError):  # its worker may have ended meanwhile and stopped it
            os.kill(self.pid, signal.SIGCONT)


class ListenerPaused(Fault):
    """SIGSTOP to the listener until its lease has expired and its queue is deleted. It affects no task."""

    name, span, interrupts = 'listener paused past its lease', (LEASE + 11, LEASE + 13), False

    @property
    def locks(self) -> list[threading.Lock]:
        """The lock of the listener."""
        assert self.site.listener is not None
        return [self.site.listener.lock]

    def begin(self, children: Mapping[str, int]) -> None:
        """Send SIGSTOP."""
        assert self.site.listener is not None
        self.workers = []
        self.site.listener.process.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Send SIGCONT."""
        assert self.site.listener is not None
        self.site.listener.process.send_signal(signal.SIGCONT)
