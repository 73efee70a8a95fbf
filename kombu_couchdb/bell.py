"""What wakes the I/O thread: at once, or soon, so that what happens meanwhile shares its next turn."""

from __future__ import annotations

import threading
import time

__all__ = ['Bell']


class Bell:
    """Rung by any thread, heard by one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at = float('inf')

    def ring(self, within: float = 0.0) -> None:
        """Wake who waits, `within` seconds at the latest; an earlier time that was named before stays."""
        at = time.monotonic() + within
        with self._changed:
            if at < self._at:
                self._at = at
                self._changed.notify()

    def wait(self, timeout: float) -> None:
        """Wait until the time named by `ring` has come, but not longer than `timeout` seconds; then all rings are heard."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while (rest := min(self._at, deadline) - time.monotonic()) > 0:
                self._changed.wait(rest)
            self._at = float('inf')
