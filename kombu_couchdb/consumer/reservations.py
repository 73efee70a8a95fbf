"""Reservations: a claim takes credit before it is written, and returns it if it fails."""

from __future__ import annotations

from .delivery import Credit, Delivery, Subscription
from .mailbox import Mailbox
from .pace import Pace
from .pending_writes import PendingWrites
from .shelf import Shelf
from .subscriptions import Subscriptions

__all__ = ['Reservations']


class Reservations(PendingWrites):
    """The credit of the subscriptions of a connection. Any thread may call any method."""

    def __init__(self, mailbox: Mailbox[Delivery | Exception], unlimited: int) -> None:
        super().__init__()
        #: When the next cycle should begin.
        self.pace = Pace()
        self._mailbox, self._subscriptions, self._shelf = mailbox, Subscriptions(unlimited), Shelf(mailbox)

    @property
    def queues(self) -> set[str]:
        """The queues of the subscriptions."""
        with self._lock:
            return self._subscriptions.queues

    @property
    def paused(self) -> frozenset[str]:
        """The paused queues."""
        with self._lock:
            return self._subscriptions.paused

    def credit(self, *, ahead: bool = False) -> dict[str, int]:
        """Return for each queue how many messages may be claimed for it now.

        With `ahead`, those count that may be claimed beyond the prefetch count.
        """
        with self._lock:
            return self._subscriptions.credit(ahead=ahead)

    def low(self) -> set[str]:
        """Return the queues with a subscription whose messages will soon be worked off."""
        with self._lock:
            return self._subscriptions.low()

    def reserve(self, queue: str, *, ahead: bool = False) -> Subscription | None:
        """Take credit for one message from the subscription with the most credit; return it, or None without credit.

        With `ahead` the message may be claimed beyond a prefetch count, if no subscription has credit without that.
        """
        with self._lock:
            for beyond in (False, True) if ahead else (False,):
                best = self._subscriptions.next(queue, ahead=beyond)
                if best is not None and best.credit.room(ahead=beyond) > 0:
                    self.take_credit(best.credit)
                    self._subscriptions.count_message(best)
                    return best
            return None

    def unreserve(self, subscription: Subscription) -> None:
        """Undo `reserve`: no message was found for the subscription."""
        with self._lock:
            self.return_credit(subscription.credit)
            self._subscriptions.count_message(subscription, -1)

    def take_credit(self, credit: Credit) -> None:
        """Take one from a channel's credit, for a claim."""
        with self._lock:
            credit.waiting += 1
            credit.held += 1

    def return_credit(self, credit: Credit) -> None:
        """Return one to a channel's credit: the claim failed."""
        with self._lock:
            credit.waiting -= 1
            credit.held -= 1

    @property
    def shelved(self) -> set[str]:
        """The queues from which messages are claimed ahead."""
        with self._lock:
            return self._shelf.queues

    @property
    def overdue_at(self) -> float | None:
        """The monotonic time at which the first message claimed ahead has waited for too long, or None."""
        with self._lock:
            return self._shelf.overdue_at()
