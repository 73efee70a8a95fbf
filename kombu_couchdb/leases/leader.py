"""A leader: of all processes that offer to do a job, one does it, for as long as it renews a document of the broker's database.

The document `broker:leader:<name>` names its holder. The leader renews it every `RENEWED` seconds. Every other process looks at
it as often, and takes it when it was released, or when it has stayed the same for `LEASE` seconds by that process's own monotonic
clock. The leader counts its lease from before its last successful request was sent, and so both never lead at the same time. No
clock is compared with another one.

A process that is paused while it leads does not know that for one step more. So a leader saves work, and no promise may depend on
it alone: what a leader writes must be safe to write twice (see `Bulk.create_once`).
"""

from __future__ import annotations

import os
import socket
import time
import uuid

from ..couchdb.client import Client
from ..documents import types
from ..documents.ids import LEADER
from ..errors import CouchDBError
from ..log import get_logger

__all__ = ['LEASE', 'RENEWED', 'Leader']

logger = get_logger(__name__)

#: How long the leader may stay silent, and how often it writes, in seconds.
LEASE, RENEWED = 15.0, 5.0


class Leader:
    """One process's offer to do the job `name`; for one thread. Times are seconds."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._id = client, LEADER + name
        self._holder = f'{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}'
        self._own = ''  # the revision that this process has written, while it leads
        self._until = float('-inf')
        self._seen, self._since = '', 0.0  # another's revision, and when it was first seen

    @property
    def leads(self) -> bool:
        """Whether this process is the leader now."""
        return time.monotonic() < self._until

    def step(self) -> bool:
        """Take the lead, renew it, or look who has it; call this every `RENEWED` seconds, or more often. Return `leads`.

        *Raises* the errors of `Client`: until the next step succeeds, a leader leads as long as its lease lasts.
        """
        asked = time.monotonic()
        if asked < self._until - LEASE + RENEWED:
            return True
        if self._own and not self.leads:
            self._own = ''  # too late: another process may lead by now
        rev = self._own or self._free(asked)
        if rev is not None:
            self._write(rev, self._holder, asked)
        return self.leads

    def release(self) -> None:
        """Stop leading, so that another process need not wait for the end of the lease."""
        self._until = float('-inf')
        if self._own:
            try:
                self._client.bulk([{**self._document(None), '_rev': self._own}])
            except CouchDBError as exc:
                logger.debug('%s is left to the end of its lease: %s', self._id, exc)
            self._own = ''

    def _free(self, asked: float) -> str | None:
        """Return the revision to write over if nobody leads any more, '' if there is no document; None if somebody leads."""
        found = self._client.get_or_none(self._id)
        if found is None:
            return ''
        rev = str(found['_rev'])
        if rev != self._seen:
            self._seen, self._since = rev, time.monotonic()
        released = not isinstance(found.get('holder'), str)
        return rev if released or asked - self._since >= LEASE else None

    def _write(self, rev: str, holder: str, asked: float) -> None:
        [result] = self._client.bulk([{**self._document(holder), **({'_rev': rev} if rev else {})}])
        if result.is_proven:
            self._own, self._until = result.rev, asked + LEASE
            return
        if result.is_refused:
            raise result.exception(self._client.address.url)
        self._own, self._until = '', float('-inf')

    def _document(self, holder: str | None) -> types.Leader:
        return {'_id': self._id, 'type': 'Leader', 'holder': holder, 'date': self._client.clock.now()}
