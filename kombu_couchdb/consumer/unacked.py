"""Unacknowledged messages of a consuming connection, and the decisions about them, shared by two threads.

kombu's thread subscribes, takes deliveries and settles them (ack, release, bury); nothing here waits for the network.
The I/O thread adds what it claimed and takes away what it shall write. What is settled counts as free credit at once, so
that the next claim can ride in the same request as the ack.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from ..documents import dead_letter, workitem
from ..leases.lease import Lease
from ..log import get_logger
from .delivery import BROADCAST_TAG, Credit, Delivery, Subscription, broadcast
from .mailbox import Mailbox
from .pending_writes import PendingWrites
from .pull import Pull
from .subscriptions import Subscriptions

__all__ = ['Unacked']

logger = get_logger(__name__)

#: The most broadcasts kept for a queue without a consumer; then the oldest go.
_PARKED = 10_000


class Unacked(PendingWrites):
    """Subscriptions, the messages held for them, and the changes to be written. Every method may be called in any thread."""

    def __init__(
        self, lease: Lease, mailbox: Mailbox[Delivery | Exception], clock: ServerClock, unlimited: int
    ) -> None:
        super().__init__()
        self._lease, self._mailbox, self._clock = lease, mailbox, clock
        #: Whether more could be claimed if there were credit.
        self.hungry = True
        self._subscriptions = Subscriptions(unlimited)
        self._held: dict[str, Delivery] = {}
        self._parked: dict[str, deque[Document]] = {}  # broadcasts for queues that nobody consumes here just now
        #: How many messages of each queue that is subscribed to were acknowledged.
        self.done: Counter[str] = Counter()
        #: Those who wait for one message.
        self.pulls: list[Pull] = []
        #: Whether the I/O thread ends, since nothing was left to do: whoever has something needs another consumer.
        self.retired = False

    # -- kombu's verbs

    def subscribe(self, subscription: Subscription) -> bool:
        """Begin to claim messages for a subscription; False if this consumer has retired."""
        with self._lock:
            if self.retired:
                return False
            self._subscriptions.add(subscription)
            self._mailbox.put(
                [broadcast(message, subscription) for message in self._parked.pop(subscription.queue, ())]
            )
            self.wakeup.set()
            return True

    def pull(self, pull: Pull) -> bool:
        """Claim one message for who asks for it; False if this consumer has retired."""
        with self._lock:
            if not self.retired:
                self.pulls.append(pull)
                self.wakeup.set()
            return not self.retired

    def cancel(self, subscription: Subscription) -> None:
        """Claim nothing more for a subscription and give back what kombu has not seen."""
        with self._lock:
            self._subscriptions.remove(subscription)
            if subscription.queue not in self.queues:
                self.done.pop(subscription.queue, None)
            self._return_all(lambda delivery: delivery.subscription is subscription)
            self.wakeup.set()

    def set_credit(self, credit: Credit, limit: int) -> None:
        """Change how many messages a channel may hold."""
        with self._lock:
            credit.limit = limit
            self.wakeup.set()

    def hand_over(self, delivery: Delivery) -> bool:
        """Note that kombu takes a delivery from the mailbox; False if it must not, for it may be somebody else's now."""
        with self._lock:
            if not delivery.final and (delivery.tag not in self._held or not self._lease.valid):
                # This process was stopped, or cut off, for so long that the message may have been given to others.
                self._return_unseen(delivery)
                self.wakeup.set()
                return False
            delivery.credit.waiting -= 1
            delivery.expired = workitem.has_expired(delivery.doc, self._clock.now())
            if delivery.expired and not workitem.delivers_expired(delivery.doc):
                # It lay in the mailbox for too long: it is not delivered late, and is done with.
                if delivery.tag in self._held:
                    self._settle(delivery.tag, lambda doc: workitem.acked(doc, self._clock.now()))
                self.wakeup.set()
                return False
            self._subscriptions.took(delivery.credit)
            return True

    def ask(self) -> None:
        """Note that kombu's thread comes for more: for who has no prefetch limit more is claimed then."""
        with self._lock:
            if self._subscriptions.ask(found_nothing=not len(self._mailbox)):
                self.wakeup.set()

    def ack(self, tag: str) -> None:
        """The message is done: delete it, if it is still ours."""
        with self._lock:
            if tag in self._held and (queue := self._held[tag].doc['queue']) in self.queues:
                self.done[queue] += 1
            now = self._clock.now()
            self._decide(tag, lambda doc: workitem.acked(doc, now), patiently=True)

    def release(self, tag: str) -> None:
        """The message shall be delivered again: put it back to its old place."""
        self._decide(tag, workitem.release)

    def give_back(self, tag: str) -> None:
        """The consumer stops: put the message back to its old place. Only who was ended by it counts it as an attempt."""
        with self._lock:
            self._decide(tag, partial(workitem.release, counts=tag not in self._held or not self._held[tag].accepted))

    def bury(self, tag: str, reason: str) -> None:
        """The message is refused: keep it as a dead letter."""
        now = self._clock.now()
        self._decide(tag, lambda doc: dead_letter.made_of(doc, reason, now))

    def _decide(self, tag: str, change: Callable[[Document], Mapping[str, Any]], *, patiently: bool = False) -> None:
        with self._lock:
            if tag.startswith(BROADCAST_TAG):
                return  # nobody waits for that
            if tag not in self._held:
                logger.warning(
                    'message %s is not held any more: its lease was lost, so it may run once more elsewhere',
                    tag.rpartition(':')[0],
                )
                return
            delivery = self._held[tag]
            self._settle(tag, change)
            # What runs after a unique job waits for its ack.
            patiently = patiently and not workitem.is_unique(delivery.doc)
            self.wakeup.set(delivery.credit.patience(hungry=self.hungry) if patiently else 0.0)

    # -- for the I/O thread

    @property
    def busy(self) -> bool:
        """Whether anything is subscribed, asked for, held or to be written."""
        with self._lock:
            return bool(self._subscriptions or self.pulls or self._held or self.unwritten)

    def retire(self) -> bool:
        """Take in nothing from now on, unless there is something to do; tell whether that is so."""
        with self._lock:
            self.retired = not self.busy
            return self.retired

    @property
    def queues(self) -> set[str]:
        """The queues that are subscribed to."""
        with self._lock:
            return self._subscriptions.queues

    def ids(self) -> set[str]:
        """Return the ids of the items that the database may rightly show as claimed by this consumer."""
        with self._lock:
            return self._settling | {delivery.doc['_id'] for delivery in self._held.values()}

    def credit(self) -> dict[str, int]:
        """Return for each queue how many messages may be claimed for it now."""
        with self._lock:
            return self._subscriptions.credit()

    def reserve(self, queue: str) -> Subscription | None:
        """Return the subscription of a queue with the most credit left, one less now; None if there is none left."""
        with self._lock:
            best = self._subscriptions.next(queue)
            if best is None or best.credit.free <= 0:
                return None
            self.spend(best.credit)
            self._subscriptions.gave(best)
            return best

    def unreserve(self, subscription: Subscription) -> None:
        """Take back what `reserve` returned: there is no message for it."""
        with self._lock:
            self.spend(subscription.credit, -1)
            self._subscriptions.gave(subscription, -1)

    def spend(self, credit: Credit, amount: int = 1) -> None:
        """Take one from a channel's credit for a claim, or, with `amount` -1, give it back."""
        with self._lock:
            credit.waiting += amount
            credit.held += amount

    def arrive(self, delivery: Delivery) -> None:
        """Put what was claimed into the mailbox, or wait for its body; back to the queue if nobody is subscribed any more."""
        with self._lock:
            self.keep(delivery)
            if delivery.subscription is None or delivery.subscription in self._subscriptions:
                self._mailbox.put([] if delivery.unread else [delivery])
            else:
                self._return_unseen(delivery)
                self.wakeup.set()

    def unread(self) -> list[Delivery]:
        """Return the deliveries whose bodies are yet to be read, in the order of their claims."""
        with self._lock:
            return [delivery for delivery in self._held.values() if delivery.unread]

    def was_read(self, delivery: Delivery, body: bytes | None, reason: str = '') -> None:
        """Put what was claimed into the mailbox with its body, if it is still held; without one it is a dead letter."""
        with self._lock:
            if delivery.tag not in self._held or not delivery.unread:
                return
            delivery.body, delivery.unread = body, False
            if body is not None:
                self._mailbox.put([delivery])
            else:
                delivery.credit.waiting -= 1
                self.bury(delivery.tag, reason)

    def keep(self, delivery: Delivery) -> None:
        """Hold what was claimed until it is settled."""
        with self._lock:
            if not delivery.final:
                self._held[delivery.tag] = delivery

    def broadcast(self, queue: str, message: Document) -> None:
        """Put a broadcast for a queue into the mailbox, or keep it until somebody subscribes to the queue."""
        with self._lock:
            if subscription := self._subscriptions.next(queue):
                self._subscriptions.gave(subscription)
                self._mailbox.put([broadcast(message, subscription)])
            else:
                self._parked.setdefault(queue, deque(maxlen=_PARKED)).append(message)

    def drop_all(self) -> int:
        """Forget all that is held: the lease was lost. Return how many messages that were."""
        with self._lock:
            lost, self._held = list(self._held.values()), {}
            for item in self._mailbox.discard(lambda d: isinstance(d, Delivery) and not d.final):
                assert isinstance(item, Delivery)
                item.credit.waiting -= 1  # one that is just being handed over is counted there
            for delivery in lost:
                delivery.credit.held -= 1
                delivery.credit.waiting -= delivery.unread
            self.wakeup.set()
            return len(lost)

    def give_back_all(self) -> None:
        """Release all that is held."""
        with self._lock:
            self._return_all(lambda delivery: True)
            for tag in list(self._held):
                self.give_back(tag)

    def _return_all(self, which: Callable[[Delivery], bool]) -> None:
        """Give back those messages that kombu has not seen."""
        for item in [
            *self._mailbox.discard(lambda d: isinstance(d, Delivery) and which(d)),
            *filter(which, self.unread()),
        ]:
            assert isinstance(item, Delivery)
            self._return_unseen(item)

    def _return_unseen(self, delivery: Delivery) -> None:
        """Give back a message that kombu has not seen: it does not count as an attempt."""
        delivery.credit.waiting -= 1
        if delivery.tag in self._held:
            self._settle(delivery.tag, lambda doc: workitem.release(doc, delivered=False))

    def _settle(self, tag: str, change: Callable[[Document], Mapping[str, Any]]) -> None:
        delivery = self._held.pop(tag)
        delivery.credit.held -= 1
        self.decide(delivery.doc, change)
