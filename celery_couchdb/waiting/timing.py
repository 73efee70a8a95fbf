"""Timing of requests for results: when a result may be expected, and how long to collect.

No I/O.
"""

from __future__ import annotations

#: If results come quickly, the next response shall have about `_RESULTS_PER_LOOK` of them. The pause for that is at the
#: most `_COLLECT_SECONDS`, and there is none if fewer than one result would come in that time.
_COLLECT_SECONDS, _RESULTS_PER_LOOK = 0.04, 10


class Expectation:
    """The mean of the last waits and their mean deviation from it, in seconds, as TCP computes its timeout."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0

    @property
    def seconds(self) -> float:
        """How long a wait takes at least, probably."""
        return self._mean - self._deviation

    def learn(self, seconds: float) -> None:
        """Learn from a result that came so many seconds after the wait began."""
        if not self._mean:
            self._mean, self._deviation = seconds, seconds / 2
            return
        error = seconds - self._mean
        self._mean += error / 8
        self._deviation += (abs(error) - self._deviation) / 4


class Pacing:
    """Measures how quickly results come. A single result is never delayed."""

    def __init__(self) -> None:
        #: When the last response with results came, and the mean seconds from one result to the next.
        self._last, self._gap = float('-inf'), 1.0

    def pause(self, count: int, others: int, now: float) -> float:
        """Return the pause in seconds after a response at the time `now`.

        The response had `count` results. `others` is how many documents are watched besides one for each waiting
        thread.
        """
        if count:
            gap, self._last = (now - self._last) / count, now
            # One slow result ends the pauses at once, and some quick ones are needed to begin them again.
            self._gap = (self._gap + gap) / 2 if gap < self._gap else min(1.0, gap)
        if others > 1 and self._gap <= _COLLECT_SECONDS:
            return min(_COLLECT_SECONDS, min(_RESULTS_PER_LOOK, others) * self._gap)
        return 0.0
