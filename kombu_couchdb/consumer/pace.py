"""The pace of a consumer: of its cycles, and of the decisions about its messages; and the wakeup of its I/O thread.

While messages flow, they share cycles; a message after a quiet time waits for none.

A cycle costs the server a request or two, whether it writes one document or twenty. The consumer works on meanwhile:
messages that it has claimed ahead bridge the pause.
"""

from __future__ import annotations

import time
from collections import deque
from math import inf
from queue import Empty, SimpleQueue

#: The time from the beginning of one cycle to that of the next while messages flow, in seconds; and the least time
#: between two looks at the changes feed then: a message that it reports should not wait for as long.
_CYCLE_SECONDS, _FEED_SECONDS = 0.06, 0.028

#: Messages flow if a cycle claimed at least this many in the last so many seconds. Somebody who sends one task, waits
#: for its result and sends the next never makes it two.
_MIN_CLAIMS, _FLOW_SECONDS = 2, 0.1

#: How long an ack waits for other acks, or for a claim, to share one request, in seconds. Separate requests for acks
#: and claims would be twice the work. If there is nothing to claim, an ack waits for a short time, or, while messages
#: flow, until the feed reports the next ones. If there is, it waits at least for the third time and until `next_at`.
_IDLE_DELAY_SECONDS, _FLOWING_DELAY_SECONDS, _BUSY_DELAY_SECONDS = 0.02, 0.045, 0.005

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


class Pace:
    """When the next cycle should begin. The I/O thread notes its cycles; any thread may ask."""

    def __init__(self) -> None:
        self._began = self._flowed = float('-inf')  # monotonic times

    def begin(self) -> None:
        """Note that a cycle begins."""
        self._began = time.monotonic()

    def claimed(self, count: int) -> None:
        """Note that the cycle claims this many messages for subscriptions."""
        if count >= _MIN_CLAIMS:
            self._flowed = time.monotonic()

    @property
    def flowing(self) -> bool:
        """Whether messages arrive, or wait, in such numbers that cycles should be shared."""
        return time.monotonic() - self._flowed < _FLOW_SECONDS

    @property
    def next_at(self) -> float:
        """The monotonic time of the next cycle, if nothing is urgent."""
        return self._began + _CYCLE_SECONDS

    @property
    def seconds_to_next(self) -> float:
        """How many seconds something can wait that should share the next cycle of a flow; 0.0 without a flow."""
        return max(0.0, self.next_at - time.monotonic()) if self.flowing else 0.0

    @property
    def feed_interval(self) -> float:
        """The least seconds between two looks at the changes feed; 0.0: as the feed likes."""
        return _FEED_SECONDS if self.flowing else 0.0

    def ack_delay(self, *, is_low: bool, more_to_claim: bool) -> float:
        """Return how long an ack may wait for others, in seconds.

        `is_low`: whether to claim more is urgent; `more_to_claim`: whether messages can be claimed.
        """
        if not more_to_claim:
            return _FLOWING_DELAY_SECONDS if self.flowing else _IDLE_DELAY_SECONDS
        return 0.0 if is_low else max(_BUSY_DELAY_SECONDS, self.next_at - time.monotonic())


class Throughput:
    """How fast the messages of one channel are worked off. Times are monotonic, in seconds.

    It is that of the last decisions about messages (acks, mostly), at least two rounds of the prefetch count: tasks of
    one second that end together in a pool of eight are eight a second, not eight in a millisecond. The time since the
    last decision counts, so the throughput falls while nothing is decided.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MAX_DECISIONS)
        # How many decisions there were since the last stall, and how many of them are not measured.
        self._since_stall = self._penalty = 0

    def note(self, now: float) -> None:
        """Note a decision about a message."""
        self._since_stall += 1
        if self._since_stall > self._penalty:
            self._times.append(now)

    def stalled(self) -> None:
        """Measure anew: messages waited for longer than the throughput had promised.

        If that happens again and again, each new measurement begins later: giving messages back costs writes.
        """
        again = self._since_stall <= 4 * self._penalty
        self._penalty = min(2 * self._penalty, _MAX_PENALTY) if again and self._penalty else _MIN_DECISIONS
        self._since_stall = 0
        self._times.clear()

    def ahead(self, limit: int, now: float) -> int:
        """Return how many messages may be claimed beyond the prefetch count `limit`: 0 before two rounds of it."""
        count = min(max(2 * limit, _MIN_DECISIONS), _MAX_DECISIONS)
        if len(self._times) < count:
            return 0
        per_second = count / max(now - self._times[-count], 0.001)
        return max(0, min(int(per_second * SHELF_SECONDS), int(per_second * _STOCK_SECONDS) - limit, _MAX_AHEAD))


class Wakeup:
    """The wakeup of the I/O thread: at once, or a little later, so that more work shares the next cycle.

    Any thread sets it, and one thread waits for it. `set` takes no lock that the same thread may hold: a finalizer may
    call it at any point, also during `wait`.
    """

    def __init__(self) -> None:
        self._times: SimpleQueue[float] = SimpleQueue()  # monotonic times by which a cycle should begin
        self._cycle_at = inf  # the earliest of those that were taken from the queue

    def set(self, within: float = 0.0) -> None:
        """Wake the waiting thread within `within` seconds. An earlier time from another call still counts."""
        self._times.put(time.monotonic() + within)

    def interrupt(self) -> None:
        """End a wait at once, without a cycle: something must be written before all else."""
        self._times.put(inf)

    def wait(self, timeout: float) -> bool:
        """Wait until the earliest time that was set, for at most `timeout` seconds; then forget all times, return True.

        Return False, and keep the times, if the wait was interrupted before.
        """
        end, interrupted = time.monotonic() + timeout, False
        while True:
            rest = min(end, self._cycle_at) - time.monotonic()
            try:
                # Empty the queue of times in any case: otherwise one `set` could end two waits.
                may_wait = rest > 0 and not interrupted
                at = self._times.get(timeout=rest) if may_wait else self._times.get_nowait()
            except Empty:
                if rest <= 0:
                    self._cycle_at = inf
                    return True
                if interrupted:
                    return False
            else:
                interrupted |= at == inf
                self._cycle_at = min(self._cycle_at, at)
