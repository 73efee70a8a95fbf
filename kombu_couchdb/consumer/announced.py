"""The queues that a consumer's heartbeat names: others see by them which queues are used."""

from __future__ import annotations

import threading

__all__ = ['Announced']


class Announced:
    """Which queues the stored heartbeat names; the I/O thread tells it, and kombu's thread may wait for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: frozenset[str] = frozenset()
        self._closed = False

    def are(self, queues: frozenset[str]) -> None:
        """Note which queues are named now."""
        if queues != self._queues:
            with self._changed:
                self._queues = queues
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more: no further heartbeat is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, queue: str, timeout: float) -> bool:
        """Wait until a queue is named, up to `timeout` seconds; tell whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or queue in self._queues, timeout)
            return queue in self._queues
