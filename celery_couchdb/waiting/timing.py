"""Timing of requests for results: whether to follow the changes, when to ask instead, and how long to collect.

No I/O.
"""

from __future__ import annotations

from typing import Any

#: The database is busy if it has more than `_OTHERS_PER_SECOND` updates besides this process' results, and more than
#: `_OTHERS_PER_RESULT` for each of them. Each update costs the server 0.4 ms for each feed, whatever the feed reports,
#: and asking for one document 0.6 ms, measured on CouchDB 3.5. A busy database is quiet again at half these figures.
_OTHERS_PER_SECOND, _OTHERS_PER_RESULT = 5.0, 4.0

#: The shortest time over which updates are counted, and how often a request counts them if the feed does not; seconds.
_MIN_SECONDS, _COUNT_SECONDS = 1.0, 10.0

#: A result that comes before the expected time is found `_EARLY_SECONDS` after the wait began, or after twice the time.
_EARLY_SECONDS = 0.2

#: From the expected time on, the pause between two requests is this share of the time since the wait began, and within
#: these limits in seconds: a result of a task of minutes costs at most one request a second.
_SHARE, _MIN_ASK_SECONDS, _MAX_ASK_SECONDS = 0.15, 0.015, 1.0

#: If results come quickly, the next response shall have about `_RESULTS_PER_LOOK` of them. The pause for that is at the
#: most `_COLLECT_SECONDS`, and there is none if fewer than one result would come in that time.
_COLLECT_SECONDS, _RESULTS_PER_LOOK = 0.04, 10


class Traffic:
    """Counts the updates of a database between two of its update sequences."""

    def __init__(self) -> None:
        self.is_busy = False
        #: Up to which number updates were counted, and when. None: the sequence did not tell it.
        self._updates: int | None = None
        self._counted_at = float('-inf')
        self._is_known = False
        self._results = 0

    def add_results(self, count: int) -> None:
        """Count results that this process has received."""
        self._results += count

    def is_due(self, now: float) -> bool:
        """Tell whether to read the update sequence from the database: soon, if it is not known how busy it is."""
        return now - self._counted_at >= (_COUNT_SECONDS if self._is_known else _MIN_SECONDS)

    def count(self, sequence: Any, now: float) -> None:
        """Count the updates up to an update sequence of the database, which was received at the time `now`."""
        updates, seconds = _updates(sequence), now - self._counted_at
        if updates is None or self._updates is None or updates < self._updates:  # of another database, or another copy
            self.is_busy = self._is_known = False
        elif seconds < _MIN_SECONDS:
            return
        else:
            others = updates - self._updates - self._results
            factor = 0.5 if self.is_busy else 1.0
            self.is_busy = others > factor * max(_OTHERS_PER_SECOND * seconds, _OTHERS_PER_RESULT * self._results)
            self._is_known = True
        self._updates, self._results, self._counted_at = updates, 0, now


def _updates(sequence: Any) -> int | None:
    """Return the number of updates before a sequence: CouchDB's begin with it; None if it cannot be told.

    >>> _updates('13-g1AAAACjeJz'), _updates(13), _updates('g1AAAACjeJz')
    (13, 13, None)
    """
    number = str(sequence).partition('-')[0]
    return int(number) if number.isascii() and number.isdigit() else None


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
        return elapsed + min(_MAX_ASK_SECONDS, max(_MIN_ASK_SECONDS, _SHARE * elapsed))


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
