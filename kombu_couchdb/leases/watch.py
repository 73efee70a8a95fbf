"""The silence of other consumers, measured by this process's own monotonic clock.

Each heartbeat changes `expires` in the consumer's document. A process that reads the same value again knows that the consumer
wrote no heartbeat in between, whatever the clocks say. Clocks only help to date a heartbeat that was written between two looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock

__all__ = ['CREDIT', 'GRACE', 'Overdue', 'Watch', 'mark_of']

#: How much longer than its lease a consumer must have been silent, in seconds, and how exact the server's time is.
GRACE = 2.0

#: How much of a lease the server's time may prove. The rest is watched: it is longer than the pause between two heartbeats, a
#: third of the lease, so that a clock that is wrong ends the lease of no consumer that lives.
CREDIT = 0.6

#: The longest lease there is, in seconds: see `options`.
_MOST = 1e9


class _Seen(NamedTuple):
    """A heartbeat: its `expires`, the lease of its consumer in seconds, and the monotonic time from which its silence counts."""

    mark: float
    lease: float
    since: float


class Watch:
    """What one process has seen of the heartbeats of others.

    `lease`, in seconds, is assumed of a document that does not tell its own, and `credit` is how much of a lease the server's
    time may prove.
    """

    def __init__(self, clock: ServerClock, lease: float, credit: float = CREDIT) -> None:
        self._clock, self._lease, self._credit = clock, lease, credit
        self._seen: dict[str, _Seen] = {}
        #: The monotonic time at which the look before began, and how much the server's time was ahead of it.
        self._looked = -inf
        self._ahead: float | None = None

    def look(
        self, marks: Mapping[str, float], asked: float, fetch: Callable[[list[str]], list[Document | None]]
    ) -> None:
        """Take in the `expires` of all consumers, by id, as read from the monotonic time `asked` on.

        `fetch` returns the documents of consumers that are new: what they say of their leases.
        """
        answered, now = time.monotonic(), self._clock.now()
        looked, self._looked = self._looked, asked
        ahead, self._ahead = self._ahead, now - answered
        # A clock that was set since the look before proves nothing. On the first look the local one must agree with the server's.
        trusted = self._clock.agrees if ahead is None else abs(self._ahead - ahead) <= GRACE
        new = sorted(marks.keys() - self._seen.keys())
        leases = {name: _lease_of(doc, self._lease) for name, doc in zip(new, fetch(new) if new else [], strict=True)}
        before, self._seen = self._seen, {}
        for name, mark in marks.items():
            seen = before.get(name)
            if seen is None or seen.mark != mark:
                lease = leases[name] if seen is None else seen.lease
                written = answered - (now - (mark - lease)) if trusted else answered
                seen = _Seen(mark, lease, min(answered, max(written, looked, answered - self._credit * lease)))
            self._seen[name] = seen

    def interrupted(self, seconds: float) -> None:
        """Do not count so many seconds up to now: nobody could write a heartbeat then, or this process could not see any."""
        now = time.monotonic()
        self._seen = {name: seen._replace(since=min(now, seen.since + seconds)) for name, seen in self._seen.items()}
        self._looked = now  # what is new on the next look counts from here at the earliest

    def mark(self, name: str) -> float | None:
        """Return the `expires` that a consumer had on the last look."""
        return self._seen[name].mark if name in self._seen else None

    def silent(self) -> list[str]:
        """Return the consumers that were silent for longer than their leases until the last look."""
        return [name for name, seen in self._seen.items() if self._looked - seen.since > seen.lease + GRACE]

    def proven_in(self, longest: float) -> float:
        """Return in how many seconds all that have leases of up to `longest` seconds can be proven to be silent."""
        now = time.monotonic()
        return max(
            (seen.since + seen.lease + GRACE - now for seen in self._seen.values() if seen.lease <= longest),
            default=0.0,
        )

    def next_in(self) -> float:
        """Return in how many seconds to look again, `inf` if there is nobody to look at.

        That is when the first consumer could be silent for too long, and before a heartbeat is older than the server's time may
        prove.
        """
        now = time.monotonic()
        return min(
            (min(seen.since + seen.lease + GRACE - now, CREDIT * seen.lease) for seen in self._seen.values()),
            default=inf,
        )


class Overdue:
    """Queues whose lifetime is over by the server's time: only a second look, `pause` seconds later, proves anything."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._seen: dict[str, tuple[float, float]] = {}  # `expires`, and the monotonic time since which it was seen

    def proven(self, marks: Mapping[str, float], asked: float) -> list[str]:
        """Take in the `expires` of all queues that are overdue, by name, as read at the monotonic time `asked`.

        Return those that were so a while ago, too: the first time, the clock may only have jumped.
        """
        before, self._seen = self._seen, {name: (mark, asked) for name, mark in marks.items()}
        self._seen.update({name: seen for name, seen in before.items() if seen[0] == marks.get(name)})
        return [name for name, (_, since) in self._seen.items() if asked - since >= self._pause]

    def next_in(self) -> float:
        """Return in how many seconds the first of the others is proven, `inf` if there is none."""
        now = time.monotonic()
        return min((left for _, since in self._seen.values() if (left := since + self._pause - now) > 0), default=inf)


def mark_of(doc: Document) -> float:
    """Return the `expires` of a Consumer document as the view `leases` has it."""
    return max(-1e12, min(1e12, _number(doc.get('expires')) or 0.0))


def _lease_of(doc: Document | None, default: float) -> float:
    if not doc:
        return default
    date, expires = _number(doc.get('date')), _number(doc.get('expires'))
    lease = expires - date if date is not None and expires is not None else default
    return lease if 0 < lease <= _MOST else default


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(max(-1e15, min(1e15, value)))
