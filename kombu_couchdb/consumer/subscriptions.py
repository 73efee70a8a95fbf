"""The subscriptions of a connection, and how many more messages may be claimed for each."""

from __future__ import annotations

from .delivery import Credit, Subscription

__all__ = ['Subscriptions']


class Subscriptions:
    """Subscriptions and their credit. Not thread-safe: the lock of `Unacked` guards it.

    A channel without a prefetch limit starts with one message that is claimed ahead. The number doubles, up to
    `unlimited`, when kombu's thread asks for more messages and finds none. So a program that receives one message and
    stops holds no others.
    """

    def __init__(self, unlimited: int) -> None:
        self._unlimited = unlimited
        self._subscriptions: dict[Subscription, int] = {}  # how many messages were claimed for each
        #: The credits without a limit whose messages were delivered since kombu's thread last found no message.
        self._delivered: set[Credit] = set()
        #: The paused queues: there is no credit for them.
        self.paused: frozenset[str] = frozenset()

    def __contains__(self, subscription: Subscription) -> bool:
        return subscription in self._subscriptions

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    @property
    def queues(self) -> set[str]:
        """The queues of the subscriptions."""
        return {subscription.queue for subscription in self._subscriptions}

    def add(self, subscription: Subscription) -> None:
        """Add a subscription; the older subscriptions of its queue are served before it."""
        counts = [count for other, count in self._subscriptions.items() if other.queue == subscription.queue]
        self._subscriptions[subscription] = max(counts, default=0)

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription. With the last one of a channel, its number of messages claimed ahead is reset."""
        self._subscriptions.pop(subscription, None)
        credit = subscription.credit
        if not any(other.credit is credit for other in self._subscriptions):
            credit.delivered, credit.ahead = 0, 1
            self._delivered.discard(credit)

    def credit(self, *, ahead: bool = False) -> dict[str, int]:
        """Return for each queue how many messages may be claimed for it now; see `Credit.room`."""
        credit: dict[str, int] = {}
        for subscription in self._subscriptions:
            free = 0 if subscription.queue in self.paused else max(0, subscription.credit.room(ahead=ahead))
            credit[subscription.queue] = credit.get(subscription.queue, 0) + free
        return credit

    def low(self) -> set[str]:
        """Return the queues with a subscription whose messages are about to run out."""
        return {subscription.queue for subscription in self._subscriptions if subscription.credit.is_low}

    def next(self, queue: str, *, ahead: bool = False) -> Subscription | None:
        """Return the queue's subscription with the most credit; among equals, the one with the fewest messages.

        With `ahead`, what may be claimed beyond the prefetch count is credit, too.
        """
        free = {each: each.credit.room(ahead=ahead) for each in self._subscriptions if each.queue == queue}
        return max(free, key=lambda each: (free[each], -self._subscriptions[each]), default=None)

    def count_message(self, subscription: Subscription, amount: int = 1) -> None:
        """Count a message for a subscription, or with `amount` -1 undo that: no message was found."""
        if subscription in self._subscriptions:
            self._subscriptions[subscription] += amount

    def count_delivery(self, credit: Credit) -> None:
        """Count a message that kombu's thread received."""
        if not credit.limit:
            credit.delivered += 1
            self._delivered.add(credit)

    def request_more(self, *, found_nothing: bool) -> bool:
        """Note that kombu's thread asks for messages; tell whether more may be claimed for channels without a limit."""
        more = bool(self._delivered)
        for credit in self._delivered:
            credit.delivered = 0
            if found_nothing:
                credit.ahead = min(2 * credit.ahead, self._unlimited)
        if found_nothing:
            self._delivered.clear()
        return more
