"""The subscriptions of a connection, and how many more messages may be claimed for each."""

from __future__ import annotations

from .delivery import Credit, Subscription

__all__ = ['Subscriptions']


class Subscriptions:
    """Subscriptions and their credit. Not thread-safe: the lock of `Holdings` guards it.

    A channel without a prefetch limit begins with one message ahead. The number doubles, up to `unlimited`, when kombu's thread
    asks for more and finds nothing: who takes one message and no more has no others claimed.
    """

    def __init__(self, unlimited: int) -> None:
        self._unlimited = unlimited
        self._subscriptions: dict[Subscription, int] = {}  # how many messages each was given
        self._taken: set[Credit] = set()  # of these, messages were handed over since kombu's thread last found nothing

    def __contains__(self, subscription: Subscription) -> bool:
        return subscription in self._subscriptions

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    @property
    def queues(self) -> set[str]:
        """The queues that are subscribed to."""
        return {subscription.queue for subscription in self._subscriptions}

    def add(self, subscription: Subscription) -> None:
        """Take in a subscription; of those that share its queue it is the last to be served."""
        given = [count for other, count in self._subscriptions.items() if other.queue == subscription.queue]
        self._subscriptions[subscription] = max(given, default=0)

    def remove(self, subscription: Subscription) -> None:
        """Forget a subscription; when a channel has none left, its demand is forgotten, too."""
        self._subscriptions.pop(subscription, None)
        credit = subscription.credit
        if not any(other.credit is credit for other in self._subscriptions):
            credit.taken, credit.ahead = 0, 1
            self._taken.discard(credit)

    def credit(self) -> dict[str, int]:
        """Return for each queue how many messages may be claimed for it now."""
        credit: dict[str, int] = {}
        for subscription in self._subscriptions:
            credit[subscription.queue] = credit.get(subscription.queue, 0) + max(0, subscription.credit.free)
        return credit

    def next(self, queue: str) -> Subscription | None:
        """Return the subscription of a queue with the most credit; of several with as much, the one that was given the least."""
        fit = [subscription for subscription in self._subscriptions if subscription.queue == queue]
        return max(
            fit, key=lambda subscription: (subscription.credit.free, -self._subscriptions[subscription]), default=None
        )

    def gave(self, subscription: Subscription, amount: int = 1) -> None:
        """Note that a subscription is given a message, or, with `amount` -1, that there was none for it."""
        if subscription in self._subscriptions:
            self._subscriptions[subscription] += amount

    def took(self, credit: Credit) -> None:
        """Note that kombu's thread was handed a message."""
        if not credit.limit:
            credit.taken += 1
            self._taken.add(credit)

    def ask(self, *, found_nothing: bool) -> bool:
        """Note that kombu's thread asks for more, and whether it finds nothing; tell whether more may be claimed for that."""
        more = bool(self._taken)
        for credit in self._taken:
            credit.taken = 0
            if found_nothing:
                credit.ahead = min(2 * credit.ahead, self._unlimited)
        if found_nothing:
            self._taken.clear()
        return more
