"""The lease of a consumer: a heartbeat document, so that one write renews the claims of all its messages.

A killed consumer writes no more heartbeats, and a sweeper deletes its document (see `sweeper`). If a consumer was only
paused, its next heartbeat is in conflict with that deletion. So it knows that its lease has ended, and two consumers
never both have a valid lease for one message.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from .. import design
from ..couchdb.client import Document
from ..documents.ids import CONSUMER
from ..documents.shared_documents import Consumer
from ..options import HEARTBEATS_PER_LEASE

#: A consumer that holds nothing may be silent for this many leases: nobody waits for its messages.
IDLE_LEASES = 3.0

#: The interval of its heartbeats, as a part of that time. With a longer one, others would end its lease after an
#: outage: each notices only with its next request that the server does not respond, after 30 seconds if it rests.
_IDLE_SHARE = 2 / 3


class _Process:
    #: The name of the Celery worker that this process is.
    worker: str | None = None


def set_worker(name: str | None) -> None:
    """Name the Celery worker that this process is: heartbeats and completed messages say it."""
    _Process.worker = name


def worker_name() -> str | None:
    """Return the name of the Celery worker that this process is; None if it is none, or the name is not known."""
    return _Process.worker


class Lease:
    """The heartbeat document of one consumer: `{type, layout, host, pid, queues, …, expires, rates}`.

    `rates` has, for each queue, the messages acknowledged per second since the previous heartbeat.
    """

    def __init__(self, timeout: float) -> None:
        """Create a lease that lasts `timeout` seconds after each heartbeat. Nothing is written yet."""
        self.timeout = timeout
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin a new lease under a new id. It covers no messages, and nothing is written yet."""
        self.id = f'{CONSUMER}{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}'
        self.rev: str | None = None
        self._queues: list[str] = []
        self._beats = 0
        # As of the last heartbeat, and as of the heartbeat that was made and not stored yet.
        self._acked: Mapping[str, int] = {}
        self._acked_then: Mapping[str, int] = {}
        self._sent = self._valid_until = self._made = float('-inf')
        #: The queues that the stored document names: other processes see that they are used.
        self.announced: frozenset[str] = frozenset()
        #: Whether the consumer holds nothing that would be lost with the lease.
        self.idle = False
        #: Whether a quorum of nodes stored the last heartbeat: this proves that no sweeper had deleted the document.
        self.proven = True

    @property
    def written(self) -> bool:
        """Whether the document was stored. Claims must not be written before that."""
        return self.rev is not None

    @property
    def valid(self) -> bool:
        """Whether the lease cannot have ended yet. The monotonic clock also counts while a process is paused."""
        return time.monotonic() < self._valid_until

    @property
    def next_heartbeat(self) -> float:
        """The monotonic time of the next heartbeat: a third of the timeout after the last one.

        An idle consumer waits for longer, and writes the heartbeat with its next claim if the third has passed.
        """
        return self._sent + self.timeout * (IDLE_LEASES * _IDLE_SHARE if self.idle else 1 / HEARTBEATS_PER_LEASE)

    def needs_heartbeat(self, queues: Collection[str]) -> bool:
        """Tell whether a heartbeat is due: it is time for it, or the consumed queues have changed."""
        return time.monotonic() >= self.next_heartbeat or sorted(queues) != self._queues

    def heartbeat_document(self, now: float, queues: Collection[str], acked: Mapping[str, int]) -> Consumer:
        """Return the document to write as the next heartbeat.

        `now` is the server's time, and `acked` has the number of acknowledged messages by queue since the process
        started. After the write, call `heartbeat_stored`.
        """
        if sorted(queues) != self._queues:
            # Other consumers follow only documents with `beats` 0: new consumers, and those whose queues changed.
            self._queues, self._beats = sorted(queues), 0
        self._made, self._acked_then = time.monotonic(), dict(acked)
        elapsed = self._made - self._sent  # infinite for the first heartbeat
        doc: Consumer = {
            '_id': self.id,
            'type': 'Consumer',
            'layout': design.NAME,
            'host': socket.gethostname(),
            'pid': os.getpid(),
            'queues': self._queues,
            'beats': self._beats,
            'date': now,
            'expires': now + self.timeout,
            'rates': {
                queue: round(max(0, count - self._acked.get(queue, 0)) / max(elapsed, 0.001), 3)
                for queue, count in self._acked_then.items()
            },
        }
        if name := worker_name():
            doc['worker'] = name
        if self.rev:
            doc['_rev'] = self.rev
        return doc

    def heartbeat_stored(self, rev: str, *, proven: bool = True) -> None:
        """Note that the last `heartbeat_document` was stored as `rev`. Only a `proven` one extends the lease."""
        self.rev, self.proven, self.announced = rev, proven, frozenset(self._queues)
        self._beats += 1
        self._sent, self._acked = self._made, self._acked_then
        if proven:
            self._valid_until = self._sent + self.timeout

    def resume_from(self, leaves: Collection[Document]) -> bool:
        """Continue from the last stored heartbeat; return False if there is none or a sweeper deleted the document.

        `leaves` are all leaf revisions of the document.
        """
        if not leaves or any(leaf.get('_deleted') for leaf in leaves):
            return False
        # Only this consumer writes the document. A leaf with an unknown revision is a heartbeat of its own whose
        # response was lost or which was unproven.
        self.rev = str(max(leaves, key=lambda leaf: _number(leaf.get('date')))['_rev'])
        return True

    def prove_by(self, leaves: Collection[Document]) -> bool:
        """Do as `resume_from`; if it returns True, count the last heartbeat as proven."""
        if not self.resume_from(leaves):
            return False
        self.proven, self._valid_until = True, self._sent + self.timeout
        return True


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
