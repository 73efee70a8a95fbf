"""A histogram of CouchDB's response times to the requests of this process, with buckets like Prometheus'."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import TypedDict

from .fork_safety import reset_in_child

#: The upper bounds of the buckets, in seconds. One more bucket has everything above.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Snapshot(TypedDict):
    """The requests that were sent since the process started."""

    #: Requests with a response, of any status.
    count: int
    #: The sum of their durations, from the first byte sent to the last byte received.
    seconds: float
    #: By upper bound in seconds, how many took at most that long.
    buckets: dict[str, int]
    #: Requests without a response, which are not counted above.
    failed: int


class Latency:
    """The durations of requests. Thread-safe; a forked child begins with none."""

    def __init__(self) -> None:
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Begin anew, with a new lock."""
        self._lock = threading.Lock()
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._seconds, self._failed = 0.0, 0

    def note(self, seconds: float) -> None:
        """Add a request that got a response."""
        with self._lock:
            self._counts[bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def note_failure(self) -> None:
        """Add a request that got no response."""
        with self._lock:
            self._failed += 1

    def snapshot(self) -> Snapshot:
        """Return the numbers so far."""
        with self._lock:
            counts, seconds, failed = list(accumulate(self._counts)), self._seconds, self._failed
        names = [*(f'{bound:g}' for bound in _BOUNDS), '+Inf']
        return {
            'count': counts[-1],
            'seconds': round(seconds, 6),
            'buckets': dict(zip(names, counts, strict=True)),
            'failed': failed,
        }


#: Of all requests of this process, to any server and database, except waits for the changes feed.
LATENCY = Latency()
