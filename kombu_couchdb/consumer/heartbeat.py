"""The heartbeat of one consumer: its writes, and what the result of each says about the lease.

Its interval is a part of `visibility_timeout`, `options.HEARTBEATS_PER_LEASE`; `Lease.next_heartbeat` has the rule.
"""

from __future__ import annotations

from ..couchdb.client import Client
from ..couchdb.write_result import PendingWrite, WriteResult
from ..errors import CouchDBError
from ..leases.lease import Lease
from ..log import get_logger
from .report import TaskReport
from .unacked import Unacked
from .worker_hooks import Suspects

logger = get_logger(__name__)


class Heartbeat(PendingWrite):
    """Renews the lease of the unacknowledged messages; for the I/O thread alone. `doc` is the heartbeat made last."""

    def __init__(self, client: Client, lease: Lease, unacked: Unacked, suspects: Suspects) -> None:
        super().__init__({})
        self._client, self._lease, self._unacked, self._suspects = client, lease, unacked, suspects
        #: What the heartbeats of a Celery worker tell of its tasks.
        self.report = TaskReport(client.clock)
        #: Whether the last heartbeat may have been stored without a response, or may be missing in a new database.
        self.uncertain = False
        self._conflicted = False
        self._refused: CouchDBError | None = None

    def register(self, queues: set[str]) -> None:
        """Write the heartbeat document before the first claim: sweeps release claims without a heartbeat.

        *Raises* the error of the last heartbeat, for example `AccessDenied`, if CouchDB refused it.
        """
        self._register(queues)
        if not self._lease.written:
            self._register(queues)  # the lease was lost: write the document of a new one

    def next_write(self, queues: set[str]) -> PendingWrite:
        """Return the next heartbeat, which is written together with other documents."""
        doc = self._lease.heartbeat_document(self._client.clock.now(), queues, self._unacked.acked)
        self.doc = {**doc, **self.report.members(queues)}
        return self

    def needs_write(self, queues: set[str]) -> bool:
        """Tell whether a heartbeat is due, perhaps early because of the tasks that run."""
        return self._lease.needs_heartbeat(queues) or self.report.is_due(queues, self._lease.sent)

    @property
    def due_at(self) -> float:
        """The monotonic time at which to ask `needs_write` again."""
        return min(self._lease.next_heartbeat, self.report.due_at(self._lease.sent))

    def last_write(self) -> PendingWrite:
        """Return the deletion of the heartbeat, with the last members that optional rooms count by."""
        doc = {'_id': self._lease.id, '_rev': self._lease.rev, '_deleted': True}
        return PendingWrite({**doc, **self.report.last_members()})

    def _register(self, queues: set[str]) -> None:
        uncertain, self.uncertain = self.uncertain, False
        if uncertain and self._lease.written:
            # Was the last heartbeat stored? The next one would show it by a conflict, but a cluster may need a minute
            # to report that; reading is faster.
            self._conflicted |= not self._lease.resume_from(self._client.leaves(self._lease.id))
        if not self._conflicted and (uncertain or not self._lease.written):
            write = self.next_write(queues)
            write.settle(self._client.bulk([write.doc])[0])
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        if self._conflicted:
            leaves = self._client.leaves(self._lease.id)
            if not self._lease.prove_by(leaves):
                self._begin_anew(is_new_database=not leaves)
            self._conflicted = False

    def stored(self, result: WriteResult) -> None:
        """Renew the lease, unless the last heartbeats were unproven and it has ended since the last proven one.

        A sweeper at the other nodes may have deleted the document then: its leaf revisions are read before.
        """
        if not self._lease.proven and not self._lease.valid:
            self.conflict(result)
        self._lease.heartbeat_stored(result.rev, proven=not self._conflicted)
        self.report.stored()

    def unproven(self, result: WriteResult) -> None:
        """Do not renew the lease, and try another node."""
        self._lease.heartbeat_stored(result.rev, proven=False)
        self.report.stored()
        self._client.switch_node()

    def conflict(self, result: WriteResult) -> None:
        """Read the leaves: a sweep deleted the document, or the response to the last heartbeat was lost."""
        self._conflicted = True
        self._unacked.wakeup.set()

    def refused(self, result: WriteResult) -> None:
        """Let the next cycle raise the error."""
        self._refused = result.exception(f'{self._client.address.url}: the heartbeat was not stored')
        self._unacked.wakeup.set()

    def _begin_anew(self, *, is_new_database: bool) -> None:
        """Start a new lease without the messages of the old one: another process has released them."""
        self._lease.begin_anew()
        lost = self._unacked.drop_all()
        if is_new_database:  # a deleted document leaves a revision, and this one has none
            logger.warning(
                'the database was deleted and created again: %d messages that this consumer held are gone', len(lost)
            )
            return
        self._suspects.add(lost)
        logger.warning(
            'this consumer was silent for longer than the visibility timeout of %g s and lost its lease; '
            '%d messages it held are delivered again',
            self._lease.timeout,
            len(lost),
        )
