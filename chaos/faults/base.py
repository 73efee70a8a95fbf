"""What all faults have in common: they choose a victim, break it, and heal it after a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack

from ..site import LEASE, Site

__all__ = ['MOMENT', 'PAST_LEASE', 'WHILE', 'Fault']

#: For how long a fault may last, in seconds: for a moment, for less or more than the lease, or for longer than it in any case.
MOMENT, WHILE, PAST_LEASE = (0.0, 0.0), (1.0, LEASE + 3), (LEASE + 3, LEASE + 5)


class Fault:
    """One kind of fault. An instance is one that happens."""

    name: str
    span: tuple[float, float] = MOMENT
    #: Whether it is a reason for a task to run twice, and for one that was acknowledged early to be lost.
    interrupts, deadly = True, False
    #: By how many seconds the server's clock, by which planned tasks become due, is ahead meanwhile.
    ahead = 0.0
    #: Of the runs under way when it begins, it touches only those that began within so many seconds; None: all of them.
    touches: float | None = None

    def __init__(self, site: Site, target: int) -> None:
        self.site, self.target = site, target
        self.workers: list[str] | None = None
        self.pid: int | None = None

    @property
    def locks(self) -> list[threading.Lock]:
        """What must not be broken by another fault at the same time, in an order that all keep."""
        raise NotImplementedError

    def begin(self, children: Mapping[str, int]) -> None:
        """Break something. `children` are those in which the workers last began a run."""
        raise NotImplementedError

    def heal(self) -> None:
        """Mend it."""

    def happen(self, seconds: float, children: Mapping[str, int]) -> None:
        """Do all of it, and note it in the ledger."""
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
