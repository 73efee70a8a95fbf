"""The silence of other consumers, measured by this process's own monotonic clock.

Each heartbeat changes `expires` in the consumer's document. If a process reads the same value again, it knows that the
consumer wrote no heartbeat in between, whatever the clocks say. The server's time is only used to date a heartbeat that
was written between two looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from math import inf
from typing import Any, NamedTuple

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from .lease import IDLE_LEASES

#: A lease has expired if the consumer was silent for this much longer than the lease. It is also the error that the
#: server's time may have.
GRACE_SECONDS = 2.0

#: The largest part of a lease that may count as passed by the server's time alone, as a fraction. The sweeper must
#: measure the rest with its monotonic clock. The rest is longer than a third of the lease, the interval of heartbeats,
#: so a living consumer writes a heartbeat in it, and does not lose its lease because a clock is wrong.
CLOCK_SHARE = 0.6

#: The longest lease: `visibility_timeout` has the same limit, see `options`.
_MAX_LEASE_SECONDS = 1e9


class _Seen(NamedTuple):
    """A heartbeat: its `expires`, the lease in seconds, and the monotonic time from which the silence counts."""

    expires: float
    lease: float
    since: float
    #: Whether the consumer holds something that others wait for.
    holds: bool

    @property
    def longest_silence(self) -> float:
        """The seconds after which the lease has ended if no heartbeat was written."""
        return self.lease * (1.0 if self.holds else IDLE_LEASES) + GRACE_SECONDS


class Watch:
    """The heartbeats of other consumers, as one process has seen them."""

    def __init__(self, clock: ServerClock, lease: float, clock_share: float = CLOCK_SHARE) -> None:
        """Create a watch that has seen no heartbeat.

        `lease`, in seconds, is assumed for documents without a valid one. `clock_share` is the largest part of a lease
        that may count as passed by the server's time alone.
        """
        self._clock, self._lease, self._clock_share = clock, lease, clock_share
        self._seen: dict[str, _Seen] = {}
        #: The monotonic time at which the last look began, and how far the server's time was ahead of the monotonic
        #: clock.
        self._looked = -inf
        self._ahead: float | None = None

    def observe(
        self,
        expires: Mapping[str, float],
        asked: float,
        fetch: Callable[[list[str]], list[Document | None]],
        holding: Container[str] = (),
    ) -> None:
        """Take in `expires` of all consumers, by id. The request that read it was sent at the monotonic time `asked`.

        `fetch` returns the documents of new consumers, from which their leases are read. `holding` has the ids of those
        that hold messages.
        """
        answered, now = time.monotonic(), self._clock.now()
        looked, self._looked = self._looked, asked
        ahead, self._ahead = self._ahead, now - answered
        # The server's time is not used if its clock was set since the last look. On the first look there is nothing to
        # compare with: then it is used only if the local clock agrees with it.
        trusted = self._clock.agrees if ahead is None else abs(self._ahead - ahead) <= GRACE_SECONDS
        new = sorted(expires.keys() - self._seen.keys())
        leases = {name: _lease_of(doc, self._lease) for name, doc in zip(new, fetch(new) if new else [], strict=True)}
        before, self._seen = self._seen, {}
        for name, end in expires.items():
            seen = before.get(name)
            if seen is None or seen.expires != end:
                lease = leases[name] if seen is None else seen.lease
                written = answered - (now - (end - lease)) if trusted else answered
                since = min(answered, max(written, looked, answered - self._clock_share * lease))
                seen = _Seen(end, lease, since, True)
            self._seen[name] = seen._replace(holds=name in holding)

    def interrupted(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence: consumers could not write, or this process could not read."""
        now = time.monotonic()
        self._seen = {name: seen._replace(since=min(now, seen.since + seconds)) for name, seen in self._seen.items()}
        self._looked = now  # for heartbeats that the next look finds changed, the silence begins now or later

    def expires(self, name: str) -> float | None:
        """Return `expires` of a consumer as the last look found it; None if it did not find the consumer."""
        return self._seen[name].expires if name in self._seen else None

    def silent(self) -> list[str]:
        """Return the ids of consumers that had been silent for longer than their leases at the last look."""
        return [name for name, seen in self._seen.items() if self._looked - seen.since > seen.longest_silence]

    @property
    def suspects(self) -> bool:
        """Whether, at the last look, the heartbeat of a consumer that holds something was missing."""
        return any(seen.holds and self._looked - seen.since > seen.lease / 2 for seen in self._seen.values())

    def next_in(self) -> float:
        """Return the seconds until the next look is due; infinite if no consumer was seen.

        It is due when the first lease may have expired, and at the latest after `CLOCK_SHARE` of the shortest lease: a
        later look could not count the full age of a heartbeat that was written since this one.
        """
        now = time.monotonic()
        return min(
            (min(seen.since + seen.longest_silence - now, CLOCK_SHARE * seen.lease) for seen in self._seen.values()),
            default=inf,
        )


def expires_of(doc: Document) -> float:
    """Return `expires` of a Consumer document as the view `leases` emits it."""
    return max(-1e12, min(1e12, _number(doc.get('expires')) or 0.0))


def ends_at(doc: Document) -> float:
    """Return the server's time at which a consumer's lease ends, if it holds nothing and writes no more heartbeats.

    A sweep deletes the document of a consumer that is silent for longer. Without any consumer, nobody sweeps.
    """
    return expires_of(doc) + (IDLE_LEASES - 1) * _lease_of(doc, 0.0)


def _lease_of(doc: Document | None, default: float) -> float:
    if not doc:
        return default
    date, expires = _number(doc.get('date')), _number(doc.get('expires'))
    lease = expires - date if date is not None and expires is not None else default
    return lease if 0 < lease <= _MAX_LEASE_SECONDS else default


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(max(-1e15, min(1e15, value)))
