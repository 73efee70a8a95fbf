"""The unacknowledged messages of a consuming connection, its subscriptions and their credit. Two threads share them.

kombu's thread subscribes, receives deliveries and decides about them (ack, release, dead letter); it never waits for
the network here. The I/O thread claims messages and adds them. A claim takes credit before it is written, and returns
it if it fails. A decision frees credit at once, so that the next claim can share a request with the ack.

kombu never has more messages of a channel to decide about than its prefetch count: those claimed ahead (see `flow`)
wait on the shelf. A message moves from there into the mailbox when kombu decides about another one, in kombu's thread:
it does not wait for the I/O thread. If it waits for too long, it is given back, and other consumers can claim it. The
mailbox may contain deliveries that are not held any more: `deliver` refuses them.

A program may say that it acknowledges a message when its task *begins*: see `begin`. Until such an ack is stored, the
task would run again if the process were killed. So the ack is written at once. Until it is stored, such messages do not
count for the prefetch count, if they are not more than that: see `Credit.is_full`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import inf

from ..couchdb.client import Document
from ..couchdb.clock import ServerClock
from ..documents import dead_letter, workitem
from ..documents.concurrency import limit_of
from ..documents.types import TaskError
from ..flow import STALL_SECONDS, Flow
from ..leases.lease import Lease
from ..log import get_logger
from .delivery import BROADCAST_TAG, Credit, Delivery, Mailbox, Pull, Snapshot, Subscription, broadcast
from .early_acks import Decide, EarlyAcks
from .pending_writes import Change, PendingWrites
from .wakeup import Wakeup
from .worker_hooks import KeepDone, may_run

logger = get_logger(__name__)

#: The most broadcasts that are kept for a queue without a consumer; the oldest are dropped first.
_MAX_WAITING_BROADCASTS = 10_000


class Unacked:
    """Subscriptions and the messages claimed for them. Any thread may call any method."""

    def __init__(
        self,
        lease: Lease,
        mailbox: Mailbox,
        clock: ServerClock,
        unlimited: int,
        keep_done: float = 0.0,
        keep_failed: float = 0.0,
        *,
        confirm_acks: bool = False,
    ) -> None:
        """Deliveries are put into `mailbox`; `unlimited` is the most messages claimed ahead without a prefetch limit.

        `keep_done`, `keep_failed` and `confirm_acks` are the transport options.
        """
        self._lease, self._mailbox, self._clock, self._unlimited = lease, mailbox, clock, unlimited
        self._keep_done, self._failed = KeepDone(keep_done), partial(dead_letter.failed, seconds=keep_failed)
        self._lock = threading.RLock()
        #: Wakes the I/O thread: it has work. And how fast messages are worked off: when its next cycle should begin.
        self.wakeup, self.flow = Wakeup(), Flow()
        #: The decisions that are not stored yet.
        self.writes = PendingWrites(self.wakeup, self.flow)
        self._set_subscriptions([])
        #: By delivery tag: the messages that are held, and those of them whose bodies have not been read yet.
        self._held: dict[str, Delivery] = {}
        self._unread: dict[str, Delivery] = {}
        self._confirm_acks, self._early_acks = confirm_acks, EarlyAcks()
        #: Those of its queues that are paused: there is no credit for them.
        self._paused: frozenset[str] = frozenset()
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

    def _set_subscriptions(self, subscriptions: list[Subscription]) -> None:
        #: The subscriptions, their queues, and the credits of their channels: replaced together, and never changed.
        self._subscriptions = subscriptions
        self.queues = {subscription.queue for subscription in subscriptions}
        self._credits = {subscription.credit for subscription in subscriptions}

    # -- for kombu's thread: subscriptions

    def subscribe(self, subscription: Subscription) -> bool:
        """Start to claim messages for a subscription; return False if this consumer has retired."""
        with self._lock:
            if self.retired:
                return False
            # The older subscriptions of the queue are served before it.
            same = [other.claimed for other in self._subscriptions if other.queue == subscription.queue]
            subscription.claimed = max(same, default=0)
            self._set_subscriptions([*self._subscriptions, subscription])
            for message in self._waiting_broadcasts.pop(subscription.queue, ()):
                self._mailbox.put(broadcast(message, subscription))
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
            self._set_subscriptions([other for other in self._subscriptions if other is not subscription])
            if subscription.queue not in self.queues:
                self.acked.pop(subscription.queue, None)
            if subscription.credit not in self._credits:
                subscription.credit.reset_ahead()
            self._release_undelivered(lambda delivery: delivery.subscription is subscription)
            self.wakeup.set()

    def set_credit(self, credit: Credit, limit: int) -> None:
        """Set the most messages that a channel may have unacknowledged; 0 is no limit."""
        with self._lock:
            if limit and limit < credit.limit:
                self._release(credit.shelf)
            credit.limit = limit
            self._refill(credit)
            self.wakeup.set()

    def request_more(self) -> None:
        """Note that kombu's thread asks for messages: more are claimed then for channels without a prefetch limit."""
        with self._lock:
            found_nothing = not len(self._mailbox)
            for credit in self._credits:
                if credit.request_more(self._unlimited, found_nothing=found_nothing):
                    self.wakeup.set(0.0 if self.more_to_claim else self.flow.gathering)

    # -- for kombu's thread: deliveries and decisions

    def deliver(self, delivery: Delivery) -> bool:
        """Note that kombu takes a delivery from the mailbox; return False if kombu must not process it."""
        with self._lock:
            is_held = delivery.tag in self._held
            if not (is_held or delivery.final):
                return False  # it was released meanwhile, or the lease was lost
            if is_held and not self._lease.valid:
                # The process was stopped, or had no connection, for so long that another consumer may have the message.
                self._release([delivery])
                self.wakeup.set()
                return False
            now = self._clock.now()
            delivery.expired = workitem.has_expired(delivery.doc, now)
            if delivery.expired and not workitem.delivers_expired(delivery.doc):
                # The message has expired in the mailbox: delete it instead of delivering it.
                if is_held:
                    self._end([delivery], lambda doc: workitem.dropped(doc, now), 'dropped as expired')
                self.wakeup.set()
                return False
            delivery.ready_since = workitem.ready_since(delivery.doc) + time.time() - now
            if is_held:
                delivery.delivered = True
                delivery.credit.count_delivery()
            return True

    def still_holds(self, tag: str) -> bool:
        """Tell whether this consumer holds a message, and its lease cannot have ended: its work may begin."""
        with self._lock:
            if tag in self._held and not self._lease.valid:  # as in `deliver`
                self._release_uncounted(tag)
            return tag in self._held

    def set_waiting(self, tag: str, waiting: bool) -> bool:
        """Note whether a worker has yet to begin to work on a message; return False if the message is not held."""
        with self._lock:
            if tag in self._held:
                self._held[tag].waiting = waiting
            return tag in self._held

    def release_waiting(self, tags: Collection[str]) -> list[str]:
        """Release those of these messages on which the work has yet to begin, and return their tags."""
        with self._lock:
            released = [tag for tag in tags if tag in self._held and self._held[tag].waiting]
            for tag in released:
                self._release_uncounted(tag)
            return released

    def begin(self, tag: str, decide: Decide) -> bool | None:
        """Tell whether a task may begin whose message is acknowledged when it begins. None: that is decided later.

        Then `decide(may_begin)` is called once, in the I/O thread, unless the connection is closed before. A task must
        not begin if this consumer does not hold the message any more: it runs elsewhere. While CouchDB does not store
        the acks of the tasks before, it waits. With `confirm_acks` it waits until its own ack is stored.
        """
        if tag.startswith(BROADCAST_TAG):
            return True
        with self._lock:
            if self._early_acks.is_stalled:
                self._early_acks.wait(tag, decide)
                return None
            return self._start(tag, decide)

    def withdraw(self, tag: str) -> bool:
        """Let a task that waits not begin; return False if its ack may be stored: then `decide` is still called."""
        with self._lock:
            return self._early_acks.withdraw(tag)

    def begin_waiting(self, *, in_outage: bool) -> None:
        """Note whether CouchDB responds; if it does, let the tasks begin that waited for that."""
        with self._lock:
            self._early_acks.in_outage = in_outage
            self._decide_waiting()

    def end_waiting(self) -> None:
        """Tell the tasks that still wait that they must not begin: the I/O thread has ended."""
        with self._lock:
            for decide in self._early_acks.end():
                decide(False)

    def _decide_waiting(self) -> None:
        while (found := self._early_acks.pop()) is not None:
            tag, decide = found
            if (may_begin := self._start(tag, decide)) is not None:
                decide(may_begin)

    def _start(self, tag: str, decide: Decide) -> bool | None:
        """Note that a task begins, unless its message is not held any more; return what `begin` returns."""
        if (delivery := self._held.get(tag)) is None:
            return False
        if not self._lease.valid:
            # As in `deliver`: another consumer may have the message.
            self._release([delivery])
            self.wakeup.set()
            return False
        delivery.begun = True
        if not self._confirm_acks:
            return True
        delivery.confirmed = decide
        self.ack(tag)
        return None

    @property
    def begun_pause(self) -> float:
        """How many seconds the ack of a task that has begun waits for others; 0.0 without a flow.

        Half as long as a request takes, or until half a prefetch count has begun: the pool must not wait for the acks.
        """
        with self._lock:
            if not (self.writes.has_begun and self.flow.interval):
                return 0.0
            limit = min((credit.limit for credit in self._credits if credit.limit), default=inf)
            return min(self.flow.cost / 2, self.flow.seconds_for(limit / 2))

    def ack(self, tag: str) -> None:
        """Acknowledge a message: it is deleted, or kept as a DoneItem, if this consumer still holds it."""
        self._decide(tag, partial(self._keep_done.completed, now=self._clock.now()), 'acknowledged', may_wait=True)

    def fail(self, tag: str, error: TaskError) -> None:
        """Acknowledge a message whose task has failed: it becomes a dead letter."""
        self._decide(tag, partial(self._failed, error=error, now=self._clock.now()), 'kept as failed', may_wait=True)

    def keep_failure(self, delivery: Delivery, error: TaskError) -> bool:
        """Keep a message whose task failed after its ack, see `Delivery.kept`; False if this consumer has retired."""
        kept = delivery.kept(self._failed(delivery.doc, error=error, now=self._clock.now()))
        with self._lock:
            if delivery.tag in self._early_acks:
                delivery.on_stored = partial(self.writes.keep, kept)
            elif not (self.retired or delivery.is_refused):
                self.writes.keep(kept)
            return not self.retired

    def release(self, tag: str) -> None:
        """Release a message to its old position in the queue; its delivery counts as an attempt."""
        self._decide(tag, workitem.release, 'released and counted')

    def release_at_close(self, tag: str, *, crashed: bool = False) -> None:
        """Release a message of a consumer that stops; `crashed` says that an error ends the program.

        The delivery counts as an attempt if it crashed, or if kombu's callback for the message has not returned.
        """
        with self._lock:
            if crashed or tag not in self._held or not self._held[tag].received_by_kombu:
                self.release(tag)
                return
            if limit_of(doc := self._held[tag].doc) is not None and may_run(doc):
                self._may_run[doc['_id']] = time.monotonic() + self._lease.timeout
            self._release_uncounted(tag)

    def _release_uncounted(self, tag: str) -> None:
        self._decide(tag, lambda doc: workitem.release(doc, counts=False), 'released')

    def dead_letter(self, tag: str, reason: str) -> None:
        """Make a message a dead letter, with this reason."""
        self._decide(tag, partial(dead_letter.made_of, reason=reason, now=self._clock.now()), 'dead-lettered')

    def _decide(self, tag: str, change: Change, outcome: str, *, may_wait: bool = False) -> None:
        with self._lock:
            if tag.startswith(BROADCAST_TAG):
                return  # a broadcast needs no ack
            if self._early_acks.pop_confirmed(tag):
                return
            if tag not in self._held:
                text = 'message %s is not held any more: its lease was lost, so it may run once more elsewhere'
                logger.warning(text, tag.rpartition(':')[0])
                return
            delivery = self._held[tag]
            if may_wait and (queue := delivery.doc['queue']) in self.queues:
                self.acked[queue] += 1
            delivery.credit.rate.count(time.monotonic())
            self.flow.count()
            if delivery.begun and may_wait:
                self._store_ack(delivery, change, outcome)
                return
            self._end([delivery], change, outcome)
            # The messages in `next` of a unique job wait for its ack: write it at once.
            may_wait = may_wait and not workitem.is_unique(delivery.doc)
            must_claim = self.more_to_claim and delivery.credit.is_low(self.flow.stock)
            self.wakeup.set(0.0 if must_claim or not may_wait else self.flow.gathering)

    # -- for the I/O thread: credit

    def credit(self, *, ahead: bool = False) -> dict[str, int]:
        """Return for each queue how many messages may be claimed for it now.

        With `ahead`, those count that may be claimed beyond the prefetch count.
        """
        with self._lock:
            return self._credit(self.flow.stock if ahead else None)

    def _credit(self, stock: float | None) -> dict[str, int]:
        credit = dict.fromkeys(self.queues, 0)
        for subscription in self._subscriptions:
            if subscription.queue not in self._paused:
                credit[subscription.queue] += max(0, subscription.credit.room(stock))
        return credit

    def snapshot(self) -> Snapshot:
        """Return what the time of the next cycle follows from."""
        with self._lock:
            shelved, overdue_at = set[str](), inf
            for shelf in (credit.shelf for credit in self._credits if credit.shelf.queues):
                shelved |= shelf.queues.keys()
                overdue_at = min(overdue_at, shelf.overdue_at)
            return Snapshot(self._credit(None), shelved, overdue_at, bool(self._unread))

    def is_low(self, queue: str) -> bool:
        """Tell whether the messages of a subscription to a queue will soon be worked off."""
        with self._lock:
            return any(each.credit.is_low(self.flow.stock) for each in self._subscriptions if each.queue == queue)

    def reserve(self, queue: str, count: int, *, ahead: bool = False) -> list[Subscription]:
        """Take credit for up to `count` messages, each from the subscription with the most; return these subscriptions.

        With `ahead` the messages may be claimed beyond a prefetch count.
        """
        with self._lock:
            stock, found = self.flow.stock if ahead else None, list[Subscription]()
            room = {each: each.credit.room(stock) for each in self._subscriptions if each.queue == queue}
            while room and len(found) < count:
                best = max(room, key=lambda each: (room[each], -each.claimed))
                if room[best] <= 0:
                    break
                best.claimed += 1
                best.credit.count(1)
                room.update({each: free - 1 for each, free in room.items() if each.credit is best.credit})
                found.append(best)
            return found

    def unreserve(self, subscription: Subscription) -> None:
        """Undo `reserve`: no message was found for the subscription, or its claim failed."""
        with self._lock:
            subscription.claimed -= 1
            subscription.credit.count(-1)

    def pause(self, paused: frozenset[str]) -> None:
        """Claim nothing from the paused queues, and release their messages that kombu has not received."""
        with self._lock:
            queues, before = self.queues, self._paused
            self._paused = paused & queues
            for queue in sorted(self._paused - before):
                logger.info('queue %r is paused: its messages wait until it is resumed', queue)
            for queue in sorted((before - paused) & queues):
                logger.info('queue %r is resumed', queue)
            if self._paused != before:
                self._release_undelivered(lambda delivery: delivery.doc['queue'] in paused)
                self.wakeup.set()

    # -- for the I/O thread: messages

    @property
    def busy(self) -> bool:
        """Whether there are subscriptions, waiting `basic_get` calls, unacknowledged messages or pending writes."""
        with self._lock:
            return bool(self._subscriptions or self.pulls or self._held or self.writes.unstored)

    def retire(self) -> bool:
        """Refuse subscriptions and pulls from now on, unless the consumer is busy; tell whether it has retired."""
        with self._lock:
            self.retired = not self.busy
            return self.retired

    def ids(self) -> set[str]:
        """Return the ids of the messages that the database may show as claimed by this consumer."""
        with self._lock:
            return self.writes.unstored | self.held_ids()

    def docs(self) -> list[Document]:
        """Return the messages that this consumer holds."""
        with self._lock:
            return [delivery.doc for delivery in self._held.values()]

    def held_ids(self) -> set[str]:
        """Return the ids of the messages that are held."""
        return {doc['_id'] for doc in self.docs()}

    def may_run(self) -> dict[str, float]:
        """Return the released messages with a concurrency key whose tasks may still run, and until when they count.

        Their channel was closed meanwhile. The monotonic times are a lease away: so long a killed worker counts, too.
        """
        with self._lock:
            now = time.monotonic()
            self._may_run = {doc_id: until for doc_id, until in self._may_run.items() if until > now}
            return self._may_run.copy()

    def hold(self, delivery: Delivery) -> None:
        """Hold a claimed message until kombu decides about it."""
        with self._lock:
            if not delivery.final:
                self._held[delivery.tag] = delivery

    def add_claimed(self, delivery: Delivery) -> None:
        """Hold a claimed message, and put it into the mailbox unless it needs its body first.

        If its subscription was cancelled meanwhile, release it.
        """
        with self._lock:
            self.hold(delivery)
            if delivery.subscription not in self._subscriptions:
                self._release([delivery])
                self.wakeup.set()
            elif delivery.needs_body:
                self._unread[delivery.tag] = delivery
            else:
                self._hand_over(delivery)

    def awaiting_bodies(self) -> list[Delivery]:
        """Return the deliveries whose bodies have not been read yet, in the order of their claims."""
        with self._lock:
            return list(self._unread.values())

    def set_body(self, delivery: Delivery, body: bytes | None, reason: str = '') -> None:
        """Put a message with its body into the mailbox, if it is still held; without a body make it a dead letter."""
        with self._lock:
            if self._unread.pop(delivery.tag, None) is None:
                return
            if body is None:
                self.dead_letter(delivery.tag, reason)
            else:
                delivery.body = body
                self._hand_over(delivery)

    def fail_pulls(self, exc: Exception) -> None:
        """Raise an error in the threads that wait for one message."""
        for pull in list(self.pulls):
            self.answer(pull, exc)

    def answer(self, pull: Pull, answer: Delivery | Exception | None) -> None:
        """End the wait of a `basic_get`, see `Pull`."""
        self.pulls.remove(pull)
        pull.set_result(answer)

    def drop_all(self) -> list[Document]:
        """Forget all claimed messages, without writing anything, and return them: the lease was lost."""
        with self._lock:
            lost = list(self._held.values())
            for delivery in lost:
                self._forget(delivery)
            self.wakeup.set()
            return [delivery.doc for delivery in lost]

    def release_all(self) -> None:
        """Release all claimed messages: the consumer stops."""
        with self._lock:
            self._release_undelivered(lambda delivery: True)
            for tag in list(self._held):
                self.release_at_close(tag)

    # -- for the I/O thread: broadcasts

    def broadcast(self, queue: str, message: Document) -> None:
        """Put a broadcast into the mailbox, or keep it until this connection subscribes to the queue."""
        with self._lock:
            same = [each for each in self._subscriptions if each.queue == queue]
            if subscription := max(same, key=lambda each: (each.credit.free, -each.claimed), default=None):
                subscription.claimed += 1
                self._mailbox.put(broadcast(message, subscription))
            else:
                self._waiting_broadcasts.setdefault(queue, deque(maxlen=_MAX_WAITING_BROADCASTS)).append(message)

    def take_broadcast(self, pull: Pull) -> Delivery | None:
        """Return the next broadcast that waits in the queue of a `basic_get`, or None."""
        with self._lock:
            waiting = self._waiting_broadcasts.get(pull.queue)
            return broadcast(waiting.popleft(), pull.subscription) if waiting else None

    # -- the shelf

    def give_back(self, queues: Collection[str]) -> None:
        """Give back the messages claimed ahead from these queues, and those of channels that have become slow."""
        with self._lock:
            now = time.monotonic()
            for credit in self._credits:
                is_slow = credit.shelf.overdue_at <= now
                if is_slow:
                    credit.rate.stalled()
                self._release([each for each in credit.shelf if is_slow or each.doc['queue'] in queues])

    def _hand_over(self, delivery: Delivery) -> None:
        """Put a claimed message into the mailbox, or on the shelf if kombu has as many as the prefetch count."""
        delivery.credit.shelf.put(delivery, time.monotonic() + STALL_SECONDS)
        self._refill(delivery.credit)

    def _refill(self, credit: Credit) -> None:
        """Move messages into the mailbox, in the order of the shelf, as far as the prefetch count allows."""
        while not credit.is_full and (delivery := credit.shelf.pop()):
            delivery.handed = True
            credit.handed += 1
            self._mailbox.put(delivery)

    # -- the end of a message

    def _release_undelivered(self, which: Callable[[Delivery], bool]) -> None:
        """Release the messages that kombu has not received and for which `which(delivery)` is true."""
        self._release(delivery for delivery in self._held.values() if not delivery.delivered and which(delivery))

    def _release(self, deliveries: Iterable[Delivery]) -> None:
        """Release messages that kombu has not received; their deliveries do not count as attempts."""
        self._end(list(deliveries), lambda doc: workitem.release(doc, delivered=False), 'released')

    def _store_ack(self, delivery: Delivery, change: Change, outcome: str) -> None:
        """Stop holding a message whose task begins, and add the write of its ack. Its place is free after that."""

        def confirm(stored: bool) -> None:
            with self._lock:
                self._early_acks.settle(delivery, stored)
                self._return_credit(delivery)
                self._refill(delivery.credit)
                delivery.settle(stored)
                if delivery.confirmed is not None:
                    delivery.confirmed(stored)
                self._decide_waiting()

        del self._held[delivery.tag]
        self._early_acks.store(delivery)
        self._refill(delivery.credit)
        self._log(delivery, outcome)
        self.writes.add(delivery.doc, change, confirm)
        if workitem.is_unique(delivery.doc):
            self.wakeup.set()

    def _end(self, deliveries: list[Delivery], change: Change, outcome: str) -> None:
        """Stop holding messages and add the writes of `change(document)`. Then their places are free for others."""
        for delivery in deliveries:
            self._forget(delivery)
            self.writes.add(delivery.doc, change)
            self._log(delivery, outcome)
        for credit in {delivery.credit for delivery in deliveries}:
            self._refill(credit)

    def _forget(self, delivery: Delivery) -> None:
        """Stop holding a message, and return its credit."""
        del self._held[delivery.tag]
        self._unread.pop(delivery.tag, None)
        self._return_credit(delivery)

    def _log(self, delivery: Delivery, outcome: str) -> None:
        text, doc = 'message %s of queue %s, attempt %s: %s (not stored yet)', delivery.doc
        logger.debug(text, doc['_id'], doc['queue'], doc['attempts'], outcome)

    def _return_credit(self, delivery: Delivery) -> None:
        credit = delivery.credit
        credit.shelf.remove(delivery)
        credit.held -= 1
        credit.waiting -= not delivery.delivered
        credit.handed -= delivery.handed
