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
from math import inf

__all__ = ['Bell']

#: How long a listener leaves messages to others before it rings: this time for each rank, in seconds; and the rank of
#: those that are no listeners.
_RANK_SECONDS, _LAST_RANK = 0.1, 4

#: The pause after a bell in seconds. It doubles each time, up to the second number, while bells follow each other.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 30.0


class Bell:
    """When one consumer rings for which queues, for its I/O thread alone."""

    def __init__(self) -> None:
        #: By queue: messages that wait, as far as this consumer knows, and the monotonic time at which it rings if some
        #: of them still wait then.
        self._waiting: dict[str, tuple[Collection[str], float]] = {}
        #: By queue: when the bell rang last, here or elsewhere, and the pause after that.
        self._rang: dict[str, tuple[float, float]] = {}

    @property
    def due_at(self) -> float:
        """The monotonic time at which the next queue is due; infinite if there is none."""
        return min((at for _, at in self._waiting.values()), default=inf)

    @property
    def due(self) -> list[str]:
        """The queues to be read, because messages of them have waited long enough; see `check`."""
        now = time.monotonic()
        return [queue for queue, (_, at) in self._waiting.items() if at <= now]

    def knows(self, queue: str) -> bool:
        """Tell whether messages of a queue are known to wait."""
        return queue in self._waiting

    def waits(self, queue: str, rank: int | None, ids: Collection[str]) -> None:
        """Note messages (`ids`) for which this consumer, a listener of this rank or none, has no credit."""
        if queue not in self._waiting:
            after = 1.0 + rank if rank is not None else random.uniform(_LAST_RANK, 2 * _LAST_RANK)
            self._waiting[queue] = ids, max(time.monotonic() + _RANK_SECONDS * after, self._quiet_until(queue))

    def forget(self, queue: str) -> None:
        """Note that this consumer can take the messages of a queue itself, or that nobody may."""
        self._waiting.pop(queue, None)

    def check(self, queue: str, ids: Collection[str]) -> bool:
        """Take in the ids of the messages at the head of a queue; tell whether the bell must ring.

        It must if some of the messages that waited are still there. Otherwise somebody takes them.
        """
        if not {*ids} & {*self._waiting[queue][0]}:
            self.forget(queue)
            return False
        self.heard(queue)
        self._waiting[queue] = ids, self._quiet_until(queue)
        return True

    def heard(self, queue: str) -> None:
        """Note that the bell rings for a queue, here or elsewhere: wait for longer before the next time."""
        now = time.monotonic()
        at, pause = self._rang.get(queue, (-inf, 0.0))
        if now < at + pause / 2:
            return  # the same bell, or one that rang at the same time
        again = now < at + 4 * pause
        self._rang[queue] = now, min(2 * pause, _MAX_PAUSE_SECONDS) if again else _FIRST_PAUSE_SECONDS
        if queue in self._waiting:
            self._waiting[queue] = self._waiting[queue][0], self._quiet_until(queue)

    def _quiet_until(self, queue: str) -> float:
        at, pause = self._rang.get(queue, (-inf, 0.0))
        return at + pause * random.uniform(1.0, 1.2)
