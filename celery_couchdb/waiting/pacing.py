"""Pacing: the subscriber's pause after a response of the changes feed.

While results come quickly, the pause lets the next response have several of them.
"""

from __future__ import annotations

__all__ = ['Pacing']

#: If results come quickly, the next response shall have about `_RESULTS_PER_LOOK` of them. The pause for that is at the
#: most `_MAX_PAUSE_SECONDS`, and there is none if fewer than one result would come in that time.
_MAX_PAUSE_SECONDS, _RESULTS_PER_LOOK = 0.04, 10


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
        if others > 1 and self._gap <= _MAX_PAUSE_SECONDS:
            return min(_MAX_PAUSE_SECONDS, min(_RESULTS_PER_LOOK, others) * self._gap)
        return 0.0
