"""The pace of requests to a CouchDB that limits how many it serves in a second, as IBM Cloudant does.

Such a service counts the units of each kind of request (reads, writes, queries) of all clients together, in a sliding
window of one second. Over the limit it refuses a request with status 429, and has not executed it. That is no outage:
the request is sent again by the same call, and the process sends fewer of its kind.

Nobody tells a client its share of the limit, so each process finds it out: its rate falls with a refusal, and grows
while requests wait for it (AIMD, as TCP does). Before the first refusal nothing is delayed, and nothing is counted
unless the service is known to have limits: most servers have none.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import insort
from collections import deque
from enum import Enum
from math import inf
from random import random

from ..errors import CouchDBError
from ..log import get_logger
from .call import Call

logger = get_logger(__name__)

#: The window of the service in seconds, and a little more: requests do not take equally long to the server, and what
#: the processes leave is room for a request that was refused.
_WINDOW_SECONDS = 1.1

#: After a refusal, nothing of its kind is sent for so long, in seconds, and for a random part of the second number: so
#: several processes do not go on at the same moment. After each further refusal in a row the pause is twice as long, up
#: to the third number.
_PAUSE_SECONDS, _JITTER_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 0.4, 8.0

#: If requests had waited before one was refused, the rate was the process's share of the limit. After the refusal it is
#: less than that share by this part. It returns to it after so many seconds in which requests waited, and grows faster
#: from then on. It also grows by so many units a second in each second, so that the process with the smallest rate
#: catches up.
_DECREASE, _RETURN_SECONDS, _GROWTH = 0.25, 20.0, 0.1

#: If none had waited, the share is not known, or may be larger by now than what is used. The rate begins with this part
#: of what was used, and grows by this factor in each second in which requests wait, up to the former share.
_FIRST_PART, _START_GROWTH = 0.7, 1.4

#: The least rate.
_MIN_RATE = 1.0

#: A request has at most the units of this time, in seconds: large ones leave no room for those of other processes, and
#: a lease may depend on the next one.
_REQUEST_SECONDS = 0.25

#: The most units of a request of a kind without a refusal, if requests of another kind were refused: the service will
#: limit this one, too, and what is above the limit is a burden for the other processes.
_CAREFUL_UNITS = 4

#: The most units of a request before the first refusal, if the service is known to have limits; and what a process is
#: supposed to have used in a second before the first refusal by a service of which that was not known.
_FIRST_UNITS = 20

#: The most reads that replace a query while queries are limited: a service offers more reads.
_MAX_READS = 8

#: How many times longer pauses between queries are meanwhile.
_POLLING_FACTOR = 6.0

#: A rate is forgotten this long after the last refusal, in seconds.
_FORGET_SECONDS = 600.0

#: How long a request waits in all, in seconds.
_MAX_WAIT_SECONDS = 300.0

#: The shortest time for which refusals are counted before a warning, in seconds, and the fewest that deserve one.
_WARN_SECONDS, _WARN_REFUSALS = 60.0, 3


class RequestKind(Enum):
    """What a service counts, each with a limit of its own."""

    #: A document by its id, with its revisions and attachments.
    READ = 'read'
    #: A document that is created, changed or deleted.
    WRITE = 'write'
    #: A question to an index: `_all_docs`, a view, `_find`; and `_bulk_get`.
    QUERY = 'query'
    #: A request to `_changes`.
    FEED = 'feed'
    #: All else: the server, the database, an index's state, a session.
    OTHER = 'other'


#: The kinds of the requests whose path below the database begins or ends with these names.
_KINDS = {
    '_bulk_docs': RequestKind.WRITE,
    '_bulk_get': RequestKind.QUERY,
    '_all_docs': RequestKind.QUERY,
    '_design_docs': RequestKind.QUERY,
    '_local_docs': RequestKind.QUERY,
    '_find': RequestKind.QUERY,
    '_changes': RequestKind.FEED,
}


def units_of(method: str, path: str, size: int = 1) -> tuple[RequestKind, int]:
    """Return the kind of a request and how many units it costs.

    `path` is relative to the URL of the database or of the server, with or without a query. `size` is the number of
    documents in the body of a `_bulk_docs`, and of the `queries` in a request with several.
    """
    names = path.partition('?')[0].strip('/').split('/')
    if not names[0]:
        return RequestKind.OTHER, 1
    if kind := _KINDS.get(names[0]):
        return kind, size
    if names[0] == '_design' and '_view' in names[2:]:
        return RequestKind.QUERY, size
    if names[0] in ('_design', '_local'):
        names = names[2:] or ['']  # a document, and what is below it
    if names[0].startswith('_'):
        return RequestKind.OTHER, 1
    return (RequestKind.READ if method in ('GET', 'HEAD') else RequestKind.WRITE), 1


class TooManyUnits(CouchDBError):
    """The service refused a request of more units than the pace allows in one: it must be cut."""


class Turn:
    """One request: it waits, is sent, and, if the service refuses it, waits and is sent again."""

    _numbers = itertools.count()

    def __init__(self, kind: RequestKind, units: int = 1, patience: float | None = None) -> None:
        """`patience` are the seconds that an urgent request waits at most; None: it is not urgent."""
        self.kind, self.units, self.was_refused = kind, units, False
        self.is_urgent, self._patience = patience is not None, min(patience or inf, _MAX_WAIT_SECONDS)
        self._began = time.monotonic()
        self._number = next(self._numbers)
        #: Whether it had to wait before it was sent last, or another one, and when that was by the monotonic clock.
        self.has_waited, self.sent = False, -inf

    @classmethod
    def of(cls, call: Call) -> Turn:
        """Return the turn of a request."""
        return cls(*units_of(call.method, call.path, call.size), call.limits.patience)

    @property
    def until(self) -> float:
        """The monotonic time until which it waits, once or again and again."""
        return self._began + self._patience

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The key by which turns are sorted."""
        return not self.is_urgent, not self.was_refused, self._number


class Lane:
    """The requests of one kind from this process to one server. Times are monotonic. Not thread-safe, and no I/O."""

    def __init__(self) -> None:
        #: This process's share of the limit, and the rate with which it begins to look for it, in units a second. Both
        #: are infinite before the first refusal.
        self._share = self._start = inf
        #: For how many seconds requests have waited since the last refusal.
        self._waited = 0.0
        #: The units that were sent in the window, with their times.
        self._sent: deque[tuple[float, int]] = deque()
        #: When the next request may be sent, when the last one was refused, and how many were refused in a row.
        self._free_at = self._refused_at = -inf
        self._in_a_row = 0
        #: Whether somebody has not even made a request, because it would have to wait.
        self.is_wanted = False
        self._counted_from, self._refusals, self._units = -inf, 0, 0
        self.forget_waiting()

    def forget_waiting(self) -> None:
        """Forget the requests that wait: they belong to threads of the parent."""
        self._waiting: list[Turn] = []  # sorted

    @property
    def rate(self) -> float:
        """The units a second that this process may send; infinite before the first refusal."""
        curve = _DECREASE * ((self._waited / _RETURN_SECONDS) ** 3 - 1)
        growing: float = self._start * _START_GROWTH ** min(self._waited, _RETURN_SECONDS)
        return max(_MIN_RATE, min(growing, self._share * (1 + curve) + _GROWTH * self._waited))

    @property
    def is_limited(self) -> bool:
        """Whether a request was refused not long ago."""
        return self._start < inf or self._share < inf

    @property
    def most(self) -> float:
        """The most units that one request should have; infinite before the first refusal."""
        return max(1, int(self.rate * _REQUEST_SECONDS)) if self.is_limited else inf

    def free_at(self, units: int, now: float) -> float:
        """Return when a request of so many units may be sent, if no other one is sent before."""
        while self._sent and self._sent[0][0] <= now - _WINDOW_SECONDS:
            self._sent.popleft()
        if not self.is_limited:
            return now
        at, excess = self._free_at, sum(sent for _, sent in self._sent) + units - max(units, int(self.rate))
        for sent_at, sent in self._sent:
            if excess <= 0:
                break
            at, excess = max(at, sent_at + _WINDOW_SECONDS), excess - sent
        return at

    def next_at(self, now: float) -> float:
        """Return when a request may be sent at the earliest, if those that wait are sent before."""
        return self.free_at(1, now) + sum(turn.units for turn in self._waiting) / self.rate

    def spare(self, now: float) -> float:
        """Return the most units that one request may have now; 0 if it would have to wait."""
        return 0 if self._waiting or now < self.free_at(1, now) else self.most

    def take(self, turn: Turn, now: float) -> float:
        """Let a request be sent and return 0.0; or return the seconds until it may, infinite if others go first."""
        if now - self._refused_at > _FORGET_SECONDS:
            self._share, self._start, self._in_a_row = inf, inf, 0
        seconds = self.free_at(turn.units, now) - now
        if self.is_limited:
            if turn not in self._waiting:
                turn.has_waited = False
                insort(self._waiting, turn, key=lambda other: other.order)
            if self._waiting[0] is not turn or seconds > 0:
                turn.has_waited = True
                return seconds if self._waiting[0] is turn else inf
            self._free_at = now + turn.units / self.rate
            turn.has_waited |= self.is_wanted
            self.is_wanted = False
            if turn.has_waited:
                self._waited += turn.units / self.rate
        self.leave(turn)
        turn.sent = now
        self._sent.append((now, turn.units))
        self._units += turn.units
        return 0.0

    def leave(self, turn: Turn) -> None:
        """Let a request wait no more, if it does."""
        if turn in self._waiting:
            self._waiting.remove(turn)

    def accepted(self, turn: Turn) -> None:
        """Note that the service did not refuse a request."""
        if turn.sent > self._refused_at:
            self._in_a_row = 0

    def refused(self, turn: Turn, now: float, pause: float = 0.0) -> None:
        """Note that the service refused a request, and asked for a `pause` of so many seconds, if it did."""
        turn.was_refused = True
        if (unit := (turn.sent, turn.units)) in self._sent:
            self._sent.remove(unit)
        if now - self._refused_at > _WARN_SECONDS:
            self._counted_from, self._refusals, self._units = now, 0, 0
        self._refusals += 1
        if turn.sent <= self._refused_at and self.is_limited:
            return  # it was sent before the last refusal was known
        if not self._in_a_row:
            is_counted = turn.sent > -inf
            recent = (units for sent, units in self._sent if sent > turn.sent - _WINDOW_SECONDS)
            used = sum(recent) if is_counted else _FIRST_UNITS
            if self.is_limited and turn.has_waited:
                self._share, self._start = self.rate, inf
            else:
                self._share, self._start = self.rate, max(_MIN_RATE, _FIRST_PART * used)
            self._waited = 0.0
        pause = max(pause, min(_PAUSE_SECONDS * 2**self._in_a_row, _MAX_PAUSE_SECONDS))
        self._free_at, self._refused_at = now + pause + _JITTER_SECONDS * random(), now
        self._in_a_row += 1

    def complaint(self, now: float) -> tuple[int, float] | None:
        """Return what to warn of, and count anew; None if it is not time to, or nothing to speak of.

        These are how many requests were refused, and how many units a second were sent.
        """
        seconds = now - self._counted_from
        if seconds < _WARN_SECONDS or self._refusals < _WARN_REFUSALS:
            return None
        found = self._refusals, self._units / seconds
        self._counted_from, self._refusals, self._units = now, 0, 0
        return found


class Pace:
    """The pace of this process's requests to one server. Thread-safe; a forked child keeps the rates.

    There is none for a server that is not known to have limits, and has not refused a request for them.
    """

    def __init__(self, server: str, *, is_careful: bool = False) -> None:
        """`server` is its URL. With `is_careful`, large requests are cut before the first refusal, too."""
        self._server, self._lanes = server, {kind: Lane() for kind in RequestKind}
        self._first_units = _FIRST_UNITS if is_careful else inf
        self.reset()

    def reset(self) -> None:
        """Forget what waits: in a forked child, it belongs to threads of the parent."""
        self._changed = threading.Condition()
        for lane in self._lanes.values():
            lane.forget_waiting()

    def spare(self, kind: RequestKind) -> float:
        """Return the most units that a request of this kind may have now; 0 if it would have to wait."""
        with self._changed:
            return min(self._lanes[kind].spare(time.monotonic()), self.most(kind))

    def want(self, kind: RequestKind) -> None:
        """Note that the caller would make a request if `spare` was more: the rate can grow."""
        self._lanes[kind].is_wanted = True

    def most(self, kind: RequestKind) -> float:
        """Return the most units that a request of this kind should have; infinite if no limit is known."""
        if self.is_limited(kind):
            return self._lanes[kind].most
        return _CAREFUL_UNITS if any(map(self.is_limited, RequestKind)) else self._first_units

    def next_at(self, kind: RequestKind) -> float:
        """Return the monotonic time at which `spare` may be more than 0; infinitely long ago without a limit."""
        if not self.is_limited(kind):
            return -inf
        with self._changed:
            return self._lanes[kind].next_at(time.monotonic())

    def is_limited(self, kind: RequestKind) -> bool:
        """Tell whether requests of this kind were refused not long ago: they should be few."""
        return self._lanes[kind].is_limited

    @property
    def reads_for_query(self) -> float:
        """Up to how many documents should be read one at a time instead of by a query."""
        return min(_MAX_READS, self.spare(RequestKind.READ)) if self.is_limited(RequestKind.QUERY) else 1

    @property
    def polling_factor(self) -> float:
        """How many times longer than usual the pauses between queries that only look for changes should be."""
        return _POLLING_FACTOR if self.is_limited(RequestKind.QUERY) else 1.0

    def wait(self, turn: Turn, seconds: float) -> bool:
        """Wait until a request may be sent, for at most so many seconds; return False if that time was too short."""
        lane, until = self._lanes[turn.kind], min(turn.until, time.monotonic() + seconds)
        with self._changed:
            try:
                while (pause := lane.take(turn, now := time.monotonic())) > 0:
                    if now >= until:
                        return False
                    self._changed.wait(min(pause, until - now))
            finally:
                lane.leave(turn)
                self._changed.notify_all()
        return True

    def accepted(self, turn: Turn) -> None:
        """Note that the service did not refuse a request."""
        with self._changed:
            self._lanes[turn.kind].accepted(turn)

    def refused(self, turn: Turn, pause: float) -> None:
        """Note that the service refused a request, and asked for a `pause` of so many seconds, if it did.

        The request can be sent again after a `wait`. *Raises* `TooManyUnits` if it has too many for that.
        """
        with self._changed:
            lane = self._lanes[turn.kind]
            lane.refused(turn, time.monotonic(), pause)
            complaint = lane.complaint(time.monotonic())
            self._changed.notify_all()
        if complaint is not None:
            logger.warning(
                '%s has refused %d %s requests of this process within a minute, because the limit is reached: it gets '
                '%.1f a second, less than it could use; choose a larger plan, see "celery -A your_app couchdb plan"',
                self._server,
                complaint[0],
                turn.kind.value,
                complaint[1],
            )
        if turn.units > lane.most:
            raise TooManyUnits(f'{self._server} refused {turn.units} units in one {turn.kind.value} request')
