"""What a consuming connection holds, and what it decided about it: the ledger between kombu's thread and the I/O thread.

kombu's thread subscribes, takes deliveries and settles them (ack, release, bury); nothing here waits for the network.
The I/O thread adds what it claimed and takes away what it shall write. What is settled counts as free credit at once, so
that the next claim can ride in the same request as the ack.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from kombu.log import get_logger

from . import workitem
from .bell import Bell
from .body import restored
from .client import Document
from .clock import ServerClock
from .delivery import BROADCAST_TAG, Credit, Delivery, Subscription, broadcast
from .lease import Lease
from .mailbox import Mailbox

__all__ = ['Change', 'Holdings']

logger = get_logger(__name__)

#: A document to be written, and what to do with CouchDB's answer.
Change = tuple[Document, Callable[[Document], None]]

#: An ack waits that long for others, or for a claim, to share their request, in seconds: while there is nothing to claim, and
#: while there is, unless half of the credit is free before.
_LINGER, _GATHER = 0.02, 0.005

#: The most broadcasts kept for a queue without a consumer; then the oldest go.
_PARKED = 10_000


class Holdings:
    """Subscriptions, the messages held for them, and the changes to be written. Every method may be called in any thread."""

    def __init__(self, lease: Lease, mailbox: Mailbox[Delivery | Exception], clock: ServerClock, unlimited: int) -> None:
        self._lease, self._mailbox, self._clock, self._unlimited = lease, mailbox, clock, unlimited
        self._lock = threading.RLock()
        #: Wakes the I/O thread: there is something to do.
        self.bell = Bell()
        #: Whether more could be claimed if there were credit.
        self.hungry = True
        self._subscriptions: dict[str, Subscription] = {}
        self._held: dict[str, Delivery] = {}
        self._outbox: list[Change] = []
        self._returned: list[Document] = []
        self._parked: dict[str, deque[Document]] = {}  # broadcasts for queues that nobody consumes here just now
        #: How many messages of each queue that is subscribed to were acknowledged.
        self.done: Counter[str] = Counter()
        #: Unique jobs that others have changed, with what was decided about them.
        self._contested: list[tuple[Document, Callable[[Document], Document]]] = []
        self._settling: set[str] = set()  # ids of items that are settled here, and not in the database for certain

    # -- kombu's verbs

    def subscribe(self, subscription: Subscription) -> None:
        """Begin to claim messages for a subscription."""
        with self._lock:
            self._subscriptions[subscription.tag] = subscription
            self._mailbox.put([broadcast(message, subscription) for message in self._parked.pop(subscription.queue, ())])
            self.bell.ring()

    def cancel(self, tag: str) -> None:
        """Claim nothing more for a subscription and give back what kombu has not seen."""
        with self._lock:
            subscription = self._subscriptions.pop(tag, None)
            if subscription is not None and subscription.queue not in self.queues:
                self.done.pop(subscription.queue, None)
            self._return_all(lambda delivery: delivery.subscription is subscription)
            self.bell.ring()

    def set_credit(self, credit: Credit, limit: int) -> None:
        """Change how many messages a channel may hold."""
        with self._lock:
            credit.limit = limit
            self.bell.ring()

    def hand_over(self, delivery: Delivery) -> bool:
        """Note that kombu takes a delivery from the mailbox; False if it must not, for it may be somebody else's now."""
        with self._lock:
            if not delivery.no_ack and (delivery.tag not in self._held or not self._lease.valid):
                # This process was stopped, or cut off, for so long that the message may have been given to others.
                self._return_unseen(delivery)
                self.bell.ring()
                return False
            delivery.credit.waiting -= 1
            if workitem.has_expired(delivery.doc, self._clock.now()):
                # It lay in the mailbox for too long: it is not delivered late, and is done with.
                if delivery.tag in self._held:
                    self._settle(delivery.tag, lambda doc: workitem.acked(doc, self._clock.now()))
                self.bell.ring()
                return False
            if delivery.no_ack or not delivery.credit.limit:
                self.bell.ring()
            return True

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
        self._decide(tag, lambda doc: workitem.bury(doc, reason, now))

    def _decide(self, tag: str, change: Callable[[Document], Document], *, patiently: bool = False) -> None:
        with self._lock:
            if tag.startswith(BROADCAST_TAG):
                return  # nobody waits for that
            if tag not in self._held:
                logger.warning('message %s is not held any more: its lease was lost, so it may run once more elsewhere',
                               tag.rpartition(':')[0])
                return
            delivery = self._held[tag]
            self._settle(tag, change)
            self.bell.ring(self._patience(delivery) if patiently else 0.0)

    def _patience(self, acked: Delivery) -> float:
        """Return how long an ack may wait for company, in seconds: a request for each would be twice the work."""
        if workitem.is_unique(acked.doc):
            return 0.0  # what runs after it waits for it
        if not self.hungry:
            return _LINGER
        credit = acked.credit
        return 0.0 if not credit.limit or 2 * credit.free(self._unlimited) >= credit.limit else _GATHER

    # -- for the I/O thread

    @property
    def queues(self) -> set[str]:
        """The queues that are subscribed to."""
        with self._lock:
            return {subscription.queue for subscription in self._subscriptions.values()}

    def ids(self) -> set[str]:
        """Return the ids of the items that the database may rightly show as claimed by this consumer."""
        with self._lock:
            return self._settling | {delivery.doc['_id'] for delivery in self._held.values()}

    def credit(self) -> dict[str, int]:
        """Return for each queue how many messages may be claimed for it now."""
        credit: dict[str, int] = {}
        with self._lock:
            for subscription in self._subscriptions.values():
                free = max(0, subscription.credit.free(self._unlimited))
                credit[subscription.queue] = credit.get(subscription.queue, 0) + free
        return credit

    def reserve(self, queue: str) -> Subscription | None:
        """Return the subscription of a queue with the most credit left, one less now; None if there is none left."""
        with self._lock:
            fit = [s for s in self._subscriptions.values() if s.queue == queue]
            best = max(fit, key=lambda s: s.credit.free(self._unlimited), default=None)
            if best is None or best.credit.free(self._unlimited) <= 0:
                return None
            self.spend(best.credit, best.no_ack)
            return best

    def spend(self, credit: Credit, no_ack: bool, amount: int = 1) -> None:
        """Take one from a channel's credit for a claim, or, with `amount` -1, give it back."""
        with self._lock:
            credit.waiting += amount
            credit.held += 0 if no_ack else amount

    def arrive(self, delivery: Delivery) -> None:
        """Put what was claimed into the mailbox, or wait for its body; back to the queue if nobody is subscribed any more."""
        with self._lock:
            self.keep(delivery)
            if delivery.subscription is None or delivery.subscription.tag in self._subscriptions:
                self._mailbox.put([] if delivery.unread else [delivery])
            else:
                self._return_unseen(delivery)
                self.bell.ring()

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
            if not delivery.no_ack:
                self._held[delivery.tag] = delivery

    def broadcast(self, queue: str, message: Document) -> None:
        """Put a broadcast for a queue into the mailbox, or keep it until somebody subscribes to the queue."""
        with self._lock:
            for subscription in self._subscriptions.values():
                if subscription.queue == queue:
                    self._mailbox.put([broadcast(message, subscription)])
                    return
            self._parked.setdefault(queue, deque(maxlen=_PARKED)).append(message)

    def take_outbox(self) -> list[Change]:
        """Return what is to be written; it is the caller's now."""
        with self._lock:
            outbox, self._outbox = self._outbox, []
            return outbox

    def return_outbox(self, outbox: list[Change]) -> None:
        """Take back what could not be written, or not for certain."""
        with self._lock:
            # What was stored already conflicts with itself when it is sent again: that is no news.
            # A unique job may also conflict since a publisher has changed it: it is read again.
            again: list[Change] = [(doc, react if workitem.is_unique(doc) else
                                    lambda answer, doc=doc: self._settling.discard(doc['_id']))  # type: ignore[misc]
                                   for doc, react in outbox]
            self._outbox = again + self._outbox

    def resettle(self, fetch: Callable[[list[str]], list[Document | None]]) -> None:
        """Decide again about unique jobs that publishers have changed while they were held, as they are now.

        `fetch(ids)` reads documents, in the I/O thread; *raises* what it raises, and can then be called again.
        """
        contested = list(self._contested)
        found = fetch([doc['_id'] for doc, _ in contested]) if contested else []
        with self._lock:
            del self._contested[:len(contested)]
            for (doc, change), now in zip(contested, found, strict=True):
                if now is not None and now.get('claimed') == doc['claimed']:
                    self._write(now, change)
                else:
                    self._settling.discard(doc['_id'])
                    if now is not None and workitem.task_id(now) == workitem.task_id(doc):  # else our own earlier try was stored
                        logger.warning('unique job %s had been taken from this consumer before it was done', doc['_id'])

    def take_returned(self) -> list[Document]:
        """Return the items that were given back to their queues since the last call, as they stand now."""
        returned, self._returned = self._returned, []
        return returned

    def drop_all(self) -> int:
        """Forget all that is held: the lease was lost. Return how many messages that were."""
        with self._lock:
            lost, self._held = list(self._held.values()), {}
            for item in self._mailbox.discard(lambda d: isinstance(d, Delivery) and not d.no_ack):
                assert isinstance(item, Delivery)
                item.credit.waiting -= 1  # one that is just being handed over is counted there
            for delivery in lost:
                delivery.credit.held -= 1
                delivery.credit.waiting -= delivery.unread
            self.bell.ring()
            return len(lost)

    def give_back_all(self) -> None:
        """Release all that is held."""
        with self._lock:
            self._return_all(lambda delivery: True)
            for tag in list(self._held):
                self.give_back(tag)

    def _return_all(self, which: Callable[[Delivery], bool]) -> None:
        """Give back those messages that kombu has not seen."""
        for item in [*self._mailbox.discard(lambda d: isinstance(d, Delivery) and which(d)), *filter(which, self.unread())]:
            assert isinstance(item, Delivery)
            self._return_unseen(item)

    def _return_unseen(self, delivery: Delivery) -> None:
        """Give back a message that kombu has not seen: it does not count as an attempt."""
        delivery.credit.waiting -= 1
        if delivery.tag in self._held:
            self._settle(delivery.tag, lambda doc: workitem.release(doc, delivered=False))
        elif delivery.no_ack and 'queue' in delivery.doc:
            # It was deleted when it was claimed: store it again, at its old place.
            anew = delivery.doc if delivery.body is None else restored(delivery.doc, delivery.body)
            self._outbox.append(({name: value for name, value in anew.items() if name != '_rev'}, lambda answer: None))

    def _settle(self, tag: str, change: Callable[[Document], Document]) -> None:
        delivery = self._held.pop(tag)
        delivery.credit.held -= 1
        self._settling.add(delivery.doc['_id'])
        self._write(delivery.doc, change)

    def _write(self, held: Document, change: Callable[[Document], Document]) -> None:
        doc = change(held)
        self._outbox.append((doc, lambda answer: self._settled(held, change, doc, answer)))

    def _settled(self, held: Document, change: Callable[[Document], Document], doc: Document, answer: Document) -> None:
        if answer.get('error') == 'conflict' and 'key' in held:
            self._contested.append((held, change))
            self.bell.ring()
            return
        self._settling.discard(doc['_id'])
        if answer.get('error') == 'conflict':
            logger.warning('message %s had been taken from this consumer before it was done with it (%s)',
                           doc['_id'], answer.get('reason') or answer['error'])
        elif answer.get('error'):
            logger.error('what became of message %s cannot be stored: %s', doc['_id'], answer.get('reason') or answer['error'])
        elif workitem.is_waiting(doc):
            self._returned.append({**doc, '_rev': answer['rev']})
