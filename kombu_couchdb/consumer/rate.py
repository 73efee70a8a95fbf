"""The rate at which a channel's messages are worked off, and how many it may therefore claim ahead.

The rate is that of the last decisions about messages (acks, mostly), at least two rounds of the prefetch count: tasks
of one second that end together in a pool of eight are eight a second, not eight in a millisecond. The time since the
last decision counts, so the rate falls while nothing is decided.
"""

from __future__ import annotations

from collections import deque

__all__ = ['SHELF_SECONDS', 'Rate']

#: For how long a message that was claimed ahead should wait for credit, in seconds. It is given back after twice as
#: long: then the rate has fallen.
SHELF_SECONDS = 0.1

#: For how long the messages of a channel should last in all, those that kombu holds and those claimed ahead, in
#: seconds: for the pause between two cycles and for the requests of one. A prefetch count that lasts so long needs no
#: more.
_STOCK_SECONDS = 0.15

#: The fewest and the most decisions that are measured.
_MIN_DECISIONS, _MAX_DECISIONS = 16, 512

#: The most messages that are claimed ahead for a channel.
_MAX_AHEAD = 256

#: After a stall, the rate counts again after this number of decisions at most.
_MAX_PENALTY = 4096


class Rate:
    """The rate of one channel. Not thread-safe: the lock of `Unacked` guards it. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MAX_DECISIONS)
        # Decisions that are not measured yet after a stall, how many they were at first, and all since the stall.
        self._skipped = self._penalty = self._since_stall = 0

    def note(self, now: float) -> None:
        """Note a decision about a message."""
        self._since_stall += 1
        if self._since_stall > 4 * self._penalty:
            self._penalty = 0
        if self._skipped:
            self._skipped -= 1
        else:
            self._times.append(now)

    def stalled(self) -> None:
        """Measure anew: messages waited for longer than the rate had promised.

        If that happens again and again, each new measurement begins later: giving messages back costs writes.
        """
        self._times.clear()
        self._skipped = self._penalty = min(max(_MIN_DECISIONS, 2 * self._penalty), _MAX_PENALTY)
        self._since_stall = 0

    def per_second(self, limit: int, now: float) -> float:
        """Return the rate of the last two rounds of the prefetch count `limit`; 0.0 if there were not so many yet."""
        count = min(max(2 * limit, _MIN_DECISIONS), _MAX_DECISIONS)
        if len(self._times) < count:
            return 0.0
        return count / max(now - self._times[-count], 0.001)

    def ahead(self, limit: int, now: float) -> int:
        """Return how many messages may be claimed beyond the prefetch count `limit`."""
        rate = self.per_second(limit, now)
        return max(0, min(int(rate * SHELF_SECONDS), int(rate * _STOCK_SECONDS) - limit, _MAX_AHEAD))
