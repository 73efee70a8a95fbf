"""Pauses by the operating system: a busy machine must not be mistaken for a broken promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .ledger import Ledger

__all__ = ['pauses_noted', 'watch']

#: A process that wakes up this much too late was not scheduled, in seconds.
_LATE = 1.0


def watch(ledger: Ledger, workers: list[str] | None, end: threading.Event) -> threading.Thread:
    """Start and return a thread that records pauses of this process. They affect `workers`; None: all."""

    def look() -> None:
        before = time.monotonic()
        while not end.wait(_LATE / 2):
            now = time.monotonic()
            if now - before > _LATE / 2 + _LATE:
                ledger.note(
                    'machine',
                    name='machine',
                    began=before,
                    ended=now,
                    workers=workers,
                    pid=None,
                    interrupts=True,
                    deadly=False,
                )
            before = time.monotonic()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


@contextmanager
def pauses_noted(ledger: Ledger) -> Iterator[None]:
    """Record pauses of this process, which all requests to the server pass through."""
    end = threading.Event()
    thread = watch(ledger, None, end)
    try:
        yield
    finally:
        end.set()
        thread.join()
