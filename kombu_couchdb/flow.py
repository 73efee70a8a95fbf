"""Flow: how fast documents come, and for how long they may gather to share a request. No I/O.

To CouchDB a request with one document costs 6 ms of processor time, and each further one 0.2 to 0.5 ms. So while
documents come quickly, those of the same kind gather: requests take a quarter of the time, and the pauses between them
the rest. If the server is busy or far away, its requests take longer, so more documents gather. A document that comes
alone, or after a quiet time, waits for no others.

Each consumer has one flow, for its claims, its acknowledgements and its looks at the changes feed, and so has the queue
of results of a worker. What a consumer claims ahead of its prefetch count lasts for two pauses.
"""

from __future__ import annotations

import time
from collections import deque
from math import inf

#: From the beginning of a request to that of the next: so many times as long as a request takes, but at most this
#: number of seconds. A message in another queue, or a result that somebody waits for, should not wait for longer.
_SHARE, _MAX_SECONDS = 4.0, 0.25

#: What was claimed ahead lasts for two pauses. After twice that time, in seconds, the consumer has become slow.
STALL_SECONDS = 4 * _MAX_SECONDS

#: Documents flow if at least so many are expected in that time. Somebody who sends one task, waits for its result and
#: sends the next never makes it two.
_MIN_TOGETHER = 2.0

#: The fewest and the most documents that are measured; and the most that are claimed ahead.
_MIN_MEASURED, _MAX_MEASURED = 16, 512

#: After a stall, the rate counts again after this number of documents at most.
_MAX_PENALTY = 4096


class Throughput:
    """How many documents come in a second, by the times of the last ones. Times are monotonic, in seconds.

    The time since the last one counts, so the rate falls while none comes.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MAX_MEASURED)
        # How many documents there were since the last stall, and how many of them are not measured.
        self._since_stall = self._penalty = 0

    def count(self, now: float) -> None:
        """Note a document."""
        self._since_stall += 1
        if self._since_stall > self._penalty:
            self._times.append(now)

    def stalled(self) -> None:
        """Measure anew: the rate has promised more than what came.

        If that happens again and again, each new measurement begins later: giving messages back costs writes.
        """
        again = self._since_stall <= 4 * self._penalty
        self._penalty = min(2 * self._penalty, _MAX_PENALTY) if again and self._penalty else _MIN_MEASURED
        self._since_stall = 0
        self._times.clear()

    def per_second(self, now: float, count: int = _MIN_MEASURED) -> float:
        """Return the rate of the last `count` documents, within the limits of what is measured; 0.0 before so many."""
        count = min(max(count, _MIN_MEASURED), _MAX_MEASURED)
        return count / max(now - self._times[-count], 0.001) if len(self._times) >= count else 0.0

    def has_paused(self, now: float) -> bool:
        """Tell whether none came for longer than the last ones took together, or so few came that nobody knows."""
        return len(self._times) < _MIN_MEASURED or now - self._times[-1] > self._times[-1] - self._times[-_MIN_MEASURED]

    def ahead(self, limit: int, seconds: float, now: float) -> int:
        """Return how many messages may be claimed beyond the prefetch count `limit`, so that all last for `seconds`.

        0 before two rounds of the prefetch count: tasks of one second that end together in a pool of eight are eight
        a second, not eight in a millisecond.
        """
        return max(0, min(int(self.per_second(now, 2 * limit) * seconds) - limit, _MAX_MEASURED))


class Flow:
    """When the next request of a kind should begin. One thread notes its requests; any thread may ask."""

    def __init__(self) -> None:
        self._rate = Throughput()
        self._began = -inf  # a monotonic time
        #: How many seconds a request takes, `_MAX_SECONDS` at most: after a slow one, acks do not wait as long.
        self.cost = 0.0

    def count(self) -> None:
        """Note a document that is to be written."""
        self._rate.count(time.monotonic())

    def begin(self) -> None:
        """Note that a request begins, or several that belong together."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that it has ended, and has written something."""
        self.cost = min((self.cost + time.monotonic() - self._began) / 2, _MAX_SECONDS)

    @property
    def interval(self) -> float:
        """The seconds from the beginning of one request to that of the next; 0.0 if no documents flow."""
        now, seconds = time.monotonic(), min(_SHARE * self.cost, _MAX_SECONDS)
        flows = not self._rate.has_paused(now) and self._rate.per_second(now) * seconds >= _MIN_TOGETHER
        return seconds if flows else 0.0

    @property
    def next_at(self) -> float:
        """The monotonic time of the next request, if nothing is urgent."""
        return self._began + self.interval

    @property
    def pause(self) -> float:
        """How many seconds a document can wait for others; 0.0 without a flow."""
        return max(0.0, self.next_at - time.monotonic())

    @property
    def gathering(self) -> float:
        """How many seconds acks gather that nobody waits for, also without a flow: as long as a request takes."""
        return max(self.pause, self.cost)

    @property
    def stock(self) -> float:
        """For how many seconds the messages of a consumer should last: for the pause, and as long for requests."""
        return 2 * self.interval
