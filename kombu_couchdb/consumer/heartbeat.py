"""The heartbeat of one consumer: when its document is written, and what the answer says of its lease."""

from __future__ import annotations

from ..couchdb.client import Client, Document
from ..couchdb.write_result import WriteResult
from ..errors import CouchDBError, NestedTooDeeply
from ..leases.lease import Lease
from ..log import get_logger
from .pending_writes import Change
from .unacked import Unacked

__all__ = ['Heartbeat']

logger = get_logger(__name__)


class Heartbeat:
    """Keeps the lease of what is in `holdings`; for the I/O thread alone."""

    def __init__(self, client: Client, lease: Lease, unacked: Unacked) -> None:
        self._client, self._lease, self._unacked = client, lease, unacked
        #: Whether the last heartbeat may have been stored, and not answered, or be gone, for the database may be another.
        self.in_doubt = False
        self._conflicted = False
        self._refused: CouchDBError | None = None

    def register(self, queues: set[str]) -> None:
        """Write the heartbeat document before anything is claimed: a claim without one counts as a dead consumer's.

        *Raises* `AccessDenied` also if the heartbeat before was refused.
        """
        self._register(queues)
        if not self._lease.written:
            self._register(queues)  # under a new id: the old one was swept

    def change(self, queues: set[str]) -> Change:
        """Return the next heartbeat, to be written with other changes."""
        return self._lease.heartbeat_document(self._client.clock.now(), queues, self._unacked.done), self._beaten

    def _register(self, queues: set[str]) -> None:
        in_doubt, self.in_doubt = self.in_doubt, False
        if in_doubt and self._lease.written:
            # To write it and see would do, too, but a cluster may take a minute to say that a write is in conflict.
            self._conflicted |= not self._lease.resume_from(self._leaves())
        if not self._conflicted and (in_doubt or not self._lease.written):
            doc, react = self.change(queues)
            react(self._client.bulk([doc])[0])
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        if self._conflicted:
            if not self._lease.prove_by(self._leaves()):
                self._begin_anew()
            self._conflicted = False

    def _leaves(self) -> list[Document]:
        try:
            return self._client.leaves(self._lease.id)
        except NestedTooDeeply:
            return []  # somebody else has written there: it is no more ours than one that was deleted

    def _beaten(self, result: WriteResult) -> None:
        if result.is_stored:
            proven = result.is_proven
            # While this node was cut off from the others, they may have swept this consumer without its knowing.
            self._conflicted |= proven and not self._lease.proven and not self._lease.valid
            self._lease.heartbeat_stored(result.rev, proven=proven and not self._conflicted)
            if not proven:
                self._client.switch_node()
        elif result.is_conflict:
            self._conflicted = True  # others have swept it, or the answer to the last heartbeat was lost
        elif result.is_refused:
            self._refused = result.exception(f'{self._client.address.url}: the heartbeat was not stored')
        if self._conflicted or self._refused:
            self._unacked.wakeup.set()

    def _begin_anew(self) -> None:
        """Others found this consumer silent for too long and gave away what it held: go on without it."""
        self._lease.begin_anew()
        logger.warning(
            'this consumer was silent for longer than the visibility timeout of %g s and lost its lease; '
            '%d messages it held are delivered again',
            self._lease.timeout,
            self._unacked.drop_all(),
        )
