"""The bell: a consumer that knows of messages and cannot take them wakes the consumers that rest. No I/O.

A listener without credit still follows the feed. If a message is not claimed for a moment, no other listener has credit
either. A consumer that took the last message that it has credit for may know of more, too. Then it rings: it writes a
document that all consumers of the database learn of. If that does not help, because all are busy, the bell rings
again after longer and longer pauses: a consumer that gets credit again looks by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

__all__ = ['Bell']

#: How long a listener leaves messages to others before it rings: this time for each rank, in seconds; and the rank of
#: those that are no listeners.
_RANK_SECONDS, _LAST_RANK = 0.1, 10

#: The pause after a bell in seconds; while the same messages wait, it doubles each time, up to the second number.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 30.0

#: How often a listener reads a queue of which it knows that messages wait, in seconds: when it finds that they are
#: gone, it listens again.
_READ_SECONDS = 2.0


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


class Bell:
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
        self._waiting = {queue: waiting for queue, waiting in self._waiting.items() if queue in queues}

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
