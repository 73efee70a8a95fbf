"""The bell: a consumer that knows of messages and cannot take them wakes the consumers that rest. No I/O.

A listener without credit still follows the feed. If a message is not claimed for a moment, no other listener has credit
either. A consumer that took the last message that it has credit for may know of more, too. Then it rings: it writes a
document that all consumers of the database learn of. If that does not help, because all are busy, the bell rings
again after longer and longer pauses: a consumer that gets credit again looks by itself.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from math import inf

__all__ = ['Bell']

#: How long a listener leaves messages to others before it rings: this time for each rank, in seconds; and the rank of
#: those that are no listeners.
_RANK_SECONDS, _LAST_RANK = 0.1, 4

#: The pause after a bell, if messages still wait; it doubles each time, up to the second number. In seconds.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 30.0


@dataclass
class _Waiting:
    """The messages of a queue that wait, as far as this consumer knows."""

    #: The monotonic time at which it rings, if they still wait then.
    at: float
    pause: float = _FIRST_PAUSE_SECONDS


class Bell:
    """When one consumer rings for which queues, for its I/O thread alone."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    @property
    def due_at(self) -> float:
        """The monotonic time at which the next queue is due; infinite if there is none."""
        return min((waiting.at for waiting in self._waiting.values()), default=inf)

    @property
    def due(self) -> list[str]:
        """The queues whose messages have waited long enough: if they still wait, ring."""
        now = time.monotonic()
        return [queue for queue, waiting in self._waiting.items() if waiting.at <= now]

    def knows(self, queue: str) -> bool:
        """Tell whether messages of a queue are known to wait."""
        return queue in self._waiting

    def waits(self, queue: str, rank: int | None) -> None:
        """Note that messages wait for which this consumer, a listener of this rank or none, has no credit."""
        if queue not in self._waiting:
            after = 1.0 + rank if rank is not None else random.uniform(_LAST_RANK, 2 * _LAST_RANK)
            self._waiting[queue] = _Waiting(time.monotonic() + _RANK_SECONDS * after)

    def forget(self, queue: str) -> None:
        """Note that no messages of a queue wait, or that this consumer can take them itself."""
        self._waiting.pop(queue, None)

    def rang(self, queue: str) -> None:
        """Note that this consumer rings for a queue."""
        if waiting := self._waiting.get(queue):
            waiting.at = time.monotonic() + waiting.pause

    def heard(self, queue: str) -> None:
        """Note that the bell has rung for a queue, here or elsewhere: wait for longer before the next time."""
        if waiting := self._waiting.get(queue):
            waiting.at = time.monotonic() + waiting.pause * random.uniform(1.0, 1.2)
            waiting.pause = min(2 * waiting.pause, _MAX_PAUSE_SECONDS)
