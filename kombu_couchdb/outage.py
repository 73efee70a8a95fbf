"""An outage: something fails, and its owner tries it again until it succeeds.

An `Outage` is what one owner knows of one such thing: whether it fails at the moment, how long to pause before the next
attempt, and what was logged. The owner calls `failed` after each failure and `recovered` after a success. All owners
pause alike, and log the first failure and the end of the outage, once each: otherwise each process would log a line
with every attempt while CouchDB does not respond.

An `Outage` makes no request, does not wait, and has no lock. If several threads use one, a line may be logged twice.
"""

from __future__ import annotations

import logging
import time
from math import inf

from .errors import CouchDBError, ServerUnavailable

#: The first and the longest pause between two attempts, in seconds. The first failure is often a connection that was
#: cut, and the next attempt succeeds.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0


def cause_of(exc: BaseException) -> BaseException:
    """Return the error of ours that has caused an error of kombu, which cannot connect; for other errors, the same."""
    return exc if isinstance(exc, CouchDBError) else exc.__cause__ or exc


class Outage:
    """One thing that is tried again until it succeeds."""

    def __init__(self, logger: logging.Logger, failure: str, end: str = '', *, level: int | None = None) -> None:
        """Log to `logger`: the line `failure`, in which `%s` is replaced by the error, and the line `end`.

        Without `end` the end is not logged. `level` is the level of the line `failure`. None: a warning if the server
        does not respond, which ends by itself; an error otherwise, because somebody may have to change something; with
        a traceback if the error is no `CouchDBError`.
        """
        self._logger, self._failure, self._end, self._level = logger, failure, end, level
        #: Whether the last attempt failed.
        self.lasts = False
        #: The monotonic time of the next attempt; -infinity if the last one did not fail.
        self.until = -inf
        #: The seconds of the last pause; 0 if the last attempt did not fail.
        self.pause = 0.0
        self._logged = set[type[BaseException]]()

    def failed(self, exc: BaseException, text: str = '', *, least: float = 0.0) -> float:
        """Return how many seconds to pause: longer after each failure, and at least `least` seconds.

        The failure is logged if it is the first one, or the first of its class, such as an `AccessDenied` after the
        server did not respond. The others are logged at the level DEBUG. `text` replaces the text of the error.
        """
        cause = cause_of(exc)
        is_unexpected = not isinstance(cause, CouchDBError)
        if type(cause) in self._logged:
            level = logging.DEBUG
        elif self._level is None:
            level = logging.WARNING if isinstance(cause, ServerUnavailable) else logging.ERROR
        else:
            level = self._level
        shown = 'an unexpected error' if is_unexpected else text or exc
        self._logger.log(level, self._failure, shown, exc_info=exc if is_unexpected else None)
        self._logged.add(type(cause))
        self.pause = max(least, min(max(2 * self.pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS))
        self.lasts, self.until = True, time.monotonic() + self.pause
        return self.pause

    def recovered(self) -> None:
        """Note a success. If it ends an outage, that is logged as a warning: the failure was one, too."""
        if not self.lasts:
            return
        self.lasts, self.until, self.pause = False, -inf, 0.0
        self._logged.clear()
        if self._end:
            self._logger.warning(self._end)
