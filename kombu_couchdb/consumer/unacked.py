"""The unacknowledged messages of a consuming connection, and the decisions about them. Two threads share them.

kombu's thread subscribes, receives deliveries and decides about them (ack, release, dead letter); it never waits for
the network here. The I/O thread adds the messages that it claimed, and takes the decisions to write them. A decision
frees credit at once, so that the next claim can share a request with the ack.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from ..documents import dead_letter, workitem
from ..documents.concurrency import limit_of
from ..leases.lease import Lease
from ..log import get_logger
from .delivery import BROADCAST_TAG, Credit, Delivery, Subscription, broadcast
from .held_messages import RELEASED_UNCOUNTED, HeldMessages
from .keeping import Keeping
from .mailbox import Mailbox
from .pull import Pull
from .running import may_run

__all__ = ['Unacked']

logger = get_logger(__name__)

#: The most broadcasts that are kept for a queue without a consumer; the oldest are dropped first.
_MAX_WAITING_BROADCASTS = 10_000

#: The log lines for a decision about a message, whether kombu makes it or this module does (an expired message, for
#: example). CouchDB stores the decision in the next cycle.
_ACKNOWLEDGED = 'acknowledged message %s of queue %s, attempt %s (not stored yet)'
_RELEASED = 'released message %s of queue %s, attempt %s (counted, not stored yet)'
_DEAD_LETTERED = 'dead-lettered message %s of queue %s, attempt %s (not stored yet)'
_EXPIRED = 'dropped expired message %s of queue %s, attempt %s (not stored yet)'


class Unacked(HeldMessages):
    """Subscriptions, the messages claimed for them, and the pending writes. Any thread may call any method."""

    def __init__(
        self,
        lease: Lease,
        mailbox: Mailbox[Delivery | Exception],
        clock: ServerClock,
        unlimited: int,
        keep_done: float = 0.0,
    ) -> None:
        super().__init__(mailbox, unlimited)
        self._lease, self._clock, self._keeping = lease, clock, Keeping(keep_done)
        #: Whether the queues may have more messages to claim, with credit or without.
        self.more_to_claim = True
        self._may_run: dict[str, float] = {}  # by message id, see `may_run`
        #: By queue: broadcasts that wait until this connection subscribes to the queue again.
        self._waiting_broadcasts: dict[str, deque[Document]] = {}
        #: By queue, for the queues of the subscriptions: how many messages were acknowledged.
        self.acked: Counter[str] = Counter()
        #: The `basic_get` calls that wait for one message each.
        self.pulls: list[Pull] = []
        #: Whether the I/O thread ends because it has no work. The next use needs another consumer.
        self.retired = False

    # -- for kombu's thread

    def subscribe(self, subscription: Subscription) -> bool:
        """Start to claim messages for a subscription; return False if this consumer has retired."""
        with self._lock:
            if self.retired:
                return False
            self._subscriptions.add(subscription)
            self._mailbox.put(
                [broadcast(message, subscription) for message in self._waiting_broadcasts.pop(subscription.queue, ())]
            )
            self.wakeup.set()
            return True

    def pull(self, pull: Pull) -> bool:
        """Claim one message for a `basic_get`; return False if this consumer has retired."""
        with self._lock:
            if not self.retired:
                self.pulls.append(pull)
                self.wakeup.set()
            return not self.retired

    def cancel(self, subscription: Subscription) -> None:
        """Claim no more messages for a subscription, and release those that kombu has not received."""
        with self._lock:
            self._subscriptions.remove(subscription)
            if subscription.queue not in self.queues:
                self.acked.pop(subscription.queue, None)
            self._release_undelivered(lambda delivery: delivery.subscription is subscription)
            self.wakeup.set()

    def set_credit(self, credit: Credit, limit: int) -> None:
        """Set the most messages that a channel may have unacknowledged; 0 is no limit."""
        with self._lock:
            if limit and limit < credit.limit:
                self._give_back(self._shelf.having(lambda delivery: delivery.credit is credit))
            credit.limit = limit
            self._shelf.refill(credit)
            self.wakeup.set()

    def deliver(self, delivery: Delivery) -> bool:
        """Note that kombu takes a delivery from the mailbox; return False if kombu must not process it."""
        with self._lock:
            if not delivery.final and (delivery.tag not in self._held or not self._lease.valid):
                # The process was stopped, or had no connection, for so long that another consumer may have the message.
                self._release_one_undelivered(delivery)
                self.wakeup.set()
                return False
            delivery.credit.waiting -= 1
            delivery.expired = workitem.has_expired(delivery.doc, self._clock.now())
            if delivery.expired and not workitem.delivers_expired(delivery.doc):
                # The message has expired in the mailbox: delete it instead of delivering it.
                if delivery.tag in self._held:
                    self._end(delivery.tag, lambda doc: workitem.dropped(doc, self._clock.now()), _EXPIRED)
                self.wakeup.set()
                return False
            self._subscriptions.count_delivery(delivery.credit)
            return True

    def request_more(self) -> None:
        """Note that kombu's thread asks for messages: more are claimed then for channels without a prefetch limit."""
        with self._lock:
            if self._subscriptions.request_more(found_nothing=not len(self._mailbox)):
                self.wakeup.set()

    def ack(self, tag: str) -> None:
        """Acknowledge a message: it is deleted, or kept as a DoneItem, if this consumer still holds it."""
        with self._lock:
            if tag in self._held and (queue := self._held[tag].doc['queue']) in self.queues:
                self.acked[queue] += 1
            now = self._clock.now()
            self._decide(tag, lambda doc: self._keeping.completed(doc, now), _ACKNOWLEDGED, may_wait=True)

    def release(self, tag: str) -> None:
        """Release a message to its old position in the queue; its delivery counts as an attempt."""
        self._decide(tag, workitem.release, _RELEASED)

    def release_at_close(self, tag: str, *, crashed: bool = False) -> None:
        """Release a message of a consumer that stops; `crashed` says that an error ends the program.

        The delivery counts as an attempt if it crashed, or if kombu's callback for the message has not returned.
        """
        with self._lock:
            if not crashed and tag in self._held and self._held[tag].received_by_kombu:
                doc = self._held[tag].doc
                if limit_of(doc) is not None and may_run(doc):
                    self._may_run[doc['_id']] = time.monotonic() + self._lease.timeout
                self._decide(tag, lambda doc: workitem.release(doc, counts=False), RELEASED_UNCOUNTED)
            else:
                self.release(tag)

    def dead_letter(self, tag: str, reason: str) -> None:
        """Make a message a dead letter, with this reason."""
        now = self._clock.now()
        self._decide(tag, lambda doc: dead_letter.made_of(doc, reason, now), _DEAD_LETTERED)

    def _decide(
        self, tag: str, change: Callable[[Document], Mapping[str, Any]], log_text: str, *, may_wait: bool = False
    ) -> None:
        with self._lock:
            if tag.startswith(BROADCAST_TAG):
                return  # a broadcast needs no ack
            if tag not in self._held:
                logger.warning(
                    'message %s is not held any more: its lease was lost, so it may run once more elsewhere',
                    tag.rpartition(':')[0],
                )
                return
            delivery = self._held[tag]
            delivery.credit.rate.note(time.monotonic())
            self._end(tag, change, log_text)
            # The messages in `next` of a unique job wait for its ack: write it at once.
            may_wait = may_wait and not workitem.is_unique(delivery.doc)
            delay = self.pace.ack_delay(delivery.credit, more_to_claim=self.more_to_claim)
            self.wakeup.set(delay if may_wait else 0.0)

    def wake_for_stored(self, urgent: bool) -> None:
        """Write decisions that waited for results: at once if `urgent`, else with the next claims of a flow."""
        self.wakeup.set(0.0 if urgent else self.pace.seconds_to_next)

    # -- for the I/O thread

    @property
    def busy(self) -> bool:
        """Whether there are subscriptions, waiting `basic_get` calls, unacknowledged messages or pending writes."""
        with self._lock:
            return bool(self._subscriptions or self.pulls or self._held or self.unwritten)

    def retire(self) -> bool:
        """Refuse subscriptions and pulls from now on, unless the consumer is busy; tell whether it has retired."""
        with self._lock:
            self.retired = not self.busy
            return self.retired

    def may_run(self) -> dict[str, float]:
        """Return the released messages with a concurrency key whose tasks may still run, and until when they count.

        Their channel was closed meanwhile. The monotonic times are a lease away: so long a killed worker counts, too.
        """
        with self._lock:
            now = time.monotonic()
            self._may_run = {doc_id: until for doc_id, until in self._may_run.items() if until > now}
            return self._may_run.copy()

    def add_claimed(self, delivery: Delivery) -> None:
        """Hold a claimed message, and put it into the mailbox unless it needs its body first.

        If its subscription was cancelled meanwhile, release it.
        """
        with self._lock:
            self.hold(delivery)
            if delivery.subscription is None or delivery.subscription in self._subscriptions:
                if not delivery.needs_body:
                    self._shelf.hand_over(delivery)
            else:
                self._release_one_undelivered(delivery)
                self.wakeup.set()

    def set_body(self, delivery: Delivery, body: bytes | None, reason: str = '') -> None:
        """Put a message with its body into the mailbox, if it is still held; without a body make it a dead letter."""
        with self._lock:
            if delivery.tag not in self._held or not delivery.needs_body:
                return
            delivery.body, delivery.needs_body = body, False
            if body is not None:
                self._shelf.hand_over(delivery)
            else:
                delivery.credit.waiting -= 1
                self.dead_letter(delivery.tag, reason)

    def give_back(self, queues: Collection[str]) -> None:
        """Give back the messages claimed ahead from these queues, and those of channels that have become slow."""
        with self._lock:
            self._give_back(self._shelf.overdue())
            self._give_back(self._shelf.having(lambda delivery: delivery.doc['queue'] in queues))

    def pause(self, queues: frozenset[str]) -> None:
        """Claim nothing from these queues, the paused ones, and release their messages that kombu has not received.

        Messages are claimed again from queues that were paused before.
        """
        with self._lock:
            if queues != self._subscriptions.paused:
                self._subscriptions.paused = queues
                self._release_undelivered(lambda delivery: not delivery.final and delivery.doc['queue'] in queues)
                self.wakeup.set()

    def broadcast(self, queue: str, message: Document) -> None:
        """Put a broadcast into the mailbox, or keep it until this connection subscribes to the queue."""
        with self._lock:
            if subscription := self._subscriptions.next(queue):
                self._subscriptions.count_message(subscription)
                self._mailbox.put([broadcast(message, subscription)])
            else:
                self._waiting_broadcasts.setdefault(queue, deque(maxlen=_MAX_WAITING_BROADCASTS)).append(message)

    def take_broadcast(self, pull: Pull) -> Delivery | None:
        """Return the next broadcast that waits in the queue of a `basic_get`, or None."""
        with self._lock:
            waiting = self._waiting_broadcasts.get(pull.queue)
            return broadcast(waiting.popleft(), Subscription(pull.queue, pull.credit)) if waiting else None

    def release_all(self) -> None:
        """Release all claimed messages: the consumer stops."""
        with self._lock:
            self._release_undelivered(lambda delivery: True)
            for tag in list(self._held):
                self.release_at_close(tag)
