"""The wakeup of the I/O thread: at once, or a little later, so that more work shares the next cycle."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

__all__ = ['Wakeup']


class Wakeup:
    """Any thread sets it, and one thread waits for it.

    `set` takes no lock that the same thread may hold: a finalizer may call it at any point, also during `wait`.
    """

    def __init__(self) -> None:
        self._times: SimpleQueue[float] = SimpleQueue()  # monotonic times by which the thread should wake

    def set(self, within: float = 0.0) -> None:
        """Wake the waiting thread within `within` seconds. An earlier time from another call still counts."""
        self._times.put(time.monotonic() + within)

    def wait(self, timeout: float) -> None:
        """Wait until the earliest time that was set, for at most `timeout` seconds; then forget all times."""
        at = time.monotonic() + timeout
        while True:
            rest = at - time.monotonic()
            try:
                # Empty the queue of times in any case: otherwise one `set` could end two waits.
                at = min(at, self._times.get(timeout=rest) if rest > 0 else self._times.get_nowait())
            except Empty:
                if rest <= 0:
                    return
