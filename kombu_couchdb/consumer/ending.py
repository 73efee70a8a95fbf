"""The end of a long queue: this consumer has claimed its messages, and the other consumers have many left. No I/O.

While others claim hundreds of messages, the changes feed is expensive: CouchDB reads and filters each change for each
feed. A read of the head is expensive, too: CouchDB first brings the index up to date, and a claim costs the index four
times as much as a deletion. So a consumer that waits for others reads the head a few times a second, and does not
follow the feed, until few messages are left. It claims none of the others' messages while they quickly become fewer.
"""

from __future__ import annotations

import time

__all__ = ['MANY_LEFT', 'Ending']

#: Up to this many messages of others are few.
MANY_LEFT = 32

#: How often the head is read while others have many messages left, in seconds.
_PACE_SECONDS = 0.25

#: If the others will probably have claimed their messages within this time, in seconds, they are left to them.
_SOON_SECONDS = 1.0


class Ending:
    """Decides for one queue when the head is read again, and whether messages of others are left to them until then."""

    def __init__(self) -> None:
        #: The monotonic time before which the head is not read again unless there is another reason.
        self.until = float('-inf')
        self._leaves = False
        self._read_at = float('-inf')

    @property
    def rests(self) -> bool:
        """Whether it is too early to read the head again."""
        return time.monotonic() < self.until

    @property
    def leaves(self) -> bool:
        """Whether this consumer leaves to the others what they may claim first: they will soon have claimed it."""
        return self._leaves and self.rests

    def read(self, before: int, left: int, *, is_end: bool) -> bool:
        """Note that a page was read; tell whether the queue must be read again, although it was read to its end.

        `left` is how many messages of the page others may claim first, and `before` is their number in the page before.
        `is_end`: the page is the last one.
        """
        now = time.monotonic()
        passed, self._read_at = now - self._read_at, now
        is_long = is_end and left > MANY_LEFT
        self.until = now + _PACE_SECONDS if is_long else float('-inf')
        self._leaves = is_long and left * passed <= (before - left) * _SOON_SECONDS
        return is_long
