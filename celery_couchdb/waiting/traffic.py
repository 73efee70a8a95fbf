"""The traffic of the results' database: whether it is cheaper to ask for a few results than to follow all changes."""

from __future__ import annotations

from typing import Any

__all__ = ['Traffic']

#: The database is busy if it has more than `_OTHERS_PER_SECOND` updates besides this process' results, and more than
#: `_OTHERS_PER_RESULT` for each of them. Each update costs the server 0.4 ms for each feed, whatever the feed reports,
#: and asking for one document 0.6 ms, measured on CouchDB 3.5. A busy database is quiet again at half these figures.
_OTHERS_PER_SECOND, _OTHERS_PER_RESULT = 5.0, 4.0

#: The shortest time over which updates are counted, and how often a request counts them if the feed does not; seconds.
_MIN_SECONDS, _COUNT_SECONDS = 1.0, 10.0


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
