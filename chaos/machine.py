"""When the machine does not let a process run: a verdict must not take a busy machine for a broken promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .ledger import Ledger

__all__ = ['pauses_noted', 'watch']

#: A process that finds itself this much too late was not let run, in seconds.
_LATE = 1.0


def watch(ledger: Ledger, workers: list[str] | None, end: threading.Event) -> threading.Thread:
    """Note pauses of this process, which hit these workers, or all (None), in a thread of its own, which it returns."""

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
    """Note pauses of the process through which all workers reach the server."""
    end = threading.Event()
    thread = watch(ledger, None, end)
    try:
        yield
    finally:
        end.set()
        thread.join()
