"""The lease of a consumer: a heartbeat document, one write for everything that the consumer holds.

A consumer that dies stops writing it. A consumer that was only paused finds its next heartbeat in conflict with the deletion by a
sweeper (see `sweeper`): so it learns that its lease has ended, and no two consumers ever both believe in one lease.
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
from ..documents.types import Consumer

__all__ = ['Lease']


class Lease:
    """The heartbeat document of one consumer: `{type, layout, host, pid, queues, beats, date, expires, rates}`.

    `rates` says for each queue how many messages a second were acknowledged since the heartbeat before.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.renew()

    def renew(self) -> None:
        """Start over under a new id: nothing is held, and nothing is written yet."""
        self.id = f'{CONSUMER}{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}'
        self.rev: str | None = None
        self._queues: list[str] = []
        self._beats = 0
        self._done: Mapping[str, int] = {}
        self._sent = self._valid_until = float('-inf')
        #: The queues that the stored document names: others see that they are used.
        self.announced: frozenset[str] = frozenset()
        #: Whether the last heartbeat is on enough nodes of a cluster to prove that nobody has swept this consumer.
        self.proven = True

    @property
    def written(self) -> bool:
        """Whether the document is in the database: no claim may come before it."""
        return self.rev is not None

    @property
    def valid(self) -> bool:
        """Whether nobody can have swept this consumer yet. The monotonic clock goes on while a process is stopped."""
        return time.monotonic() < self._valid_until

    @property
    def next_beat(self) -> float:
        """The monotonic time of the next heartbeat: a third of the timeout after the last."""
        return self._sent + self.timeout / 3

    def needs_beat(self, queues: Collection[str]) -> bool:
        """Tell whether the document should be written now."""
        return time.monotonic() >= self.next_beat or sorted(queues) != self._queues

    def beat(self, now: float, queues: Collection[str], done: Mapping[str, int]) -> Consumer:
        """Return the document for a heartbeat at the server's time `now`; `done` is how many were acknowledged so far."""
        if sorted(queues) != self._queues:
            # Others see who joins and who changes, and not every heartbeat: they wait for documents with beats 0.
            self._queues, self._beats = sorted(queues), 0
        self._tried, self._doing = time.monotonic(), dict(done)
        elapsed = self._tried - self._sent  # infinite for the first
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
                queue: round(max(0, count - self._done.get(queue, 0)) / max(elapsed, 0.001), 3)
                for queue, count in self._doing.items()
            },
        }
        if self.rev:
            doc['_rev'] = self.rev
        return doc

    def beaten(self, rev: str, *, proven: bool = True) -> None:
        """Note that the heartbeat made by `beat` was stored; if it is not `proven`, the lease lasts no longer for that."""
        self.rev, self.proven, self.announced = rev, proven, frozenset(self._queues)
        self._beats += 1
        self._sent, self._done = self._tried, self._doing
        if proven:
            self._valid_until = self._sent + self.timeout

    def catch_up(self, leaves: Collection[Document]) -> bool:
        """Go on from the last heartbeat that was stored, by all `leaves`; tell whether it is there, and nobody has swept it."""
        if not leaves or any(leaf.get('_deleted') for leaf in leaves):
            return False
        # Nobody else writes it: these are our own, though an answer was lost, or a cluster could not prove one.
        self.rev = str(max(leaves, key=lambda leaf: _number(leaf.get('date')))['_rev'])
        return True

    def confirm(self, leaves: Collection[Document]) -> bool:
        """Tell whether, by all `leaves` of the document, nobody has swept this consumer: the last heartbeat is proven then."""
        if not self.catch_up(leaves):
            return False
        self.proven, self._valid_until = True, self._sent + self.timeout
        return True


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
