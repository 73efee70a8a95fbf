"""Base class of faults: choose a victim, break it, and heal it later."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack

from ..site import LEASE, Site

__all__ = ['MOMENT', 'PAST_LEASE', 'WHILE', 'Fault']

#: How long a fault may last, in seconds: a moment, shorter or longer than the lease, or always longer than the lease.
MOMENT, WHILE, PAST_LEASE = (0.0, 0.0), (1.0, LEASE + 3), (LEASE + 3, LEASE + 5)


class Fault:
    """A kind of fault. An instance is one occurrence."""

    name: str
    span: tuple[float, float] = MOMENT
    #: Whether it explains that a task runs twice, and that a task acknowledged early is lost.
    interrupts, deadly = True, False
    #: How many seconds the server's clock, which decides when tasks are due, is ahead meanwhile.
    ahead = 0.0
    #: It interrupts only runs that began within this many seconds before it; None: all runs.
    touches: float | None = None

    def __init__(self, site: Site, target: int) -> None:
        self.site, self.target = site, target
        self.workers: list[str] | None = None
        self.pid: int | None = None

    @property
    def locks(self) -> list[threading.Lock]:
        """The locks of what no other fault may break at the same time, always in the same order."""
        raise NotImplementedError

    def begin(self, children: Mapping[str, int]) -> None:
        """Break the victim. `children` has the process id of the child that last began a run, by worker."""
        raise NotImplementedError

    def heal(self) -> None:
        """Repair the victim."""

    def happen(self, seconds: float, children: Mapping[str, int]) -> None:
        """Break the victim, wait `seconds`, repair it, and record the fault in the ledger."""
        with ExitStack() as held:
            for lock in self.locks:
                held.enter_context(lock)
            began = time.monotonic()
            self.begin(children)
            try:
                time.sleep(seconds)
            finally:
                self.heal()
            self.site.ledger.note(
                'fault',
                name=self.name,
                began=began,
                ended=time.monotonic(),
                workers=self.workers,
                pid=self.pid,
                interrupts=self.interrupts,
                deadly=self.deadly,
                ahead=self.ahead,
                since=None if self.touches is None else began - self.touches,
            )
