"""The I/O thread of a consuming connection: it alone claims, acknowledges, beats and sweeps.

One *turn* reads what can be claimed and writes, in one `_bulk_docs`, new claims, acknowledgements, releases, dead letters
and the heartbeat. A turn is caused by an ack, by credit, by the feed, by a due date or by the next heartbeat; between
turns the thread sleeps.

If the server is away the thread tries again, and says so once; kombu is not told, since the leases and what is to be
acknowledged outlive the connection. So it does if something else answers for a while, such as a proxy with a page of its own.
Only what a person must mend (rights, options) is handed to kombu as an error.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence

from kombu.log import get_logger

from . import workitem
from .bodies import Bodies
from .claims import Claims
from .client import Client, Document
from .delivery import Credit, Delivery
from .doubt import unwritten
from .errors import AccessDenied, ConfigurationError, CouchDBError
from .heartbeat import Heartbeat
from .holdings import Change, Holdings
from .lease import Lease, Sweeper
from .mailbox import Mailbox
from .news import News
from .options import Options
from .pull import Pull
from .store import Store
from .topology import Topology
from .window import Window

__all__ = ['Consumer']

logger = get_logger(__name__)

#: How often a consumer that ends tries to settle a unique job that publishers change all the time.
_LAST_TRIES = 20

#: In a cluster the queues are read at least this often, in seconds. What a node holds that was behind when it was read, the feed,
#: which follows another one, never tells.
_BEHIND = 10.0

#: Waits between tries while the server is away, in seconds.
_FIRST_RETRY, _LAST_RETRY = 0.1, 2.0


class Consumer:
    """Claims messages for the subscriptions in `holdings` and writes what is decided about them."""

    def __init__(self, client: Client, options: Options, mailbox: Mailbox[Delivery | Exception], news: News,
                 topology: Topology, name: str) -> None:
        self._client, self._options, self._mailbox = client, options, mailbox
        self._news, self._topology, self._store = news, topology, Store(client)
        self._lease = Lease(options.visibility_timeout)
        self._sweeper = Sweeper(self._store, topology, options.visibility_timeout)
        self.holdings = Holdings(self._lease, mailbox, client.clock, options.unlimited_prefetch)
        self._bodies = Bodies(client, self.holdings)
        self._heartbeat = Heartbeat(client, self._lease, self.holdings)
        self._claims = Claims(self._store, options, self.holdings, self._lease, self._sweeper.void,
                              topology.limits)
        self._windows: dict[str, Window] = {}
        self._polled = time.monotonic()
        self._orphans = self._unsure = False
        self._failures = 0
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    @property
    def id(self) -> str:
        """The id of the heartbeat document."""
        return self._lease.id

    @property
    def ended(self) -> bool:
        """Whether the thread has given up; what made it do so was put into the mailbox."""
        return not self._thread.is_alive()

    def pull(self, queue: str, no_ack: bool, credit: Credit) -> Delivery | None:
        """Claim the next message of a queue and return it, or None if there is none; *raises* `CouchDBError`."""
        pull = Pull(queue, no_ack, credit)
        self._claims.pulls.append(pull)
        self.holdings.bell.ring()
        return pull.wait(self._thread)

    def watch(self, queue: str) -> None:
        """Remove a temporary queue later, when nobody uses it any more."""
        self._sweeper.left.add(queue)

    def close(self, timeout: float) -> None:
        """Give everything back, end the lease and the thread; wait up to `timeout` seconds for that."""
        atexit.unregister(self._at_exit)
        self._closing.set()
        self.holdings.bell.ring()
        self._thread.join(timeout)

    def _at_exit(self) -> None:
        # A program that never closed its connection: what it holds need not wait for the end of the lease.
        if self._pid == os.getpid():
            self.close(self._options.request_timeout)

    # -- the thread

    def _run(self) -> None:
        self._news.start(self.holdings.bell.ring)
        try:
            while not self._closing.is_set():
                self._guard(self._cycle)
            self._guard(self._finish)
        finally:
            self._news.close()
            for pull in self._claims.pulls:
                pull.answer(CouchDBError('the connection was closed'))

    def _cycle(self) -> None:
        self.holdings.bell.wait(self._sleep())
        self._turn()

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (AccessDenied, ConfigurationError) as exc:
            self._give_up(exc)
        except CouchDBError as exc:
            self._retry_later(exc)
        except Exception as exc:
            logger.exception('the consumer thread failed')
            self._give_up(exc)
        else:
            if self._failures:
                logger.warning('%s answers again', self._client.url)
                self._failures = 0

    def _give_up(self, exc: Exception) -> None:
        self._closing.set()
        self._mailbox.put([exc])
        for pull in self._claims.pulls:
            pull.answer(exc)
        self._claims.pulls.clear()

    def _retry_later(self, exc: CouchDBError) -> None:
        if not self._failures:
            logger.warning('%s; trying again until it answers', exc)
        self._failures += 1
        self._orphans = True  # a claim may have been stored, its answer lost
        self._unsure = True  # and so may what is in the outbox
        self._heartbeat.in_doubt = True  # the database may be another
        self._news.lost()
        for window in self._windows.values():
            window.clear()
        self._closing.wait(min(_FIRST_RETRY * 2 ** min(self._failures - 1, 8), _LAST_RETRY))
        try:
            # The database may have been deleted: make it again, with all that this connection had declared in it.
            self._store.ensure(self._options.create_database)
            self._topology.redeclare()
        except CouchDBError as again:
            logger.debug('still away: %s', again)
        self.holdings.bell.ring()

    @property
    def _poll_at(self) -> float:
        interval = self._options.polling_interval
        return self._polled + (interval if self._client.replicas == 1 else min(interval, _BEHIND))

    def _sleep(self) -> float:
        """Return how long nothing will be to do, in seconds."""
        if self.holdings.unread():
            return 0.0
        times = [self._poll_at]
        if self._lease.written:
            times += [self._lease.next_beat, self._sweeper.due]
        times += [at for at in (self._news.due_at(),) if at is not None]
        credit = self.holdings.credit()
        for queue, window in self._windows.items():
            if credit.get(queue, 0) > 0:
                at = window.wake_at()
                if window.dirty and at is None:
                    return 0.0
                times += [] if at is None else [at]
        return max(0.0, min(times) - time.monotonic())

    # -- a turn

    def _turn(self) -> None:
        self.holdings.resettle(self._client.fetch)
        outbox, pulls, queues, credit = (self.holdings.take_outbox(), list(self._claims.pulls),
                                         self.holdings.queues, self.holdings.credit())
        changes: list[Change] = []
        self._windows = {queue: self._windows[queue] if queue in self._windows
                         else Window(self._store, queue, self._options.read_ahead)
                         for queue in sorted(queues) if not self._news.listener.listens(queue)}
        try:
            if queues or pulls or self._lease.written:
                self._heartbeat.register(queues)
                if self._orphans:
                    self._release_orphans()
                self._listen(credit)
            if self._unsure:
                outbox, self._unsure = unwritten(self._client, outbox), False
            if any(workitem.is_waiting(doc) or workitem.is_unique(doc) for doc, _ in outbox):
                # What is given back keeps its place: it goes before anything that is claimed with the credit it freed.
                # A unique job that is done may be there again, to be claimed anew: one request cannot do both.
                self._commit(outbox)
                self._offer(self.holdings.take_returned())
            if self._lease.written and self._lease.needs_beat(queues):
                changes.append(self._heartbeat.change(queues))  # before the claims: those may be more than one request
            self._claims.pulled(pulls, changes)
            self._claims.wanted(credit, self._windows, changes)
            self.holdings.hungry = any(window.dirty or len(window) for window in self._windows.values())
            self._commit(outbox, changes)
        except CouchDBError:
            # Whether any of what is left was stored is unknown.
            for _, react in changes:
                react({'error': 'unanswered'})
            self.holdings.return_outbox(outbox)
            raise
        self._bodies.deliver_some()
        if self._lease.written and time.monotonic() >= self._sweeper.due:
            self._news.members.keep(self._sweeper.sweep(self._lease.id, self.holdings.ids(), self._on_orphans))

    def _commit(self, *lists: list[Change]) -> None:
        """Write the changes in these lists, and take out of them what was answered; *raises* `CouchDBError`: the rest was not."""
        first: dict[str, Change] = {}
        for change in itertools.chain(*lists):
            if first.setdefault(change[0]['_id'], change) is not change:
                change[1]({'error': 'conflict'})  # two for one document in one request: the first wins, as in CouchDB
        # Of a dead unique job with others behind it a copy is written, too, and before it.
        now = self._client.clock.now()
        docs = [part for doc, _ in first.values() for part in workitem.apart(doc, now)]
        failure = None
        try:
            answers: Sequence[Document] = self._client.bulk(docs) if docs else ()
        except CouchDBError as exc:
            answers, failure = exc.answered, exc
        for answer in answers:
            self._orphans |= answer.get('error') == 'missing_stub'  # some of a cluster's nodes may have stored it
            if answer['id'] in first:
                _, react = first.pop(answer['id'])
                react(answer)
        for changes in lists:
            changes[:] = [change for change in changes if first.get(change[0]['_id']) is change]
        if failure is not None:
            raise failure

    def _on_orphans(self) -> None:
        self._orphans = True

    def _release_orphans(self) -> None:
        """Give back claims of ours that we do not know of: the answer that told of them was lost."""
        known = self.holdings.ids() | self._sweeper.void.keys()
        orphans = [doc for doc in self._store.claims(self._lease.id) if doc['_id'] not in known]
        if self._client.replicas > 1:  # others may have been told that they have them
            self._sweeper.void.update({doc['_id']: (doc['_rev'], time.monotonic()) for doc in orphans})
        else:
            self._store.release(orphans)
        self._orphans = False

    def _listen(self, credit: dict[str, int]) -> None:
        """Take in what the feed told, and see to it that it listens for what is of interest now."""
        poll = time.monotonic() >= self._poll_at
        if poll:
            self._polled = time.monotonic()
        for queue, window in self._windows.items():
            if credit.get(queue, 0) > 0 and not window.dirty and (poll or window.is_due):
                window.refill()  # the feed goes on: it has told all but what became due
        eager = {queue for queue in self._windows if credit.get(queue, 0) > 0}
        items, broadcasts = self._news.take(self._windows, eager)
        for queue, window in self._windows.items():
            window.settle(self._news.members.place(self._lease.id, queue))
        self._offer(items)
        for queue, message in broadcasts:
            self.holdings.broadcast(queue, message)

    def _offer(self, items: list[Document]) -> None:
        for doc in items:
            if doc['queue'] in self._windows:
                self._windows[doc['queue']].offer(doc)

    def _finish(self) -> None:
        """Give back all that is held, at once, and end the lease."""
        self.holdings.give_back_all()
        changes: list[Change] = []
        try:
            # Unique jobs may be changed by publishers at this very moment. As long as the lease stands nobody else decides.
            for _ in range(_LAST_TRIES):
                self.holdings.resettle(self._client.fetch)
                changes = self.holdings.take_outbox()
                if not any(workitem.is_unique(doc) for doc, _ in changes):
                    break
                self._commit(changes)
                changes = []
            if self._lease.rev:
                changes.append(({'_id': self._lease.id, '_rev': self._lease.rev, '_deleted': True}, lambda answer: None))
            self._commit(changes)
        except CouchDBError as exc:
            logger.warning('%s; what this consumer held comes back when its lease ends', exc)
