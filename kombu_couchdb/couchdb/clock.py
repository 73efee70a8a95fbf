"""The server's time: the local clock, corrected only where the server's `Date` header proves it wrong.

CouchDB refreshes that header once a second from a timer of its own, so the server's time lies between `Date` and
`Date` + 2 seconds (measured: up to 1.92). A local clock inside that range cannot be told from a right one and is finer.
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
_LAG = 2.0
#: What network and scheduling may add before a difference counts as one of clocks, in seconds.
_SLACK = 0.5


class ServerClock:
    """Tells the server's time in seconds since the epoch; to any number of threads."""

    def __init__(self) -> None:
        self._offset = 0.0
        self._seen = ''

    @classmethod
    def of(cls, servers: Iterable[str]) -> ServerClock:
        """Return the one of this process for a server, or the nodes of a cluster: what one client learns, all know."""
        return _shared.of(frozenset(servers), cls)

    @property
    def agrees(self) -> bool:
        """Whether the local clock is right by the server's, as far as one can tell."""
        return self._offset == 0.0

    def now(self) -> float:
        """Return the server's time, exact to about a second."""
        return time.time() + self._offset

    def observe(self, date: str | None, sent: float, received: float) -> None:
        """Learn from one answer: its `Date` header and the local times of request and answer."""
        if not date or date == self._seen:
            return
        self._seen = date
        try:
            stamp = parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError, OverflowError):
            return
        # The header was written between `sent` and `received`: a slow answer proves nothing.
        earliest, latest = stamp - received, stamp + _LAG - sent
        if earliest - _SLACK <= self._offset <= latest + _SLACK:
            return
        before, offset = self._offset, 0.0 if earliest - _SLACK <= 0.0 <= latest + _SLACK else (earliest + latest) / 2
        self._offset = offset
        if offset and abs(offset - before) > _LAG:
            logger.warning("the local clock differs from the CouchDB server's by %.0f s; the server's is used", offset)


_shared: Shared[frozenset[str], ServerClock] = Shared({})
