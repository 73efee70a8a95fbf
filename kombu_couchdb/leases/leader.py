"""A leader: of all processes that offer to do a job, one does it.

The document `broker:leader:<name>` names the leader. The leader renews it every `RENEWAL_SECONDS`. The other processes
read it at the same interval. One of them becomes the leader if the document was released, or if its revision has not
changed for `LEASE_SECONDS` by that process's own monotonic clock. The leader counts its lease from the time before it
sent its last successful request. So two processes never lead at the same time, and clocks of different machines are
not compared, and no step of a clock ends a lead.

A lead that has ended is never taken up again: the same process may lead again, but in another `Term`. A process that is
paused while it leads does not notice that until it looks. So a leader saves work, but no promise may depend on it
alone: a leader's writes must be safe to repeat (see `Client.create_once`).
"""

from __future__ import annotations

import os
import socket
import time
import uuid

from ..couchdb.client import Client
from ..documents import coordination
from ..documents.ids import LEADER
from ..errors import CouchDBError
from ..log import get_logger

__all__ = ['LEASE_SECONDS', 'LOOK_SECONDS', 'RENEWAL_SECONDS', 'Leader', 'Term']

logger = get_logger(__name__)

#: The leader's lease, and the interval at which the leader renews it and the other processes read it.
LEASE_SECONDS, RENEWAL_SECONDS = 15.0, 5.0

#: The interval at which other processes should read it that want to take over at most 20 seconds after a leader was
#: killed, see `Leader.next_in`.
LOOK_SECONDS = 3.0


class Term:
    """A time in which one process leads without interruption. It is not thread-safe."""

    def __init__(self, rev: str, asked: float) -> None:
        self.renewed(rev, asked)

    @property
    def leads(self) -> bool:
        """Whether the process leads now; once false, it stays false."""
        return time.monotonic() < self.until

    def renewed(self, rev: str, asked: float) -> None:
        """Note the revision of the document, which a request at the monotonic time `asked` has written."""
        #: The monotonic time at which the lease ends.
        self.rev, self.until = rev, asked + LEASE_SECONDS

    def end(self) -> None:
        """End the term before its lease ends."""
        self.until = float('-inf')


class Leader:
    """One process's offer to do the job `name`. It is not thread-safe."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._id = client, LEADER + name
        self._holder = f'{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}'
        self._term: Term | None = None
        self._seen_rev, self._seen_since = '', 0.0  # of the document, and when this process saw it first

    @property
    def term(self) -> Term | None:
        """The current term of this process; None if it does not lead now."""
        return self._term if self._term is not None and self._term.leads else None

    @property
    def leads(self) -> bool:
        """Whether this process is the leader now."""
        return self.term is not None

    @property
    def next_in(self) -> float:
        """The seconds until the next call of `step` is useful, unless the current leader releases the lead."""
        now = time.monotonic()
        if (term := self.term) is not None:
            return max(0.0, term.until - LEASE_SECONDS + RENEWAL_SECONDS - now)
        return max(0.0, min(LOOK_SECONDS, self._seen_since + LEASE_SECONDS - now)) if self._seen_rev else 0.0

    def step(self) -> Term | None:
        """Become the leader, renew the lease, or check the current leader; return `term`.

        Call this every `RENEWAL_SECONDS` or more often; it makes requests only when they are due. *Raises* the errors
        of `Client`; a leader then stays leader until its lease ends.
        """
        asked, term = time.monotonic(), self.term
        if term is not None and asked < term.until - LEASE_SECONDS + RENEWAL_SECONDS:
            return term
        self._term = term
        rev = term.rev if term is not None else self._replaceable(asked)
        if rev is not None:
            self._write(rev, asked)
        return self.term

    def release(self) -> None:
        """Stop leading, so that another process can start without waiting for the end of the lease."""
        if self._term is not None:
            self._term.end()
            try:
                self._client.bulk([{**self._document(None), '_rev': self._term.rev}])
            except CouchDBError as exc:
                logger.debug('%s was not released and is free when its lease ends: %s', self._id, exc)
            self._term = None

    def _replaceable(self, asked: float) -> str | None:
        """Return the revision to replace if no process leads, '' if there is no document, None if a process leads."""
        found = self._client.get_or_none(self._id)
        if found is None:
            return ''
        rev = str(found['_rev'])
        if rev != self._seen_rev:
            self._seen_rev, self._seen_since = rev, time.monotonic()
        # This process itself may hold it: its lease ended, or the response to its last request was lost.
        released = not isinstance(found.get('holder'), str) or found['holder'] == self._holder
        silent = asked - self._seen_since >= LEASE_SECONDS
        return rev if released or silent else None

    def _write(self, rev: str, asked: float) -> None:
        [result] = self._client.bulk([{**self._document(self._holder), **({'_rev': rev} if rev else {})}])
        if result.is_refused:
            raise result.exception(self._client.address.url)
        if (term := self.term) is not None and result.is_proven:
            term.renewed(result.rev, asked)
            return
        if self._term is not None:
            self._term.end()
        self._term = Term(result.rev, asked) if result.is_proven else None

    def _document(self, holder: str | None) -> coordination.Leader:
        return {'_id': self._id, 'type': 'Leader', 'holder': holder, 'date': self._client.clock.now()}
