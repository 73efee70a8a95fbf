"""Attention: whether a consumer listens to the changes feed or rests, and when it wakes others. No I/O.

A changes feed costs CouchDB 0.4 ms of processor time for each update of its database, whether or not it reports the
update, so not all consumers can follow it. Of the consumers of a queue, two *listen*: those of the first ranks
(see `Peers`), and, for some time, those that were woken by a bell or found messages by themselves, because the others
are evidently busy. All others *rest*. A consumer rests only after it has seen its queues empty. From then on it
*looks* at them, with one cheap read, when it gets credit again, when a bell rings (see below), and at random times
that follow from the number of consumers, in case all listeners were killed.

The *bell* wakes consumers that rest. A listener without credit still follows the feed. If a message is not claimed for
a moment, no other listener has credit either. A consumer that took the last message that it has credit for may know of
more, too. Then it rings: it writes a document that all consumers of the database learn of. If that does not help,
because all are busy, the bell rings again after longer and longer pauses: a consumer that gets credit again looks by
itself.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from zlib import crc32

from ..couchdb.client import Document
from ..leases.lease import queues_of

#: How many consumers of each queue listen, and the most listeners of a database that are chosen so. With many queues,
#: fewer of each queue listen, but at least one: each listener costs CouchDB 0.4 ms for each update of the database.
_PER_QUEUE, _MAX_LISTENERS = 2, 12

#: For how long a consumer is new, in seconds.
_NEW_SECONDS = 5.0

#: All resting consumers of a database together look about once in this time, in seconds; but each at least once in the
#: last and at most once in the second of these numbers of seconds.
_FLEET_SECONDS, _MIN_SECONDS, _MAX_SECONDS = 0.3, 1.0, 30.0

#: Only one of so many looks is also for queues that hardly ever receive anything but broadcasts. And how many seconds
#: lie between two looks at them, if the consumer begins and ends to listen more often.
_QUIET_LOOKS, _QUIET_SECONDS = 6, 1.0

#: After a bell the consumers look one after the other, about once in this time, in seconds.
_WAKE_SECONDS = 0.005

#: How long a consumer that claimed a message while it rested listens after that, not counting the time without credit;
#: and the shortest time for which it pays to begin to listen: three requests.
_ACTIVE_SECONDS, _MIN_ACTIVE_SECONDS = 10.0, 0.25

#: About how many of the consumers that a bell wakes listen then.
_ACTIVE_SHARE = 2.0

#: About how many consumers listen at the same time because they have just become free.
_FREE_SHARE = 5.0

#: How long a consumer without credit still counts on some: it follows the feed for so long, in seconds.
_LINGER_SECONDS = 1.0

#: A consumer that listens although its rank is too low stops after this many claims that others won, in a row.
_MAX_LOSSES = 2

#: How long a listener leaves messages to others before it rings: this time for each rank, in seconds; and the rank of
#: those that are no listeners.
_RANK_SECONDS, _LAST_RANK = 0.1, 10

#: The pause after a bell in seconds; while the same messages wait, it doubles each time, up to the second number.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 30.0

#: How often a listener reads a queue of which it knows that messages wait, in seconds: when it finds that they are
#: gone, it listens again.
_READ_SECONDS = 2.0


class Peers:
    """The known living consumers of a database, with their queues."""

    def __init__(self) -> None:
        self._queues: dict[str, frozenset[str]] = {}
        self._listeners: list[str] | None = None
        #: When the new ones were first seen, by the monotonic clock.
        self._new: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def seen(self, doc: Document) -> None:
        """Take in a Consumer document that was written or deleted."""
        if doc.get('_deleted'):
            self._queues.pop(doc['_id'], None)
            self._new.pop(doc['_id'], None)
        else:
            if doc['_id'] not in self._queues:
                self._new[doc['_id']] = time.monotonic()
            self._queues[doc['_id']] = queues_of(doc)
        self._listeners = None

    def keep(self, living: Collection[str]) -> None:
        """Forget all consumers but those with these ids."""
        self._queues = {name: queues for name, queues in self._queues.items() if name in living}
        self._new = {name: since for name, since in self._new.items() if name in living}
        self._listeners = None

    def to_read(self, living: Collection[str]) -> list[str]:
        """Return those of these ids whose documents must be read: unknown ones, and once more the new ones.

        A consumer that starts names its queues one after the other.
        """
        wanted = sorted({*living} - self._queues.keys() | self._new.keys())
        before = time.monotonic() - _NEW_SECONDS
        self._new = {name: since for name, since in self._new.items() if since > before}
        return wanted

    def set_own(self, own: str, queues: Collection[str]) -> None:
        """Take in the queues of this consumer itself, `own`."""
        if self._queues.get(own) != frozenset(queues):
            self._queues[own], self._listeners = frozenset(queues), None

    @property
    def listeners(self) -> list[str]:
        """The ids of the consumers that listen to the queues that several consumers share, by rank.

        All consumers that know of the same consumers choose the same: first those with the most queues.
        """
        if self._listeners is None:
            count = Counter(queue for queues in self._queues.values() for queue in queues)
            shared = {
                name: {queue for queue in queues if count[queue] > 1} for name, queues in sorted(self._queues.items())
            }
            ranked = sorted(shared, key=lambda name: (-len(shared[name]), crc32(name.encode())))
            for per_queue in range(_PER_QUEUE, 0, -1):
                self._listeners, served = [], Counter[str]()
                for name in ranked:
                    if any(served[queue] < per_queue for queue in shared[name]):
                        self._listeners.append(name)
                        served.update(shared[name])
                if len(self._listeners) <= _MAX_LISTENERS:
                    break
        return self._listeners or []

    def listeners_of(self, queue: str) -> list[str]:
        """Return the sorted ids of the listeners of a queue."""
        return sorted(name for name in self.listeners if queue in self._queues[name])

    def is_shared(self, queue: str, own: str) -> bool:
        """Tell whether other consumers than `own` serve this queue."""
        return any(queue in queues for name, queues in self._queues.items() if name != own)

    def consumers_of(self, queue: str, own: str) -> list[str]:
        """Return the sorted ids of a queue's consumers, with `own`: all consumers sort them in the same way."""
        return sorted({own} | {name for name, queues in self._queues.items() if queue in queues})


@dataclass
class _Waiting:
    """The messages of a queue that wait, as far as this consumer knows."""

    ids: Collection[str]
    #: The monotonic times at which it reads the queue again, and before which it does not ring.
    at: float
    ring_at: float
    pause: float = _FIRST_PAUSE_SECONDS

    def postpone(self, most: float) -> None:
        """Wait for longer after each bell that did not help; read the queue after `most` seconds at the latest."""
        now = time.monotonic()
        self.ring_at = now + self.pause * random.uniform(1.0, 1.2)
        self.at = min(self.ring_at, now + most)
        self.pause = min(2 * self.pause, _MAX_PAUSE_SECONDS)


class BellRinger:
    """When one consumer rings for which queues, for its I/O thread alone."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        #: By queue: the monotonic time at which the bell rang last, here or elsewhere.
        self._rang_at: dict[str, float] = {}
        self._reads_every = inf

    @property
    def due_at(self) -> float:
        """The monotonic time at which the next queue is due; infinite if there is none."""
        return min((waiting.at for waiting in self._waiting.values()), default=inf)

    @property
    def due(self) -> list[str]:
        """The queues to be read, because messages of them have waited long enough; see `check`."""
        now = time.monotonic()
        return [queue for queue, waiting in self._waiting.items() if waiting.at <= now]

    def knows(self, queue: str) -> bool:
        """Tell whether messages of a queue are known to wait."""
        return queue in self._waiting

    def waits(self, queue: str, rank: int | None, ids: Collection[str]) -> None:
        """Note messages (`ids`) for which this consumer, a listener of this rank or none, has no credit."""
        self._reads_every = inf if rank is None else _READ_SECONDS
        if queue not in self._waiting:
            after = 1.0 + rank if rank is not None else random.uniform(_LAST_RANK, 2 * _LAST_RANK)
            at = max(time.monotonic() + _RANK_SECONDS * after, self._rang_at.get(queue, -inf) + _FIRST_PAUSE_SECONDS)
            self._waiting[queue] = _Waiting(ids, at, at)

    def forget(self, queue: str) -> None:
        """Note that this consumer can take the messages of a queue itself, or that nobody may."""
        self._waiting.pop(queue, None)

    def keep(self, queues: Collection[str]) -> None:
        """Forget all other queues: this consumer does not serve them any more."""
        for queue in self._waiting.keys() - queues:
            del self._waiting[queue]

    def check(self, queue: str, ids: Collection[str]) -> bool:
        """Take in the ids of the messages at the head of a queue; tell whether the bell must ring.

        It must if some of the messages that waited are still there. Otherwise somebody takes them: `knows` is False.
        """
        waiting, now = self._waiting[queue], time.monotonic()
        if not {*ids} & {*waiting.ids}:
            self.forget(queue)
            return False
        waiting.at = now + min(self._reads_every, waiting.pause)
        if now < waiting.ring_at:
            return False
        waiting.ids = ids
        return True

    def heard(self, queue: str) -> None:
        """Note that the bell rang for a queue, here or elsewhere."""
        self._rang_at[queue] = time.monotonic()
        if queue in self._waiting:
            self._waiting[queue].postpone(self._reads_every)


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
        #: Those of its queues that hardly ever receive anything but broadcasts.
        self.quiet: frozenset[str] = frozenset()
        #: How many times longer than usual the pauses between looks are.
        self.pause_factor = 1.0
        #: When to wake the others.
        self.bell = BellRinger()
        self._active_until = -inf
        self._losses = 0
        self._look_at = -inf
        #: When it last had credit for a queue that is not quiet.
        self.credit_at = time.monotonic()
        self._looks = 0
        #: The quiet queues that must be read, and the monotonic time from which they may be.
        self.unread_quiet, self._quiet_at = set[str](), -inf
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
        self.quiet = frozenset(quiet)
        unread, now = self._unread(own, queues, with_credit, may_rest), time.monotonic()
        if self.quiet.issuperset(queues):
            due, self.unread_quiet = self.unread_quiet & {*queues}, set()
            return unread | due
        # To read a queue waits for the index, which a busy consumer changes all the time.
        self.unread_quiet = (self.unread_quiet | (unread & self.quiet)) & {*queues}
        if not self.unread_quiet or now < self._quiet_at:
            return unread - self.quiet
        due, self.unread_quiet, self._quiet_at = self.unread_quiet, set(), now + _QUIET_SECONDS
        return unread | due

    def _unread(self, own: str, queues: Collection[str], with_credit: set[str], may_rest: bool) -> set[str]:
        """Decide anew; return the queues that must be read, because what happened in them was not followed."""
        now = time.monotonic()
        self._consumers = max([len(self._peers.consumers_of(queue, own)) for queue in queues], default=1)
        if with_credit - self.quiet:
            if not self._with_credit - self.quiet:
                # The longer tasks take, the longer this consumer listens: so a few of those that are free do.
                seconds = _FREE_SHARE * (now - self.credit_at) / self._consumers
                if seconds >= _MIN_ACTIVE_SECONDS:
                    self._active_until = max(self._active_until, now + min(seconds, _ACTIVE_SECONDS))
            self.credit_at = now
        elif self.is_active:
            self._active_until = now + _ACTIVE_SECONDS
        listeners = self._peers.listeners
        self.rank = listeners.index(own) if own in listeners else None
        if not may_rest or any(not self._peers.is_shared(queue, own) for queue in queues if queue not in self.quiet):
            self.rank = self.rank or 0  # nobody else would listen
        before, had_credit = self.listens, self._with_credit
        self.followed, self._with_credit = set(with_credit), set(with_credit)
        if self.rank is not None or (self.listens and self.is_active and self.lingers):
            # A listener also follows queues without credit, to ring for others; but not while it knows that all wait.
            self.followed |= {queue for queue in queues if not self.bell.knows(queue)}
        self.listens = not may_rest or (bool(self.followed - self.quiet) and (self.rank is not None or self.is_active))
        if self.listens:
            return set() if before else self.followed
        if before:
            self._look_at = now + self._pause()
            return set(with_credit)
        if with_credit and now >= self._look_at:
            self._look_at = now + self._pause()
            self._looks += 1
            is_for_all = self._looks % _QUIET_LOOKS == 0 or not {*queues} - self.quiet
            return set(with_credit) if is_for_all else with_credit - self.quiet
        return with_credit - had_credit

    @property
    def lingers(self) -> bool:
        """Whether the consumer had credit a moment ago."""
        return time.monotonic() - self.credit_at < _LINGER_SECONDS

    @property
    def is_active(self) -> bool:
        """Whether the consumer listens whatever its rank is: it has found messages by itself."""
        return time.monotonic() < self._active_until

    @property
    def look_at(self) -> float:
        """The monotonic time of the next look; infinite if the consumer listens, or has no credit."""
        quiet_at = self._quiet_at if self.unread_quiet else inf
        return quiet_at if self.listens or not self._with_credit else min(self._look_at, quiet_at)

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
        seconds = min(max(_MIN_SECONDS, _FLEET_SECONDS * len(self._peers)) * self.pause_factor, _MAX_SECONDS)
        return random.uniform(0.75, 1.0) * seconds
