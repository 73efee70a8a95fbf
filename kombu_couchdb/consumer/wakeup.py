"""The wakeup of an I/O thread: at once, or a little later, so that more work shares the next cycle."""

from __future__ import annotations

import time
from math import inf
from queue import Empty, SimpleQueue


class Wakeup:
    """The wakeup of the I/O thread: at once, or a little later, so that more work shares the next cycle.

    Any thread sets it, and one thread waits for it. `set` takes no lock that the same thread may hold: a finalizer may
    call it at any point, also during `wait`.
    """

    def __init__(self) -> None:
        self._times: SimpleQueue[float] = SimpleQueue()  # monotonic times by which a cycle should begin
        self._cycle_at = inf  # the earliest of those that were taken from the queue

    def set(self, within: float = 0.0) -> None:
        """Wake the waiting thread within `within` seconds. An earlier time from another call still counts."""
        self._times.put(time.monotonic() + within)

    def interrupt(self) -> None:
        """End a wait at once, without a cycle: something must be written before all else."""
        self._times.put(inf)

    def wait(self, timeout: float) -> bool:
        """Wait until the earliest time that was set, for at most `timeout` seconds; then forget all times, return True.

        Return False, and keep the times, if the wait was interrupted before.
        """
        end, interrupted = time.monotonic() + timeout, False
        while True:
            rest = min(end, self._cycle_at) - time.monotonic()
            try:
                # Empty the queue of times in any case: otherwise one `set` could end two waits.
                may_wait = rest > 0 and not interrupted
                at = self._times.get(timeout=rest) if may_wait else self._times.get_nowait()
            except Empty:
                if rest <= 0:
                    self._cycle_at = inf
                    return True
                if interrupted:
                    return False
            else:
                interrupted |= at == inf
                self._cycle_at = min(self._cycle_at, at)
