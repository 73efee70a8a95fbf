"""Signals and a time limit as exceptions, which do not interrupt the clean-up."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(BaseException):
    """A signal asks the demo to end: Ctrl-C, SIGTERM or SIGHUP."""


class TimeIsUp(BaseException):
    """The time limit is over. Not an `Exception`, so that no library catches it as its own failure."""


class Interrupts:
    """Raises `Stopped` for the first signal; while signals are held back, only records it."""

    def __init__(self) -> None:
        #: The number of the received signal, or 0.
        self.signal = 0
        self._held = False
        sys.unraisablehook = self._on_unraisable
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._on_signal)

    def hold(self) -> None:
        """From now on, only record signals."""
        self._held = True

    def ignore(self) -> None:
        """From now on, ignore signals: the exit status is decided."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back within the context; raise `Stopped` at its end if one was received."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """*Raises* `TimeIsUp` if the context takes longer than `seconds`, even if it hangs in a library."""
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, in case signals are held back
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """*Raises* `Stopped` if a signal was received: it was held back, or its exception was lost in a destructor."""
        if self.signal:
            raise Stopped

    def _on_signal(self, number: int, frame: Any) -> None:
        first, self.signal = not self.signal, self.signal or number
        if first and not self._held:
            raise Stopped

    def _on_unraisable(self, unraisable: Any) -> None:
        # Our exceptions need no traceback if a destructor lost them: `check` raises again, and the alarm repeats.
        if not isinstance(unraisable.exc_value, (Stopped, TimeIsUp)):
            sys.__unraisablehook__(unraisable)

    def _on_alarm(self, number: int, frame: Any) -> None:
        if not self._held:
            raise TimeIsUp
