"""The cycle of a consumer: one pass over everything that it has to read and write.

A cycle reads what can be claimed. It then writes the new claims, acknowledgements, releases, dead letters and the
heartbeat together, in one `_bulk_docs` request if they are small enough; decisions that include a release or a unique
job are written in a request before that. An ack, new credit, the changes feed, a due date or the next heartbeat causes
a cycle; between two cycles the I/O thread sleeps.

The ack of a task that has only begun waits for no cycle, and in a cycle for no read: such acks are written at once, in
one request with those that arrive during the request before.
"""

from __future__ import annotations

import time
from math import inf

from ..couchdb.client import Client, Document
from ..couchdb.pacing import RequestKind
from ..couchdb.write_result import PendingWrite
from ..documents import workitem
from ..documents.concurrency import is_parked, parked_key
from ..errors import CouchDBError
from ..fleet.candidates import QueueCandidates
from ..fleet.notifier import Notifier
from ..leases.lease import Lease
from ..leases.sweeper import Sweeper
from ..limits.gate import Gate
from ..log import get_logger
from ..options import Options
from ..queues import waiting
from ..queues.fanout import Listener
from ..queues.quarantine import Harmful, dead_letter_members, set_aside
from ..queues.store import Store
from ..queues.topology import Topology
from .claims import Claims
from .delivery import Mailbox, Snapshot
from .heartbeat import Heartbeat
from .pending_writes import Commits, give_up
from .unacked import Unacked
from .worker_hooks import Suspects

logger = get_logger(__name__)

#: How long a cycle looks for documents because of which views fail, in seconds: heartbeats must go on.
_SEARCH_SECONDS = 2.0

#: How often a consumer that closes tries to store the outcome of a unique job that publishers keep changing.
_MAX_LAST_TRIES = 20

#: In a cluster the consumer reads its queues at least this often, in seconds. It may read a queue from a node that does
#: not have a new message yet, and then follow the feed of a node that has it already: that feed never reports it.
_CLUSTER_POLL_SECONDS = 10.0

#: How many messages at the head of a queue are read before the bell rings.
_BELL_ROWS = 8


class Cycle:
    """The work of one consumer; for its I/O thread alone, except `unacked` and `lease.announced`."""

    def __init__(
        self,
        client: Client,
        options: Options,
        mailbox: Mailbox,
        listener: Listener,
        topology: Topology,
        name: str,
    ) -> None:
        self._client, self._options, self._topology = client, options, topology
        self._store, self._harmful = Store(client), Harmful(client, dead_letter_members)
        self.lease = Lease(options.visibility_timeout)
        #: The subscriptions and the unacknowledged messages.
        self.unacked = Unacked(
            self.lease,
            mailbox,
            client.clock,
            options.unlimited_prefetch,
            options.keep_done,
            options.keep_failed,
            confirm_acks=options.confirm_acks,
        )
        #: What is new in the databases.
        self.notifier = Notifier(client, topology, listener, name, self.unacked.wakeup.set)
        #: Which messages may be claimed now, and which wait for a slot or a start.
        self._gate = Gate(self._store, self.lease, topology, self.notifier.peers)
        self.sweeper = Sweeper(self._store, topology, options.visibility_timeout, self._gate.sweep)
        self._writes = self.unacked.writes
        self._commits = Commits(self._store, self.lease, self.sweeper.unproven)
        self._suspects = Suspects(client)
        self._heartbeat = Heartbeat(client, self.lease, self.unacked, self._suspects)
        self._claims = Claims(
            self._store,
            options,
            self.unacked,
            self.lease,
            self.sweeper.unproven,
            topology,
            self._gate,
            self.notifier.attention,
            self.store_begun,
        )
        self._candidates: dict[str, QueueCandidates] = {}
        self._polled = time.monotonic()
        #: The lease under which the declarations of this connection are known to exist.
        self._restored_for = self.lease.id

    @property
    def is_busy(self) -> bool:
        """Whether the consumer has work, or keeps something that would be lost with it."""
        # Broadcasts for a bound queue are kept in this process until something subscribes to the queue.
        return bool(
            self.unacked.busy or self.notifier.listener.exchanges or self.sweeper.unused or self.sweeper.unproven
        )

    def next_at(self) -> float:
        """Return the monotonic time of the next cycle, if nothing wakes the thread before."""
        now = self.unacked.snapshot()
        if now.awaits_bodies or (now.shelved and self._wanted_by_others(now)):
            return -inf
        readable_at = writable_at = -inf
        if pace := self._client.pace:
            readable_at, writable_at = pace.next_at(RequestKind.QUERY), pace.next_at(RequestKind.WRITE)
        times = [max(self._poll_at, readable_at), self.notifier.attention.bell.due_at, now.overdue_at]
        if self.lease.written:
            times += [self._heartbeat.due_at, self.sweeper.due, self.notifier.due_at()]
        if self._gate.is_used:
            times += [self._gate.due(now.credit), *self.unacked.may_run().values()]
        for queue, candidates in self._candidates.items():
            if now.credit.get(queue, 0) <= 0:
                if queue in self.notifier.attention.followed:
                    times.append(max(candidates.due_at(), readable_at))
            else:
                at = candidates.wake_at()
                if candidates.is_stale and at is None:
                    at = -inf
                if at is not None:
                    at = max(at, readable_at, writable_at)
                    times.append(at if self.unacked.is_low(queue) else max(at, self.unacked.flow.next_at))
        return min(times)

    def on_outage(self) -> None:
        """Note that CouchDB did not respond: which writes it stored is unknown, and the database may be another one."""
        self._commits.on_outage()
        self._suspects.add(self.unacked.docs())
        self._heartbeat.uncertain = True
        self.notifier.on_outage()
        for candidates in self._candidates.values():
            candidates.clear()

    def store_begun(self) -> None:
        """Write the acks of tasks that have begun; *raises* the errors of `Client`, as `run`."""
        self._commits.write_begun(self._writes)

    def run(self) -> None:
        """Run one cycle; *raises* the errors of `Client`. The next cycle checks writes that got no response."""
        self.unacked.flow.begin()
        self._harmful.replace(_SEARCH_SECONDS)
        set_aside(self._client)
        self._writes.settle_doubtful(self._client.leaves)
        self._writes.retry_changed(self._client.fetch)
        pulls, now = list(self.unacked.pulls), self.unacked.snapshot()
        if now.shelved:
            self.unacked.give_back(self._wanted_by_others(now) | {pull.queue for pull in pulls})
        if self._gate.is_used:
            self._gate.begin(self._in_use)
        pending = self._writes.take_ready()
        queues, credit = self.unacked.queues, self.unacked.credit(ahead=True)
        writes: list[PendingWrite] = []
        self._candidates = {
            queue: self._candidates[queue] if queue in self._candidates else self._new_candidates(queue)
            for queue in sorted(queues)
        }
        try:
            if queues or pulls or self.lease.written:
                self._heartbeat.register(queues)
                self._suspects.check()
                self._restore_queues(queues)
                if self._commits.has_orphans:
                    self._commits.release_orphans(self.unacked.ids())
                self._read_candidates(credit)
                paused = self._topology.paused
                self.unacked.pause(paused)
                credit = {queue: free for queue, free in credit.items() if queue not in paused}
            if self._commits.uncertain:
                pending += self._writes.take_begun()
                self._commits.drop_stored(pending)
            if any(workitem.is_waiting(write.doc) or workitem.is_unique(write.doc) for write in pending):
                # A released message becomes a candidate before the freed credit is used, so that it is claimed again
                # before the messages behind it. A completed unique job may have a successor under the same id to be
                # claimed, and one request cannot write one document twice.
                self._commits.write(pending)
                released = self._writes.take_released()
                self._store.delete_without_queue(released)
                self._offer(released)
            self._claims.claim_for_pulls(pulls, writes)
            self._claims.claim_for_credit(credit, self._candidates, writes, len(pending))
            if claimed := [write.doc['message'] for write in writes if write.doc.get('claimed')]:
                for queue, message in self.notifier.take_before(claimed):
                    self.unacked.broadcast(queue, message)
            if self._gate.is_used:
                self._gate.wake(writes)
                self._gate.free(writes)
            if writes or pending:
                self._heartbeat.report.expect()
            # Others count unproven claims, too.
            holds = self._writes.unstored or self.unacked.docs() or self.sweeper.unproven
            holds_slots = self._gate.is_used and self._gate.holds_slots()
            self.lease.idle = not (writes or pending or holds or holds_slots)
            if self.lease.written and self._heartbeat.needs_write(queues):
                writes.insert(0, self._heartbeat.next_write(queues))  # first: the claims may need more than one request
            self.unacked.more_to_claim = any(
                each.is_stale or len(each)
                for queue, each in self._candidates.items()
                if queue not in self._topology.paused
            )
            pending += self._writes.take_begun()
            if pending or writes:
                self._commits.write(pending, writes)
                self.unacked.flow.end()
            if self._gate.is_used:
                self._offer(self._gate.settle(self._in_use))
            self._ring()
        except CouchDBError:
            give_up([*pending, *writes])
            raise

    def sweep(self) -> None:
        """Release the messages of consumers whose leases expired, if it is time to; *raises* the errors of `Client`."""
        self.sweeper.rests = not self.notifier.attention.listens
        if self.lease.written and time.monotonic() >= self.sweeper.due:
            living = self.sweeper.sweep(self.lease.id, self.unacked.ids(), self._commits.on_orphans)
            self.notifier.coordination.know(living)

    def finish(self) -> None:
        """Release all unacknowledged messages and end the lease; *raises* the errors of `Client`."""
        self.unacked.release_all()
        if self._gate.is_used:
            self._gate.begin(self._in_use)
        changes: list[PendingWrite] = []
        # Publishers may change unique jobs at this moment, which makes a write conflict: try again. No other consumer
        # can write an outcome before the lease ends.
        for _ in range(_MAX_LAST_TRIES):
            self._writes.retry_changed(self._client.fetch)
            # A decision that still waits is not written: other consumers get the message, as if it had none.
            changes = [*self._writes.take_begun(), *self._writes.take_ready()]
            if not any(workitem.is_unique(write.doc) for write in changes):
                break
            self._commits.write(changes)
            changes = []
        if self._gate.is_used:
            self._gate.free(changes)
        if self._gate.is_used and self._gate.holds_slots():
            # Tasks with a concurrency key may still be running: their slots are freed when the lease expires.
            changes.append(self._heartbeat.next_write(set()))
        elif self.lease.rev:
            changes.append(self._heartbeat.last_write())
        self._commits.write(changes)
        self._commits.write(self._writes.take_ready())  # a failure that was too large is kept without its texts
        self._writes.log_failures_left()
        self._store.delete_without_queue(self._writes.take_released())
        if self._gate.is_used:
            wakeups: list[PendingWrite] = []
            self._gate.wake(wakeups)
            self._commits.write(wakeups)

    @property
    def _poll_at(self) -> float:
        interval = self._options.polling_interval
        return self._polled + (interval if self._client.replicas == 1 else min(interval, _CLUSTER_POLL_SECONDS))

    def _in_use(self) -> set[str]:
        """Return the ids of the messages that are held, or whose tasks may still run."""
        return self.unacked.held_ids() | self.unacked.may_run().keys()

    def _new_candidates(self, queue: str) -> QueueCandidates:
        return QueueCandidates(self._client.clock, queue, self._options.read_ahead)

    def _restore_queues(self, queues: set[str]) -> None:
        # Other processes may have deleted temporary queues of this consumer: after its lease expired, or by mistake.
        self._topology.restore(queues, check=self._restored_for != self.lease.id)
        self._restored_for = self.lease.id

    def _read_candidates(self, credit: dict[str, int]) -> None:
        """Add what the changes feed reported and what became due; start, stop or change the feed as needed."""
        pace = self._client.pace
        poll = time.monotonic() >= self._poll_at and (pace is None or pace.spare(RequestKind.QUERY) > 0)
        if poll:
            self._polled = time.monotonic()
        with_credit = {queue for queue in self._candidates if credit.get(queue, 0) > 0}
        # The feed does not report when a due date has come.
        reading = with_credit | self.notifier.attention.followed
        self._claims.reader.refill(
            [
                candidates
                for queue, candidates in self._candidates.items()
                if queue in reading and not candidates.is_stale and (poll or candidates.is_due)
            ]
        )
        self.notifier.feed_interval = self.unacked.flow.interval
        items, broadcasts = self.notifier.take(self.lease.id, self._candidates, with_credit)
        peers = self.notifier.peers
        for queue, candidates in self._candidates.items():
            candidates.set_consumers(self.lease.id, peers.consumers_of(queue, self.lease.id), peers.listeners_of(queue))
        attention = self.notifier.attention
        if attention.listens and (unserved := attention.followed - with_credit):
            # A listener without credit must know whether messages wait.
            self._claims.reader.refill(
                [self._candidates[each] for each in unserved if self._candidates[each].needs_page]
            )
        for doc in items:
            if key := parked_key(doc):
                self._gate.saw(key)
        self._offer([doc for doc in items if not is_parked(doc)])
        for queue, message in broadcasts:
            self.unacked.broadcast(queue, message)

    def _ring(self) -> None:
        """Wake the consumers that rest, if messages wait for which this one has no credit."""
        attention, credit = self.notifier.attention, self.unacked.credit()
        bell = attention.bell
        # Another channel may have credit: while this consumer reads the queues without credit on, it follows no feed.
        served = {queue for queue, free in credit.items() if free > 0} - attention.quiet
        goes_on = attention.lingers and not served
        for queue, candidates in self._candidates.items():
            if credit.get(queue, 0) > 0 or queue in self._topology.paused:
                bell.forget(queue)
            elif goes_on and not self.notifier.peers.is_shared(queue, self.lease.id):
                pass  # there is nobody to be woken, and the next acks bring credit: it goes on where it stopped to read
            elif ids := candidates.first(_BELL_ROWS):
                bell.waits(queue, attention.rank, ids)
        bell.keep(self._candidates)
        shared = [queue for queue in bell.due if self.notifier.peers.is_shared(queue, self.lease.id)]
        for queue in set(bell.due).difference(shared):
            bell.heard(queue)  # there is nobody to be woken
        if not shared:
            return
        for queue, ids in waiting.first_due(self._client, shared, self._client.clock.now(), _BELL_ROWS).items():
            if bell.check(queue, ids):
                self.notifier.broadcasts.ring(queue)
            self._candidates[queue].clear()
            if not bell.knows(queue):
                self.unacked.wakeup.set()  # the next cycle follows the queue again

    def _wanted_by_others(self, now: Snapshot) -> set[str]:
        """Return the queues with messages claimed ahead and no others, that another consumer or channel could serve."""
        candidates = {queue: self._candidates[queue] for queue in now.shelved if queue in self._candidates}
        return {
            queue
            for queue, each in candidates.items()
            if each.leaves_none or (now.credit.get(queue, 0) > 0 and not (each.is_stale or len(each)))
        }

    def _offer(self, items: list[Document]) -> None:
        for doc in items:
            if doc['queue'] in self._candidates:
                self._candidates[doc['queue']].offer(doc)
