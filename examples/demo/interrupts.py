"""Ctrl-C, SIGTERM and SIGHUP as one exception, and the end of a time limit as another; cleaning up is safe from both."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(BaseException):
    """Somebody wants the demo to end."""


class TimeIsUp(BaseException):
    """It took longer than it may. No `Exception`, so that no library takes it for a failure of its own."""


class Interrupts:
    """Raises `Stopped` for the first signal, and only notes it while it is held back."""

    def __init__(self) -> None:
        #: The number of the signal that came, or 0.
        self.signal = 0
        self._held = False
        sys.unraisablehook = self._on_unraisable
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._on_signal)

    def hold(self) -> None:
        """From now on note signals only."""
        self._held = True

    def ignore(self) -> None:
        """From now on let signals do nothing: all is done, and the exit status is settled."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back for a while."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """*Raises* `TimeIsUp` if what is in the context takes longer than this, even if it hangs in a library."""
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, should it come while signals are held
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """*Raises* `Stopped` if a signal came: one that was held back, or whose exception was lost in a destructor."""
        if self.signal:
            raise Stopped

    def _on_signal(self, number: int, frame: Any) -> None:
        first, self.signal = not self.signal, self.signal or number
        if first and not self._held:
            raise Stopped

    def _on_unraisable(self, unraisable: Any) -> None:
        # One of ours that was lost in a destructor needs no traceback: `check` tells of it, the alarm comes again.
        if not isinstance(unraisable.exc_value, (Stopped, TimeIsUp)):
            sys.__unraisablehook__(unraisable)

    def _on_alarm(self, number: int, frame: Any) -> None:
        if not self._held:
            raise TimeIsUp
