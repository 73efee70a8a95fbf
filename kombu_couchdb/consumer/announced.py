"""The queues that the stored heartbeat of a consumer names: other processes see that these queues are used."""

from __future__ import annotations

import threading

__all__ = ['Announced']


class Announced:
    """The queues that the stored heartbeat names. The I/O thread sets them, and kombu's thread can wait for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: frozenset[str] = frozenset()
        self._closed = False

    def set(self, queues: frozenset[str]) -> None:
        """Set the queues that the stored heartbeat names now."""
        if queues != self._queues:
            with self._changed:
                self._queues = queues
                self._changed.notify_all()

    def close(self) -> None:
        """End all waits: no further heartbeat is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, queue: str, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the heartbeat names a queue; tell whether it does."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or queue in self._queues, timeout)
            return queue in self._queues
