"""The server's time: the local clock, corrected only if the server's `Date` header proves it wrong.

CouchDB updates that header once per second from a timer of its own. Therefore the server's time is between `Date` and
`Date` + 2 seconds (measured: up to 1.92). A local clock within that range may be right, and has a higher resolution.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime

from ..log import get_logger
from .fork_safety import Shared

__all__ = ['ServerClock']

logger = get_logger(__name__)

#: How far the header may lag behind the server's time, in seconds.
_HEADER_LAG_SECONDS = 2.0
#: The difference in seconds that may come from network and scheduling, and not from the clocks.
_TOLERANCE_SECONDS = 0.5


class ServerClock:
    """The server's time in seconds since the epoch. Thread-safe."""

    def __init__(self) -> None:
        self._offset = 0.0
        self._last_date = ''

    @classmethod
    def of(cls, servers: Iterable[str]) -> ServerClock:
        """Return this process's clock for a server, or for the nodes of a cluster. All their clients share it."""
        return _shared.of(frozenset(servers), cls)

    @property
    def agrees(self) -> bool:
        """Whether no `Date` header has proved the local clock wrong."""
        return self._offset == 0.0

    def now(self) -> float:
        """Return the server's time, accurate to about one second."""
        return time.time() + self._offset

    def observe(self, date: str | None, sent: float, received: float) -> None:
        """Compare the clocks: `date` is the `Date` header of a response; `sent` and `received` are local times.

        `sent` is the time before the request, `received` the time after the response.
        """
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
        if earliest <= self._offset <= latest:
            return
        before, offset = self._offset, 0.0 if earliest <= 0.0 <= latest else (earliest + latest) / 2
        self._offset = offset
        if offset and abs(offset - before) > _HEADER_LAG_SECONDS:
            logger.warning(
                "the local clock differs from the CouchDB server's by %.0f s; timestamps use the server's time", offset
            )


_shared: Shared[frozenset[str], ServerClock] = Shared({})
