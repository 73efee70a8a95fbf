"""The I/O thread of a consuming connection: it alone claims, acknowledges, beats and sweeps.

One *turn* reads what can be claimed and writes, in one `_bulk_docs`, new claims, acknowledgements, releases, dead letters
and the heartbeat. A turn is caused by an ack, by credit, by the feed, by a due date or by the next heartbeat; between
turns the thread sleeps. kombu's thread only fills the outbox and empties the mailbox.

If the server is away the thread tries again, and says so once; kombu is not told, since the leases and what is to be
acknowledged outlive the connection. Only what a person must mend (rights, options) is handed to kombu as an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kombu.log import get_logger

from . import workitem
from .client import Client, Document
from .delivery import Credit, Delivery, Subscription
from .errors import AccessDenied, ConfigurationError, CouchDBError, NotCouchDB
from .lease import Lease, Sweeper
from .mailbox import Mailbox
from .news import News
from .options import Options
from .store import Store
from .topology import Topology
from .window import Window

__all__ = ['Consumer']

logger = get_logger(__name__)

#: A change to one document, and what to do with CouchDB's answer.
_Change = tuple[Document, Callable[[Document], None]]

#: Waits between tries while the server is away, in seconds.
_FIRST_RETRY, _LAST_RETRY = 0.1, 2.0


class Consumer:
    """Claims messages for the subscriptions of one connection and takes care of them until they are acknowledged."""

    def __init__(self, client: Client, options: Options, mailbox: Mailbox[Delivery | Exception], news: News,
                 topology: Topology, name: str) -> None:
        self._client, self._options, self._mailbox, self._topology = client, options, mailbox, topology
        self._store = Store(client)
        self._lease = Lease(options.visibility_timeout)
        self._sweeper = Sweeper(self._store, topology, options.visibility_timeout)
        self._news = news
        self._wake = threading.Condition()
        self._subscriptions: dict[str, Subscription] = {}
        self._held: dict[str, Delivery] = {}
        self._outbox: list[_Change] = []
        self._pulls: list[_Pull] = []
        self._windows: dict[str, Window] = {}
        self._poll_at = time.monotonic() + options.polling_interval
        self._orphans = self._closing = self._awake = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- for kombu's thread; none of these waits for the network, but `pull` and `close`

    def subscribe(self, subscription: Subscription) -> None:
        """Begin to claim messages for a subscription."""
        with self._wake:
            self._subscriptions[subscription.tag] = subscription
            self._rouse()

    def cancel(self, tag: str) -> None:
        """Claim nothing more for a subscription and give back what kombu has not seen."""
        with self._wake:
            subscription = self._subscriptions.pop(tag, None)
            for delivery in self._mailbox.discard(lambda d: isinstance(d, Delivery) and d.subscription is subscription):
                assert isinstance(delivery, Delivery)
                self._return_unseen(delivery)
            self._rouse()

    def hand_over(self, delivery: Delivery) -> bool:
        """Note that kombu takes a delivery from the mailbox; False if it must not, for it may be somebody else's now."""
        with self._wake:
            if not delivery.no_ack and (delivery.tag not in self._held or not self._lease.valid):
                # This process was stopped, or cut off, for so long that the message may have been given to others.
                self._return_unseen(delivery)
                return False
            delivery.credit.waiting -= 1
            delivery.handed = True
            if delivery.no_ack:
                self._rouse()
                return True
            if not delivery.credit.limit:
                self._rouse()
            return True

    def ack(self, tag: str) -> None:
        """The message is done: delete it, if it is still ours."""
        self._decide(tag, workitem.acked)

    def release(self, tag: str) -> None:
        """The message shall be delivered again: put it back to its old place."""
        self._decide(tag, workitem.release)

    def bury(self, tag: str, reason: str) -> None:
        """The message is refused: keep it as a dead letter."""
        self._decide(tag, lambda doc: workitem.bury(doc, reason, self._client.clock.now()))

    def set_credit(self, credit: Credit, limit: int) -> None:
        """Change how many messages a channel may hold."""
        with self._wake:
            credit.limit = limit
            self._rouse()

    def pull(self, queue: str, no_ack: bool, credit: Credit) -> Delivery | None:
        """Claim the next message of a queue and return it, or None if there is none; *raises* `CouchDBError`."""
        pull = _Pull(queue, no_ack, credit)
        with self._wake:
            self._pulls.append(pull)
            self._rouse()
        return pull.wait()

    def close(self, timeout: float) -> None:
        """Give everything back, end the lease and the thread; wait up to `timeout` seconds for that."""
        with self._wake:
            self._closing = True
            self._rouse()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def id(self) -> str:
        """The id of the heartbeat document."""
        return self._lease.id

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _decide(self, tag: str, change: Callable[[Document], Document]) -> None:
        with self._wake:
            if tag not in self._held:
                logger.warning('message %s is not held any more: its lease was lost, so it may run once more elsewhere',
                               tag.partition(':')[0])
                return
            self._settle(tag, change)
            self._rouse()

    def _return_unseen(self, delivery: Delivery) -> None:
        """Give back a message that kombu has not seen."""
        delivery.credit.waiting -= 1
        if delivery.tag in self._held:
            self._settle(delivery.tag, lambda doc: workitem.release(doc, delivered=False))
        elif delivery.no_ack and 'queue' in delivery.doc:
            # It was deleted when it was claimed: store it again, at its old place.
            again = {name: value for name, value in delivery.doc.items() if name != '_rev'}
            self._outbox.append((again, lambda answer: None))

    def _settle(self, tag: str, change: Callable[[Document], Document]) -> None:
        delivery = self._held.pop(tag)
        delivery.credit.held -= 1
        self._outbox.append((change(delivery.doc), lambda answer: self._settled(tag, answer)))

    def _settled(self, tag: str, answer: Document) -> None:
        if answer.get('error'):
            logger.warning('message %s had been taken from this consumer before it was done with it (%s)',
                           tag.partition(':')[0], answer['error'])

    def _rouse(self) -> None:
        self._awake = True
        self._wake.notify()

    # -- the thread

    def _run(self) -> None:
        self._news.start(self._on_news)
        try:
            while not self._closing:
                with self._wake:
                    self._wake.wait_for(lambda: self._awake, self._sleep())
                    self._awake = False
                self._guard(self._turn)
            self._guard(self._finish)
        finally:
            self._news.close()
            for pull in self._pulls:
                pull.answer(CouchDBError('the connection was closed'))

    def _on_news(self) -> None:
        with self._wake:
            self._rouse()

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (AccessDenied, ConfigurationError, NotCouchDB) as exc:
            self._give_up(exc)
        except CouchDBError as exc:
            self._retry_later(exc)
        except Exception as exc:
            logger.exception('the consumer thread failed')
            self._give_up(exc)
        else:
            if self._failures:
                logger.warning('%s answers again', self._client.address.url)
                self._failures = 0

    def _give_up(self, exc: Exception) -> None:
        self._closing = True
        self._mailbox.put([exc])
        for pull in self._pulls:
            pull.answer(exc)
        self._pulls.clear()

    def _retry_later(self, exc: CouchDBError) -> None:
        if not self._failures:
            logger.warning('%s; trying again until it answers', exc)
        self._failures += 1
        self._orphans = True  # a claim may have been stored, its answer lost
        self._news.lost()
        for window in self._windows.values():
            window.clear()
        if not self._closing:
            time.sleep(min(_FIRST_RETRY * 2 ** min(self._failures - 1, 8), _LAST_RETRY))
            with self._wake:
                self._rouse()
            self._guard_ensure()

    def _guard_ensure(self) -> None:
        # The database may have been deleted: make it again, with all that this connection had declared in it.
        try:
            self._store.ensure(self._options.create_database)
            self._topology.redeclare()
        except CouchDBError as exc:
            logger.debug('still away: %s', exc)

    def _sleep(self) -> float:
        """Return how long nothing will be to do, in seconds."""
        now = time.monotonic()
        times = [self._poll_at]
        if self._lease.written:
            times += [self._lease.next_beat, self._sweeper.due]
        times += [at for at in (self._news.due_at(),) if at is not None]
        with self._wake:
            credit = self._credit()
        for queue, window in self._windows.items():
            if credit.get(queue, 0) > 0:
                if window.outdated:
                    return 0.0
                times += [at for at in (window.wake_at(),) if at is not None]
        return max(0.0, min(times) - now)

    # -- a turn

    def _turn(self) -> None:
        with self._wake:
            credit = self._credit()
            queues = {s.queue for s in self._subscriptions.values()}
            pulls, outbox = list(self._pulls), self._outbox
            self._outbox = []
        changes: list[_Change] = []
        self._windows = {queue: self._windows[queue] if queue in self._windows
                         else Window(self._store, queue, self._options.read_ahead) for queue in sorted(queues)}
        try:
            if queues or pulls or self._held:
                self._register(queues)
                if self._orphans:
                    self._adopt_none()
                self._listen(credit)
            changes += [change for pull in pulls for change in self._pull(pull)]
            changes += self._claims(credit)
            if self._lease.written and self._lease.needs_beat(queues):
                changes.append((self._lease.beat(self._client.clock.now(), queues), self._beaten))
            self._commit(outbox + changes)
        except CouchDBError:
            self._undo(outbox, changes)
            raise
        if self._lease.written and time.monotonic() >= self._sweeper.due:
            self._news.members.keep(self._sweeper.sweep(self._lease.id, len(self._held), self._on_orphans))

    def _undo(self, outbox: list[_Change], changes: list[_Change]) -> None:
        """Take back a turn that broke off: whether any of it was stored is unknown."""
        for _, react in changes:
            react({'error': 'unanswered'})
        with self._wake:
            # What was stored already conflicts with itself when it is sent again: that is no news.
            self._outbox = [(doc, lambda answer: None) for doc, _ in outbox] + self._outbox

    def _commit(self, changes: list[_Change]) -> None:
        if changes:
            for (_, react), answer in zip(changes, self._client.bulk([doc for doc, _ in changes]), strict=True):
                react(answer)

    def _register(self, queues: set[str]) -> None:
        """Write the heartbeat document before anything is claimed: a claim without one counts as a dead consumer's."""
        if not self._lease.written:
            self._beaten(self._client.bulk([self._lease.beat(self._client.clock.now(), queues)])[0])

    def _beaten(self, answer: Document) -> None:
        if answer.get('ok'):
            self._lease.beaten(answer['rev'])
        elif answer.get('error') == 'conflict':
            self._swept()
        elif answer.get('error') != 'unanswered':
            logger.warning('the heartbeat was not stored: %s', answer.get('reason'))

    def _swept(self) -> None:
        """Others found us silent for too long and gave away what we held: begin anew, without it."""
        with self._wake:
            lost = list(self._held.values())
            self._held.clear()
            self._mailbox.discard(lambda d: isinstance(d, Delivery) and not d.no_ack)
            for delivery in lost:
                delivery.credit.held -= 1
                delivery.credit.waiting -= 0 if delivery.handed else 1
            self._lease.renew()
            self._rouse()
        logger.warning('this consumer was silent for longer than the visibility timeout of %g s and lost its lease; '
                       '%d messages it held are delivered again', self._lease.timeout, len(lost))

    def _on_orphans(self) -> None:
        self._orphans = True

    def _adopt_none(self) -> None:
        """Give back claims of ours that we do not know of: the answer that told of them was lost."""
        known = {delivery.doc['_id'] for delivery in self._held.values()}
        self._store.release(doc for doc in self._store.claims(self._lease.id) if doc['_id'] not in known)
        self._orphans = False

    def _listen(self, credit: dict[str, int]) -> None:
        """Take in what the feed told, and see to it that it listens for what is of interest now."""
        if time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + self._options.polling_interval
            for window in self._windows.values():
                window.dirty = True
        for window in self._windows.values():
            window.check_due()
        eager = {queue for queue in self._windows if credit.get(queue, 0) > 0}
        items, broadcasts = self._news.take(self._windows, eager)
        for doc in items:
            self._windows[doc['queue']].offer(doc, *self._news.members.place(self._lease.id, doc['queue']))
        for queue, message in broadcasts:
            self._broadcast(queue, message)

    def _broadcast(self, queue: str, message: dict[str, Any]) -> None:
        with self._wake:
            for s in self._subscriptions.values():
                if s.queue == queue:
                    s.credit.waiting += 1
                    doc = {'_id': workitem.new_id(time.time()), 'message': message}
                    self._mailbox.put([Delivery(doc, s.credit, s, no_ack=True)])

    # -- claims

    def _credit(self) -> dict[str, int]:
        """Return for each queue how many messages may be claimed for it now."""
        credit: dict[str, int] = {}
        for s in self._subscriptions.values():
            credit[s.queue] = credit.get(s.queue, 0) + max(0, s.credit.free(self._options.unlimited_prefetch))
        return credit

    def _claims(self, credit: dict[str, int]) -> list[_Change]:
        wanted = [queue for queue, free in credit.items() if free > 0 and not self._news.listener.listens(queue)]
        changes: list[_Change] = []
        for queue in wanted:
            # An equal share each, so that a full queue does not starve a small one.
            count = min(credit[queue], max(1, self._options.claim_batch // len(wanted)))
            window = self._windows.get(queue)
            if window is None:
                continue
            if window.outdated:
                window.refill(*self._news.members.place(self._lease.id, queue))
            docs = window.take(count)
            if len(docs) < count and window.dirty:
                window.refill(*self._news.members.place(self._lease.id, queue))
                docs += window.take(count - len(docs))
            for doc in docs:
                with self._wake:
                    subscription = self._next_subscription(queue)
                if subscription is None:
                    break
                changes.append(self._claim(doc, subscription.credit, subscription.no_ack, subscription))
        return changes

    def _next_subscription(self, queue: str) -> Subscription | None:
        """Return the subscription of a queue with the most credit left."""
        fit = [s for s in self._subscriptions.values() if s.queue == queue]
        best = max(fit, key=lambda s: s.credit.free(self._options.unlimited_prefetch), default=None)
        return best if best and best.credit.free(self._options.unlimited_prefetch) > 0 else None

    def _claim(self, doc: Document, credit: Credit, no_ack: bool, subscription: Subscription | None,
               pull: _Pull | None = None) -> _Change:
        """Return the claim of an item; without acknowledgement it is deleted at once, and so is its claim."""
        if reason := workitem.flaw(doc):
            logger.error('message %s in queue %r was set aside as a dead letter: %s', doc['_id'], doc.get('queue'), reason)
            return workitem.bury(doc, reason, self._client.clock.now()), lambda answer: None
        claimed = workitem.acked(doc) if no_ack else workitem.claim(doc, self._lease.id, self._client.clock.now())
        with self._wake:
            credit.waiting += 1
            credit.held += 0 if no_ack else 1

        def won(answer: Document) -> None:
            # Only a clean answer proves the claim: an accepted one may have lost to another on other nodes.
            if answer.get('ok') and not answer.get('accepted'):
                kept = doc if no_ack else {**claimed, '_rev': answer['rev']}
                self._deliver(Delivery(kept, credit, subscription, no_ack=no_ack), pull)
                return
            with self._wake:
                credit.waiting -= 1
                credit.held -= 0 if no_ack else 1
                self._orphans |= bool(answer.get('accepted'))
        return claimed, won

    def _deliver(self, delivery: Delivery, pull: _Pull | None) -> None:
        with self._wake:
            if not delivery.no_ack:
                self._held[delivery.tag] = delivery
            gone = delivery.subscription is not None and delivery.subscription.tag not in self._subscriptions
            if gone:
                self._return_unseen(delivery)
                self._rouse()
            elif pull is not None:
                delivery.handed = True
                delivery.credit.waiting -= 1
                self._pulls.remove(pull)
                pull.answer(delivery)
            else:
                self._mailbox.put([delivery])

    def _pull(self, pull: _Pull) -> list[_Change]:
        rows = self._store.ready(pull.queue, 8, docs=True)
        now = self._client.clock.now()
        for doc in (row['doc'] for row in rows if row.get('doc')):
            if workitem.flaw(doc) or (not doc.get('claimed') and workitem.is_due(doc, now)):
                with self._wake:
                    self._rouse()  # should the claim fail, the next turn looks again
                return [self._claim(doc, pull.credit, pull.no_ack, None, pull)]
        with self._wake:
            self._pulls.remove(pull)
        pull.answer(None)
        return []

    # -- the end

    def _finish(self) -> None:
        """Give back all that is held, at once, and end the lease."""
        with self._wake:
            for tag, delivery in list(self._held.items()):
                handed = delivery.handed
                self._settle(tag, lambda doc, handed=handed: workitem.release(doc, delivered=handed))  # type: ignore[misc]
            changes, self._outbox = self._outbox, []
        if self._lease.rev:
            changes.append(({'_id': self._lease.id, '_rev': self._lease.rev, '_deleted': True}, lambda answer: None))
        try:
            self._commit(changes)
        except CouchDBError as exc:
            logger.warning('%s; what this consumer held comes back when its lease ends', exc)


class _Pull:
    """A `basic_get` that waits for the thread."""

    def __init__(self, queue: str, no_ack: bool, credit: Credit) -> None:
        self.queue, self.no_ack, self.credit = queue, no_ack, credit
        self._done = threading.Event()
        self._answer: Delivery | Exception | None = None

    def answer(self, answer: Delivery | Exception | None) -> None:
        self._answer = answer
        self._done.set()

    def wait(self) -> Delivery | None:
        self._done.wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


