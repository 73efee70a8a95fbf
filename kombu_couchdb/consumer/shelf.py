"""The shelf: messages claimed ahead (see `rate`). kombu never holds more messages of a channel than its prefetch count.

A message moves from the shelf into the mailbox when kombu decides about another one, in kombu's thread: it does not
wait for the I/O thread. If it waits for too long, it is given back, and other consumers can claim it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .delivery import Credit, Delivery
from .mailbox import Mailbox
from .rate import SHELF_SECONDS

__all__ = ['Shelf']


class Shelf:
    """The messages claimed ahead for all channels of a connection. Not thread-safe: the lock of `Unacked` guards it."""

    def __init__(self, mailbox: Mailbox[Delivery | Exception]) -> None:
        self._mailbox = mailbox
        self._credits: set[Credit] = set()  # those with messages on the shelf

    @property
    def queues(self) -> set[str]:
        """The queues of the messages."""
        return {delivery.doc['queue'] for credit in self._credits for delivery in credit.shelf.values()}

    def hand_over(self, delivery: Delivery) -> None:
        """Put a claimed message into the mailbox, or on the shelf if kombu has as many as the prefetch count."""
        delivery.shelved = time.monotonic()
        delivery.credit.shelf[delivery.tag] = delivery
        self._credits.add(delivery.credit)
        self.refill(delivery.credit)

    def refill(self, credit: Credit) -> None:
        """Move messages into the mailbox, in the order of their claims, as far as the prefetch count allows."""
        while credit.shelf and (not credit.limit or credit.handed < credit.limit):
            delivery = credit.shelf.pop(next(iter(credit.shelf)))
            delivery.handed = True
            credit.handed += 1
            self._mailbox.put([delivery])
        if not credit.shelf:
            self._credits.discard(credit)

    def take_out(self, delivery: Delivery) -> bool:
        """Forget a message: kombu has decided about it, or it is given back or lost. Tell if it was on the shelf."""
        credit = delivery.credit
        credit.handed -= delivery.handed
        delivery.handed = False
        was_shelved = credit.shelf.pop(delivery.tag, None) is not None
        if not credit.shelf:
            self._credits.discard(credit)
        return was_shelved

    def having(self, which: Callable[[Delivery], bool]) -> list[Delivery]:
        """Return the messages for which `which(delivery)` is true."""
        return [delivery for credit in self._credits for delivery in credit.shelf.values() if which(delivery)]

    def overdue_at(self) -> float | None:
        """Return the monotonic time at which the first message has waited for too long; None if there is no message."""
        return min(map(_overdue_at, self._credits), default=None)

    def overdue(self) -> list[Delivery]:
        """Return all messages of the channels for which one has waited for too long, and measure their rates anew."""
        now = time.monotonic()
        slow = [credit for credit in self._credits if _overdue_at(credit) <= now]
        for credit in slow:
            credit.rate.stalled()
        return self.having(lambda delivery: delivery.credit in slow)


def _overdue_at(credit: Credit) -> float:
    return next(iter(credit.shelf.values())).shelved + 2 * SHELF_SECONDS
