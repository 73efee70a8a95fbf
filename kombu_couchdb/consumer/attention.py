"""Attention: whether a consumer listens to the changes feed or rests, and when a resting consumer looks. No I/O.

A changes feed costs CouchDB 0.4 ms of processor time for each update of its database, whether or not it reports the
update, so not all consumers can follow it. Of the consumers of a queue, two *listen*: those of the first ranks
(see `peers`), and, for some time, those that were woken by a bell or found messages by themselves, because the others
are evidently busy. All others *rest*. A consumer rests only after it has seen its queues empty. From then on it
*looks* at them, with one cheap read, when it gets credit again, when a bell rings (see `bell`), and at random times
that follow from the number of consumers, in case all listeners were killed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from math import inf

from ..leases.peers import Peers
from .bell import Bell

__all__ = ['Attention']

#: All resting consumers of a database together look about once in this time, in seconds; but each at least once in the
#: last and at most once in the second of these numbers of seconds.
_FLEET_SECONDS, _MIN_SECONDS, _MAX_SECONDS = 0.3, 1.0, 30.0

#: Only one of so many looks is also for queues that hardly ever receive anything but broadcasts.
_QUIET_LOOKS = 6

#: After a bell the consumers look one after the other, about once in this time, in seconds.
_WAKE_SECONDS = 0.005

#: How long a consumer that claimed a message while it rested listens after that, not counting the time without credit;
#: and the shortest time for which it pays to begin to listen: three requests.
_ACTIVE_SECONDS, _MIN_ACTIVE_SECONDS = 10.0, 0.25

#: About how many of the consumers that a bell wakes listen then.
_ACTIVE_SHARE = 2.0

#: About how many consumers listen at the same time because they have just become free.
_FREE_SHARE = 5.0

#: How long such a consumer follows the feed without credit, in seconds.
_LINGER_SECONDS = 1.0

#: A consumer that listens although its rank is too low stops after this many claims that others won, in a row.
_MAX_LOSSES = 2


class Attention:
    """The attention of one consumer, for its I/O thread alone."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        #: Whether the consumer follows the changes feed.
        self.listens = True
        #: Its place among the listeners; None if it is none of them by its rank.
        self.rank: int | None = 0
        #: The queues that it follows if it listens, and reads if it does not.
        self.followed: set[str] = set()
        #: When to wake the others.
        self.bell = Bell()
        self._active_until = -inf
        self._losses = 0
        self._look_at, self._credit_at = -inf, time.monotonic()
        self._looks = 0
        self._rung: set[str] = set()
        self._with_credit: set[str] = set()
        self._consumers = 1

    def update(
        self, own: str, queues: Collection[str], with_credit: set[str], *, quiet: Collection[str] = (), may_rest: bool
    ) -> set[str]:
        """Decide anew; return the queues that must be read now, because what happened in them was not followed.

        `own` is the id of this consumer, `queues` are its queues, `quiet` those of them that hardly ever receive
        anything but broadcasts, and `with_credit` those for which it could claim messages. `may_rest` is false if it
        must listen in any case.
        """
        now, quiet = time.monotonic(), frozenset(quiet)
        self._consumers = max((len(self._peers.of(queue, own)) for queue in queues), default=1)
        if with_credit - quiet:
            if not self._with_credit - quiet:
                # The longer tasks take, the longer this consumer listens: so a few of those that are free do.
                seconds = _FREE_SHARE * (now - self._credit_at) / self._consumers
                if seconds >= _MIN_ACTIVE_SECONDS:
                    self._active_until = max(self._active_until, now + min(seconds, _ACTIVE_SECONDS))
            self._credit_at = now
        elif self.is_active:
            self._active_until = now + _ACTIVE_SECONDS
        listeners = self._peers.listeners
        self.rank = listeners.index(own) if own in listeners else None
        if not may_rest or any(not self._peers.is_shared(queue, own) for queue in queues if queue not in quiet):
            self.rank = self.rank or 0  # nobody else would listen
        before, had_credit = self.listens, self._with_credit
        self.followed, self._with_credit = set(with_credit), set(with_credit)
        if self.rank is not None or (self.listens and self.is_active and now - self._credit_at < _LINGER_SECONDS):
            # A listener also follows queues without credit, to ring for others; but not while it knows that all wait.
            self.followed |= {queue for queue in queues if not self.bell.knows(queue)}
        self.listens = not may_rest or (bool(self.followed - quiet) and (self.rank is not None or self.is_active))
        if self.listens:
            return set() if before else self.followed
        if before:
            self._look_at = now + self._pause()
            return set(with_credit)
        if with_credit and now >= self._look_at:
            self._look_at = now + self._pause()
            self._looks += 1
            is_for_all = self._looks % _QUIET_LOOKS == 0 or not {*queues} - quiet
            return set(with_credit) if is_for_all else with_credit - quiet
        return with_credit - had_credit

    @property
    def is_active(self) -> bool:
        """Whether the consumer listens whatever its rank is: it has found messages by itself."""
        return time.monotonic() < self._active_until

    @property
    def look_at(self) -> float:
        """The monotonic time of the next look; infinite if the consumer listens, or has no credit."""
        return inf if self.listens or not self._with_credit else self._look_at

    def heard(self, queue: str) -> None:
        """Note that the bell rang for a queue: if the consumer rests and has credit for it, it looks soon."""
        self.bell.heard(queue)
        if not self.listens and queue in self._with_credit:
            self._rung.add(queue)
            soon = time.monotonic() + random.uniform(0.0, _WAKE_SECONDS * self._consumers)
            self._look_at = min(self._look_at, soon)

    def hurries(self, queue: str) -> bool:
        """Tell, once, whether the bell rang for a queue: then its messages need not be left to listeners."""
        rung = queue in self._rung
        self._rung.discard(queue)
        return rung

    def won(self, left: int) -> None:
        """Note that the consumer claimed a message, and knows of so many more (`left`)."""
        self._losses = 0
        # After a burst, which wakes all consumers, only some listen. Those that do are replaced by others in time.
        if self.rank is None and (self.listens or random.random() < _ACTIVE_SHARE / (1 + left)):
            self._active_until = time.monotonic() + _ACTIVE_SECONDS

    def lost(self) -> None:
        """Note that another consumer claimed a message that this one tried to claim."""
        self._losses += 1
        if self._losses >= _MAX_LOSSES:
            self._active_until = -inf

    def _pause(self) -> float:
        seconds = min(max(_MIN_SECONDS, _FLEET_SECONDS * len(self._peers)), _MAX_SECONDS)
        return random.uniform(0.75, 1.0) * seconds
