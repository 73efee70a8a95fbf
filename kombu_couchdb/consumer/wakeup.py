"""The wakeup of the I/O thread: at once, or soon, so that more work shares its next turn."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

__all__ = ['Wakeup']


class Wakeup:
    """Rung by any thread, heard by one.

    `ring` takes no lock that the same thread may hold: a finalizer may ring in the midst of anything, also of `wait`.
    """

    def __init__(self) -> None:
        self._rings: SimpleQueue[float] = SimpleQueue()  # monotonic times by which the thread should wake

    def set(self, within: float = 0.0) -> None:
        """Wake who waits, `within` seconds at the latest; an earlier time that was named before stays."""
        self._rings.put(time.monotonic() + within)

    def wait(self, timeout: float) -> None:
        """Wait until the time named by `ring` has come, but not longer than `timeout` seconds; then all rings are heard."""
        at = time.monotonic() + timeout
        while True:
            rest = at - time.monotonic()
            try:
                # What was rung already is taken in any case: no ring is heard twice.
                at = min(at, self._rings.get(timeout=rest) if rest > 0 else self._rings.get_nowait())
            except Empty:
                if rest <= 0:
                    return
