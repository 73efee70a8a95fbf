"""A leader: of all processes that offer to do a job, one does it.

The document `broker:leader:<name>` names the leader. The leader renews it every `RENEWAL_SECONDS`. The other processes
read it at the same interval. One of them becomes the leader if the document was released, or if its revision has not
changed for `LEASE_SECONDS` by that process's own monotonic clock. The leader counts its lease from the time before it
sent its last successful request. So two processes never lead at the same time, and clocks of different machines are
not compared. (A process does not wait if the document is 5 seconds older than a lease by the server's time. All
processes know that time to about two seconds, see `ServerClock`.)

A process that is paused while it leads does not notice that until its next step. So a leader saves work, but no promise
may depend on it alone: a leader's writes must be safe to repeat (see `Bulk.create_once`).
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from typing import Any

from ..couchdb.client import Client
from ..documents import coordination
from ..documents.ids import LEADER
from ..errors import CouchDBError
from ..log import get_logger

__all__ = ['LEASE_SECONDS', 'LOOK_SECONDS', 'RENEWAL_SECONDS', 'Leader']

logger = get_logger(__name__)

#: The leader's lease, and the interval at which the leader renews it and the other processes read it.
LEASE_SECONDS, RENEWAL_SECONDS = 15.0, 5.0

#: By how much the server's time may differ between two processes.
_CLOCK_SECONDS = 5.0

#: The interval at which other processes should read it that want to take over at most 20 seconds after a leader was
#: killed, see `Leader.next_in`.
LOOK_SECONDS = 3.0


class Leader:
    """One process's offer to do the job `name`. It is not thread-safe."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._id = client, LEADER + name
        self._holder = f'{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}'
        self._own_rev = ''  # of the document that this process wrote, while it leads
        self._until = float('-inf')
        self._seen_rev, self._seen_since = '', 0.0  # of another process's document, and its first look at it

    @property
    def leads(self) -> bool:
        """Whether this process is the leader now."""
        return time.monotonic() < self._until

    @property
    def next_in(self) -> float:
        """The seconds until the next call of `step` is useful, unless the current leader releases the lead."""
        now = time.monotonic()
        if now < self._until:
            return max(0.0, self._until - LEASE_SECONDS + RENEWAL_SECONDS - now)
        return max(0.0, min(LOOK_SECONDS, self._seen_since + LEASE_SECONDS - now)) if self._seen_rev else 0.0

    def step(self) -> bool:
        """Become the leader, renew the lease, or check the current leader; return `leads`.

        Call this every `RENEWAL_SECONDS` or more often; it makes requests only when they are due. *Raises* the errors
        of `Client`; a leader then stays leader until its lease ends.
        """
        asked = time.monotonic()
        if asked < self._until - LEASE_SECONDS + RENEWAL_SECONDS:
            return True
        if self._own_rev and not self.leads:
            self._own_rev = ''  # renewed too late: another process may be the leader
        rev = self._own_rev or self._replaceable(asked)
        if rev is not None:
            self._write(rev, self._holder, asked)
        return self.leads

    def release(self) -> None:
        """Stop leading, so that another process can start without waiting for the end of the lease."""
        self._until = float('-inf')
        if self._own_rev:
            try:
                self._client.bulk([{**self._document(None), '_rev': self._own_rev}])
            except CouchDBError as exc:
                logger.debug('%s was not released and is free when its lease ends: %s', self._id, exc)
            self._own_rev = ''

    def _replaceable(self, asked: float) -> str | None:
        """Return the revision to replace if no process leads, '' if there is no document, None if a process leads."""
        found = self._client.get_or_none(self._id)
        if found is None:
            return ''
        rev = str(found['_rev'])
        if rev != self._seen_rev:
            self._seen_rev, self._seen_since = rev, time.monotonic()
        released = not isinstance(found.get('holder'), str)
        silent = asked - self._seen_since >= LEASE_SECONDS or self._is_outdated(found.get('date'))
        return rev if released or silent else None

    def _is_outdated(self, date: Any) -> bool:
        """Tell whether the document is so old by the server's time that its writer's lease must have ended."""
        return isinstance(date, (int, float)) and self._client.clock.now() - date > LEASE_SECONDS + _CLOCK_SECONDS

    def _write(self, rev: str, holder: str, asked: float) -> None:
        [result] = self._client.bulk([{**self._document(holder), **({'_rev': rev} if rev else {})}])
        if result.is_proven:
            self._own_rev, self._until = result.rev, asked + LEASE_SECONDS
            return
        if result.is_refused:
            raise result.exception(self._client.address.url)
        self._own_rev, self._until = '', float('-inf')

    def _document(self, holder: str | None) -> coordination.Leader:
        return {'_id': self._id, 'type': 'Leader', 'holder': holder, 'date': self._client.clock.now()}
