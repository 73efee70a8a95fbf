"""Credit: how many messages a channel may hold, and how many it may claim ahead while it works them off quickly.

The throughput is that of the last decisions about messages (acks, mostly), at least two rounds of the prefetch count:
tasks of one second that end together in a pool of eight are eight a second, not eight in a millisecond. The time since
the last decision counts, so the throughput falls while nothing is decided.

A channel without a prefetch limit starts with one message that is claimed ahead. The number doubles when kombu's thread
asks for more messages and finds none. So a program that receives one message and stops holds no others.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

#: For how long a message that was claimed ahead should wait for credit, in seconds. It is given back after twice as
#: long: then the throughput has fallen.
SHELF_SECONDS = 0.1

#: For how long the messages of a channel should last in all, those that kombu holds and those claimed ahead, in
#: seconds: for the pause between two cycles and for the requests of one. A prefetch count that lasts so long needs no
#: more.
_STOCK_SECONDS = 0.15

#: The fewest and the most decisions that are measured.
_MIN_DECISIONS, _MAX_DECISIONS = 16, 512

#: The most messages that are claimed ahead for a channel.
_MAX_AHEAD = 256

#: After a stall, the throughput counts again after this number of decisions at most.
_MAX_PENALTY = 4096


class Throughput:
    """How fast the messages of one channel are worked off. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MAX_DECISIONS)
        # Decisions that are not measured yet after a stall, how many they were at first, and all since the stall.
        self._skipped = self._penalty = self._since_stall = 0

    def note(self, now: float) -> None:
        """Note a decision about a message."""
        self._since_stall += 1
        if self._since_stall > 4 * self._penalty:
            self._penalty = 0
        if self._skipped:
            self._skipped -= 1
        else:
            self._times.append(now)

    def stalled(self) -> None:
        """Measure anew: messages waited for longer than the throughput had promised.

        If that happens again and again, each new measurement begins later: giving messages back costs writes.
        """
        self._times.clear()
        self._skipped = self._penalty = min(max(_MIN_DECISIONS, 2 * self._penalty), _MAX_PENALTY)
        self._since_stall = 0

    def ahead(self, limit: int, now: float) -> int:
        """Return how many messages may be claimed beyond the prefetch count `limit`: 0 before two rounds of it."""
        count = min(max(2 * limit, _MIN_DECISIONS), _MAX_DECISIONS)
        if len(self._times) < count:
            return 0
        per_second = count / max(now - self._times[-count], 0.001)
        return max(0, min(int(per_second * SHELF_SECONDS), int(per_second * _STOCK_SECONDS) - limit, _MAX_AHEAD))


@dataclass(eq=False)
class Credit:
    """How many messages a channel may hold: AMQP's prefetch count. The lock of `Unacked` guards it."""

    #: The prefetch count; 0 is no limit.
    limit: int = 0
    #: How many messages are claimed for the channel and not decided yet.
    held: int = 0
    #: How many of those are not delivered to kombu yet.
    waiting: int = 0
    #: How many of those that are held were put into the mailbox: never more than the limit. The others are on the shelf
    #: of `Unacked`, or wait for their bodies.
    handed: int = 0
    #: Without a limit: how many messages were delivered to kombu since its thread last asked for more.
    delivered: int = 0
    #: Without a limit: how many messages are claimed ahead.
    ahead: int = 1
    #: With a limit: how fast the messages are worked off.
    throughput: Throughput = field(default_factory=Throughput, repr=False)

    @property
    def free(self) -> int:
        """How many more may be claimed now. Without a limit a message counts until kombu's thread asks for more."""
        return self.limit - self.held if self.limit else self.ahead - self.waiting - self.delivered

    @property
    def surplus(self) -> int:
        """How many messages may be claimed now beyond the limit."""
        return self.throughput.ahead(self.limit, time.monotonic()) if self.limit else 0

    def room(self, *, ahead: bool) -> int:
        """Return how many more may be claimed now; with `ahead`, also beyond the limit."""
        return self.free + (self.surplus if ahead else 0)

    @property
    def is_low(self) -> bool:
        """Whether at least half of what may be claimed is worked off, or there is no limit: to claim more is urgent."""
        surplus = self.surplus
        return not self.limit or 2 * (self.free + surplus) >= self.limit + surplus

    def count_delivery(self) -> None:
        """Note that kombu's thread has received a message."""
        self.waiting -= 1
        if not self.limit:
            self.delivered += 1

    def request_more(self, most: int, *, found_nothing: bool) -> bool:
        """Note that kombu's thread asks for messages; tell whether more may be claimed, because there is no limit.

        If it `found_nothing`, twice as many messages as before are claimed ahead, up to `most`.
        """
        more, self.delivered = self.delivered > 0, 0
        if more and found_nothing:
            self.ahead = min(2 * self.ahead, most)
        return more

    def reset_ahead(self) -> None:
        """Forget how many messages are claimed ahead without a limit: the channel has no subscription any more."""
        self.delivered, self.ahead = 0, 1


@dataclass(eq=False)
class Subscription:
    """One `basic_consume`. Without a reference to its channel: the I/O thread must not keep a dropped connection."""

    queue: str
    credit: Credit
    #: How many messages were claimed for it: of subscriptions with equal credit, the one with the fewest is next.
    claimed: int = 0
