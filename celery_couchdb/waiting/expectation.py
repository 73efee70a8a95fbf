"""The expected time of a result, computed from how long this process waited for earlier results. No I/O."""

from __future__ import annotations

__all__ = ['Expectation']

#: A result that comes before the expected time is found `_EARLY_SECONDS` after the wait began, or after twice the time.
_EARLY_SECONDS = 0.2

#: From the expected time on, the pause between two requests is this share of the time since the wait began, and within
#: these limits in seconds: a result of a task of minutes costs at most one request a second.
_SHARE, _MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.15, 0.015, 1.0


class Expectation:
    """The mean of the last waits and their mean deviation from it, in seconds, as TCP computes its timeout."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0

    @property
    def seconds(self) -> float:
        """How long a wait takes at least, probably."""
        return self._mean - self._deviation

    def learn(self, least: float, most: float) -> None:
        """Learn from a result that came between `least` and `most` seconds after the wait began."""
        # If the first request already finds the result, the next wait's first request shall be a little earlier.
        seconds = max((least + most) / 2, most * (1 - _SHARE))
        if not self._mean:
            self._mean, self._deviation = seconds, seconds / 2
            return
        error = seconds - self._mean
        self._mean += error / 8
        self._deviation += (abs(error) - self._deviation) / 4

    def next(self, elapsed: float) -> float:
        """Return how many seconds after the wait began to ask, if the last request was `elapsed` seconds after it."""
        expected = self.seconds
        if elapsed < expected:
            early = max(_EARLY_SECONDS, 2 * elapsed)
            return early if 1.5 * early < expected else expected
        return elapsed + min(_MAX_PAUSE_SECONDS, max(_MIN_PAUSE_SECONDS, _SHARE * elapsed))
