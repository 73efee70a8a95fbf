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
import os
import threading
import time
from collections.abc import Callable

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document
from ..couchdb.write_result import WriteResult
from ..documents import workitem
from ..errors import AccessDenied, ConfigurationError, CouchDBError
from ..leases.lease import Lease
from ..leases.sweeper import Sweeper
from ..log import get_logger
from ..options import Options
from ..queues.database import ensure
from ..queues.set_aside import set_aside
from ..queues.store import Store
from ..queues.topology import Topology
from .announced import Announced
from .bodies import Bodies
from .candidates import QueueCandidates
from .claims import Claims
from .commits import Commits
from .delivery import Delivery
from .heartbeat import Heartbeat
from .mailbox import Mailbox
from .notifier import Notifier
from .pending_writes import Change
from .pull import Pull
from .unacked import Unacked

__all__ = ['Consumer']

logger = get_logger(__name__)

#: How often a consumer that ends tries to settle a unique job that publishers change all the time.
_LAST_TRIES = 20

#: In a cluster the queues are read at least this often, in seconds. What a node holds that was behind when it was read, the feed,
#: which follows another one, never tells.
_BEHIND = 10.0

#: A consumer that has had nothing to do for so long ends its lease and its threads, in seconds; the next use starts another.
_IDLE_SECONDS = 5.0

#: Waits between tries while the server is away, in seconds.
_FIRST_RETRY, _LAST_RETRY = 0.1, 2.0


class Consumer:
    """Claims messages for the subscriptions in `holdings` and writes what is decided about them."""

    def __init__(
        self,
        client: Client,
        options: Options,
        mailbox: Mailbox[Delivery | Exception],
        notifier: Notifier,
        topology: Topology,
        name: str,
    ) -> None:
        self._client, self._options, self._mailbox = client, options, mailbox
        self._notifier, self._topology, self._store = notifier, topology, Store(client)
        self._lease = Lease(options.visibility_timeout)
        self._sweeper = Sweeper(self._store, topology, options.visibility_timeout)
        self.unacked = Unacked(self._lease, mailbox, client.clock, options.unlimited_prefetch)
        self._bodies = Bodies(client, self.unacked)
        self._commits = Commits(self._store, self.unacked, self._lease, self._sweeper.void)
        self._heartbeat = Heartbeat(client, self._lease, self.unacked)
        #: The queues that others see to be used by this consumer.
        self.announced = Announced()
        self._known_as = self._lease.id  # since when what was declared here is known to be there
        self._claims = Claims(self._store, options, self.unacked, self._lease, self._sweeper.void, topology.limits)
        self._candidates: dict[str, QueueCandidates] = {}
        self._polled = time.monotonic()
        self._abandoned = False
        self._idle_since: float | None = None
        self._failures = 0
        self._began = time.monotonic()
        #: The monotonic time since which the server does not answer.
        self._away_since: float | None = None
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
        return not (self._thread.is_alive() or self.unacked.retired)

    def wait(self, pull: Pull) -> Delivery | None:
        """Return the message that was asked for, or None if there is none; *raises* `CouchDBError`."""
        return pull.wait(self._thread)

    def watch(self, queue: str) -> None:
        """Remove a temporary queue later, when nobody uses it any more."""
        self._sweeper.unused.left.add(queue)

    def close(self, timeout: float) -> None:
        """Give everything back, end the lease and the thread; wait up to `timeout` seconds for that."""
        atexit.unregister(self._at_exit)
        self._closing.set()
        self.unacked.wakeup.set()
        self._thread.join(timeout)

    def abandon(self) -> None:
        """End as with `close`, without a wait: the connection was dropped. A finalizer calls this, so it takes no lock."""
        if self._pid == os.getpid():  # a forked child that drops its copy ends nothing of its parent's
            self._abandoned = True
            self.unacked.wakeup.set()

    def _at_exit(self) -> None:
        # A program that never closed its connection: what it holds need not wait for the end of the lease.
        if self._pid == os.getpid():
            self.close(self._options.request_timeout)

    # -- the thread

    def _run(self) -> None:
        self._notifier.start(self.unacked.wakeup.set)
        try:
            while not (self._closing.is_set() or self._abandoned or self.unacked.retired):
                self._guard(self._cycle)
            self._guard(self._finish)
        finally:
            self._notifier.close()
            self.announced.close()
            for pull in self._claims.pulls:
                pull.answer(CouchDBError('the connection was closed'))
            atexit.unregister(self._at_exit)
            if self._abandoned:  # nobody else closes these
                self._mailbox.close()
                self._client.close()

    def _cycle(self) -> None:
        self.unacked.wakeup.wait(self._sleep())
        self._began = time.monotonic()
        if self._busy:
            self._idle_since = None
        self._turn()
        if not self._busy:
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() >= self._idle_since + _IDLE_SECONDS:
                self.unacked.retire()

    @property
    def _busy(self) -> bool:
        # A bound queue that nobody consumes just now keeps its broadcasts, and what this consumer alone knows of is done by it.
        return bool(self.unacked.busy or self._notifier.listener.binds or self._sweeper.unused or self._sweeper.void)

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
        self._away_since = self._began if self._away_since is None else self._away_since
        self._commits.was_cut()
        self._heartbeat.in_doubt = True  # the database may be another
        self._notifier.lost()
        for queue_candidates in self._candidates.values():
            queue_candidates.clear()
        self._closing.wait(min(_FIRST_RETRY * 2 ** min(self._failures - 1, 8), _LAST_RETRY))
        try:
            # The database may have been deleted: make it again, with all that this connection had declared in it.
            ensure(self._store.client, self._options.create_database)
            self._topology.redeclare()
        except CouchDBError as again:
            logger.debug('still away: %s', again)
        self.unacked.wakeup.set()

    @property
    def _poll_at(self) -> float:
        interval = self._options.polling_interval
        return self._polled + (interval if self._client.replicas == 1 else min(interval, _BEHIND))

    def _sleep(self) -> float:
        """Return how long nothing will be to do, in seconds."""
        if self.unacked.unread():
            return 0.0
        times = [self._poll_at]
        if self._lease.written:
            times += [self._lease.next_beat, self._sweeper.due]
        if self._idle_since is not None:
            times.append(self._idle_since + _IDLE_SECONDS)
        times += [at for at in (self._notifier.due_at(),) if at is not None]
        credit = self.unacked.credit()
        for queue, queue_candidates in self._candidates.items():
            if credit.get(queue, 0) > 0:
                at = queue_candidates.wake_at()
                if queue_candidates.dirty and at is None:
                    return 0.0
                times += [] if at is None else [at]
        return max(0.0, min(times) - time.monotonic())

    # -- a turn

    def _turn(self) -> None:
        set_aside(self._client)
        self.unacked.resettle(self._client.fetch)
        outbox, pulls, queues, credit = (
            self.unacked.take_writes(),
            list(self._claims.pulls),
            self.unacked.queues,
            self.unacked.credit(),
        )
        changes: list[Change] = []
        self._candidates = {
            queue: self._candidates[queue]
            if queue in self._candidates
            else QueueCandidates(self._client.clock, queue, self._options.read_ahead)
            for queue in sorted(queues)
        }
        try:
            if queues or pulls or self._lease.written:
                self._heartbeat.register(queues)
                self.announced.are(self._lease.announced)
                # Who was silent for too long finds its temporary queues deleted, and so may who was found unused by mistake.
                self._topology.restore(queues, check=self._known_as != self._lease.id)
                self._known_as = self._lease.id
                self._commits.release_orphans()
                self._listen(credit)
            self._commits.find_out(outbox)
            if any(workitem.is_waiting(doc) or workitem.is_unique(doc) for doc, _ in outbox):
                # What is given back keeps its place: it goes before anything that is claimed with the credit it freed.
                # A unique job that is done may be there again, to be claimed anew: one request cannot do both.
                self._commits.write(outbox)
                self._offer(self.unacked.take_returned())
            self._claims.pulled(pulls, changes)
            self._claims.wanted(credit, self._candidates, changes)
            if self._lease.written and self._lease.needs_beat(queues):
                changes.insert(
                    0, self._heartbeat.change(queues)
                )  # before the claims: those may be more than one request
            self.unacked.hungry = any(
                queue_candidates.dirty or len(queue_candidates) for queue_candidates in self._candidates.values()
            )
            self._commits.write(outbox, changes)
            self.announced.are(self._lease.announced)
        except CouchDBError:
            # Whether any of what is left was stored is unknown.
            for doc, react in changes:
                react(WriteResult.unknown(doc['_id']))
            self.unacked.return_writes(outbox)
            raise
        if self._away_since is not None:
            self._sweeper.interrupted(time.monotonic() - self._away_since)
            self._away_since = None
        self._bodies.deliver_some()
        if self._lease.written and time.monotonic() >= self._sweeper.due:
            self._notifier.peers.keep(self._sweeper.sweep(self._lease.id, self.unacked.ids(), self._commits.on_orphans))

    def _listen(self, credit: dict[str, int]) -> None:
        """Take in what the feed told, and see to it that it listens for what is of interest now."""
        poll = time.monotonic() >= self._poll_at
        if poll:
            self._polled = time.monotonic()
        # The feed goes on: it has told all but what became due.
        self._claims.reader.refill(
            [
                queue_candidates
                for queue, queue_candidates in self._candidates.items()
                if credit.get(queue, 0) > 0 and not queue_candidates.dirty and (poll or queue_candidates.is_due)
            ]
        )
        eager = {queue for queue in self._candidates if credit.get(queue, 0) > 0}
        items, broadcasts = self._notifier.take(self._candidates, eager)
        for queue, queue_candidates in self._candidates.items():
            queue_candidates.settle(self._lease.id, self._notifier.peers.of(queue, self._lease.id))
        self._offer(items)
        for queue, message in broadcasts:
            self.unacked.broadcast(queue, message)

    def _offer(self, items: list[Document]) -> None:
        for doc in items:
            if doc['queue'] in self._candidates:
                self._candidates[doc['queue']].offer(doc)

    def _finish(self) -> None:
        """Give back all that is held, at once, and end the lease."""
        self.unacked.give_back_all()
        changes: list[Change] = []
        try:
            # Unique jobs may be changed by publishers at this very moment. As long as the lease stands nobody else decides.
            for _ in range(_LAST_TRIES):
                self.unacked.resettle(self._client.fetch)
                changes = self.unacked.take_writes()
                if not any(workitem.is_unique(doc) for doc, _ in changes):
                    break
                self._commits.write(changes)
                changes = []
            if self._lease.rev:
                changes.append((deletion({'_id': self._lease.id, '_rev': self._lease.rev}), lambda result: None))
            self._commits.write(changes)
        except CouchDBError as exc:
            logger.warning('%s; what this consumer held comes back when its lease ends', exc)
