"""Early acks: tasks whose messages are acknowledged when they begin: those that wait to begin, those that have begun.

Until such an ack is stored, the task would run again if the process were killed. So no task begins while CouchDB does
not store the acks of those before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import TypeAlias

from .delivery import Delivery

#: While the ack of a task that has begun is not stored for so long, in seconds, no other task begins.
_SILENCE_SECONDS = 1.0

#: Called once, with whether a task may begin.
Decide: TypeAlias = Callable[[bool], None]


class EarlyAcks:
    """The tasks of one consumer; the lock of `Unacked` guards it."""

    def __init__(self) -> None:
        #: Whether CouchDB does not respond.
        self.in_outage = False
        #: By delivery tag: who is told when a task that waits may begin. The deliveries whose acks are not stored, and
        #: since when, in this order. The tags of tasks that may begin and are acknowledged already.
        self._waiting: dict[str, Decide] = {}
        self._storing: dict[str, tuple[float, Delivery]] = {}
        self._confirmed: set[str] = set()

    def __contains__(self, tag: str) -> bool:
        """Whether the ack of a task that has begun is not stored yet."""
        return tag in self._storing

    @property
    def is_stalled(self) -> bool:
        """Whether no task may begin now."""
        oldest, _ = next(iter(self._storing.values()), (inf, None))
        return self.in_outage or time.monotonic() - oldest >= _SILENCE_SECONDS

    def wait(self, tag: str, decide: Decide) -> None:
        """Let a task wait until it may begin."""
        self._waiting[tag] = decide

    def withdraw(self, tag: str) -> bool:
        """Let a task wait no more; return False if it does not wait."""
        return self._waiting.pop(tag, None) is not None

    def pop(self) -> tuple[str, Decide] | None:
        """Return the next task that waits and may begin, which then waits no more; None if there is none."""
        if not self._waiting or self.is_stalled:
            return None
        tag = next(iter(self._waiting))
        return tag, self._waiting.pop(tag)

    def end(self) -> list[Decide]:
        """Let no task wait any more; return all who must be told that theirs must not begin."""
        waiting, self._waiting = [*self._waiting.values()], {}
        return waiting + [delivery.confirmed for _, delivery in self._storing.values() if delivery.confirmed]

    def store(self, delivery: Delivery) -> None:
        """Note that the ack of a task is to be stored.

        With `confirm_acks` the task begins after that. It would be lost, not repeated, if the process were killed: so
        its message counts for the prefetch count until then.
        """
        self._storing[delivery.tag] = (time.monotonic(), delivery)
        delivery.credit.begun += delivery.confirmed is None

    def settle(self, delivery: Delivery, stored: bool) -> None:
        """Note whether the ack is stored."""
        del self._storing[delivery.tag]
        delivery.credit.begun -= delivery.confirmed is None
        if stored and delivery.confirmed is not None:
            self._confirmed.add(delivery.tag)

    def pop_confirmed(self, tag: str) -> bool:
        """Tell, once, whether the message was acknowledged before its task began."""
        is_confirmed = tag in self._confirmed
        self._confirmed.discard(tag)
        return is_confirmed
