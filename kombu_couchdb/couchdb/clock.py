"""The server's time: its `Date` header at a response, and the time since then by a monotonic clock, `uptime`.

CouchDB updates that header once per second from a timer of its own. Therefore the server's time is between `Date` and
`Date` + 2 seconds (measured: up to 1.92). If the local clock is within that range at the first response, it may be
right, and has a higher resolution: then it is used for that moment. A later step of the local clock changes nothing.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

from ..log import get_logger

logger = get_logger(__name__)

#: How far the header may lag behind the server's time, in seconds.
_HEADER_LAG_SECONDS = 2.0
#: The difference in seconds that may come from network and scheduling, and not from the clocks.
_TOLERANCE_SECONDS = 0.5


def uptime() -> float:
    """Return the seconds since some moment, by a monotonic clock that goes on while the machine is suspended.

    `time.monotonic` stands still meanwhile on Linux and macOS. So this clock measures what a process holds; for what it
    waits, `time.monotonic` is right. The two must not be compared.
    """
    clock = getattr(time, 'CLOCK_BOOTTIME', getattr(time, 'CLOCK_MONOTONIC', None))
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class ServerClock:
    """The server's time in seconds since the epoch. Thread-safe."""

    def __init__(self) -> None:
        #: How far the server's time is ahead of `uptime`; None before the first response.
        self._ahead: float | None = None
        #: The seconds by which the server's time has run ahead of `uptime` since the first response: somebody has set
        #: its clock forward, or a virtual machine was paused, and no clock of it went on.
        self.gained = 0.0
        self._last_date = ''
        self._local_error = 0.0
        #: Whether the server was asked for its time, or has told it with another response.
        self.was_asked = False

    @property
    def agrees(self) -> bool:
        """Whether the last `Date` header has not proved the local clock wrong."""
        return self._local_error == 0.0

    def now(self) -> float:
        """Return the server's time, accurate to about one second; the local time before the first response."""
        ahead = self._ahead
        return time.time() if ahead is None else uptime() + ahead

    def observe(self, date: str | None, sent: float, received: float) -> None:
        """Take in the `Date` header of a response.

        `sent` is the `uptime` before the request, `received` that after the response.
        """
        self.was_asked = True
        if not date or date == self._last_date:
            return
        self._last_date = date
        try:
            stamp = parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError, OverflowError):
            return
        # The server wrote the header between `sent` and `received`. A slow response therefore proves little.
        earliest = stamp - received - _TOLERANCE_SECONDS
        latest = stamp + _HEADER_LAG_SECONDS - sent + _TOLERANCE_SECONDS
        local = time.time() - uptime()
        ahead = local if earliest <= local <= latest else (earliest + latest) / 2
        before, self._local_error = self._local_error, ahead - local
        if abs(self._local_error) > _HEADER_LAG_SECONDS and abs(self._local_error - before) > _HEADER_LAG_SECONDS:
            logger.warning(
                "the local clock differs from the CouchDB server's by %.0f s; timestamps use the server's time",
                self._local_error,
            )
        if self._ahead is not None:
            self.gained += max(0.0, earliest - self._ahead)
        if self._ahead is None or not earliest <= self._ahead <= latest:
            self._ahead = ahead
