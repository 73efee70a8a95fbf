"""A leader: of all processes that offer to do a duty, one does it.

The document `broker:leader:<name>` names the leader. The leader renews it when a third of its lease has passed. The
other processes read it at the same interval. One of them becomes the leader if the document was released, or if its
revision has not changed for a whole lease by that process's own monotonic clock. The leader counts its lease from the
time before it sent its last successful request. So two processes never lead at the same time, and clocks of different
machines are not compared. The clock goes on while the machine is suspended (`uptime`). Where it does not, as in some
virtual machines that are paused, the next response shows that the server's time has run ahead; that ends the lead, too.

A lead that has ended is never taken up again: the same process may lead again, but in another *term*. A process that is
paused while it leads does not notice that until it looks. So a leader saves work, but no promise may depend on it
alone: a leader's writes must be safe to repeat (see `Client.create_once`).

A `Duty` says what the leader does, and `Led` is the loop around it: connect, lead, do the duty, wait, and go on after
any error.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from math import inf
from typing import Any, ClassVar

from ..couchdb.call import urgent
from ..couchdb.client import Client
from ..couchdb.clock import uptime
from ..documents import shared_documents
from ..documents.ids import LEADER
from ..errors import CouchDBError, DatabaseMissing, NotFound
from ..log import get_logger
from ..options import heartbeat_interval
from ..outage import Outage, cause_of
from .lease import worker_name

logger = get_logger(__name__)

#: The lease of most leaders, in seconds.
LEASE_SECONDS = 15.0

#: The interval at which other processes should read it that want to take over at most 20 seconds after a leader was
#: killed, as a part of the lease, see `LeaderLease.next_in`.
_LOOK_SHARE = 1 / 5

#: The longest time for which `Led.stop` waits for what is being done, in seconds.
_STOP_SECONDS = 5.0


class LeadLost(Exception):
    """The term of this process has ended while it did its duty."""


class LeaderLease:
    """One process's offer to do the duty `name`. It is not thread-safe."""

    def __init__(self, client: Client, name: str, node: str | None = None, lease: float | None = None) -> None:
        """`node` is the node name of the process, by default that of the Celery worker that it is, if it is one.

        `lease` is in seconds, the same for all processes; by default `LEASE_SECONDS`.
        """
        self._client, self._id, self._node = client, LEADER + name, node
        self._lease = lease or LEASE_SECONDS
        #: The interval at which the leader renews its lease, in seconds.
        self.renewal = heartbeat_interval(self._lease)
        self._holder = f'{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}'
        #: How often this process began to lead.
        self._terms = 0
        #: The `uptime` until which it leads, and what the server's time had run ahead then, see `ServerClock.gained`.
        self._until, self._gained = -inf, 0.0
        self._rev = ''  # of the document, as this process wrote it while it led
        self._seen_rev, self._seen_since = '', 0.0  # of the document, and when this process saw it first

    @property
    def term(self) -> int | None:
        """The number of the time in which this process leads now, without interruption; None if it does not lead."""
        return self._terms if self.leads else None

    @property
    def leads(self) -> bool:
        """Whether this process is the leader now."""
        return self._left > 0

    @property
    def _left(self) -> float:
        """The seconds for which this process leads; negative infinity if it does not."""
        return self._until - uptime() + self._gained - self._client.clock.gained if self._until > -inf else -inf

    @property
    def next_in(self) -> float:
        """The seconds until the next call of `step` is useful, unless the current leader releases the lead."""
        if (left := self._left) > 0:
            return max(0.0, left - self._lease + self.renewal)
        silent_in = self._seen_since + self._lease - uptime()
        return max(0.0, min(self._lease * _LOOK_SHARE, silent_in)) if self._seen_rev else 0.0

    def step(self) -> int | None:
        """Become the leader, renew the lease, or check the current leader; return `term`.

        Call this every `renewal` seconds or more often; it makes requests only when they are due. *Raises* the errors
        of `Client`; a leader then stays leader until its lease ends.
        """
        asked = uptime()
        if self._left > self._lease - self.renewal:
            return self.term
        with urgent():
            rev = self._rev if self.leads else self._replaceable(asked)
            if rev is not None:
                self._write(rev, asked)
        return self.term

    def release(self) -> None:
        """Stop leading, so that another process can start without waiting for the end of the lease."""
        if self._rev:
            rev, self._rev, self._until = self._rev, '', -inf
            try:
                self._client.bulk([{**self._document(None), '_rev': rev}])
            except CouchDBError as exc:
                logger.debug('%s was not released and is free when its lease ends: %s', self._id, exc)

    def _replaceable(self, asked: float) -> str | None:
        """Return the revision to replace if no process leads, '' if there is no document, None if a process leads."""
        found = self._client.get_or_none(self._id)
        if found is None:
            return ''
        rev = str(found['_rev'])
        if rev != self._seen_rev:
            self._seen_rev, self._seen_since = rev, uptime()
        # This process itself may hold it: its lease ended, or the response to its last request was lost.
        released = not isinstance(found.get('holder'), str) or found['holder'] == self._holder
        silent = asked - self._seen_since >= self._lease
        return rev if released or silent else None

    def _write(self, rev: str, asked: float) -> None:
        gained = self._client.clock.gained
        [result] = self._client.bulk([{**self._document(self._holder), **({'_rev': rev} if rev else {})}])
        if result.is_refused:
            raise result.exception(self._client.address.url)
        if not (self.leads and result.is_proven):
            self._terms += 1  # a lead that has ended is never taken up again
        self._rev, self._until = (result.rev, asked + self._lease) if result.is_proven else ('', -inf)
        self._gained = gained

    def _document(self, holder: str | None) -> shared_documents.Leader:
        doc: shared_documents.Leader = {
            '_id': self._id,
            'type': 'Leader',
            'holder': holder,
            'date': self._client.clock.now(),
            'lease': self._lease,
        }
        if holder and (node := self._node or worker_name()):
            doc['node'] = node
        return doc


class Duty:
    """What the leader does. Use it in one thread. *Every* method may raise any error; the next step repeats the work.

    `begin`, `work` and `rest` make no difference to others than through the database, and are safe to repeat.
    """

    #: What the log calls this process.
    process: ClassVar[str]

    def __init__(self, leader: LeaderLease) -> None:
        self._leader = leader
        self._term: int | None = None  # the one in which the duty is done
        self._stale = self._stopping = False

    def begin(self) -> None:
        """Begin a term: another process may have done the duty before."""

    def work(self, *, stale: bool) -> float:
        """Do what is due; return the seconds until the next call is useful, unless something wakes the process.

        If `stale` is true, all must be read again: the term begins, or the last call has raised an error.
        """
        raise NotImplementedError

    def rest(self) -> float:
        """Be ready to lead, and do nothing else; return the seconds until the next look at the leader."""
        return self._leader.renewal

    def step(self) -> float:
        """Lead, or look who leads, and do what is due; return the seconds until the next step is useful."""
        term = self._leader.step()
        if term != self._term:
            if self._term is not None:
                self._log_loss()
            self._term = None  # until the term has begun
            if term is not None:
                self._stale = True
                self.begin()
            self._term = term
        if term is None:
            return self.rest()
        try:
            stale, self._stale = self._stale, True  # until all is done
            seconds = self.work(stale=stale)
            self._stale = False
        except LeadLost:
            if not self._stopping:
                self._log_loss()
            self._term = None
            return 0.0
        return max(0.0, min(seconds, self._leader.next_in))

    def renew(self) -> None:
        """Renew the lease if it is time, during long work; *raises* `LeadLost`, also if the process is to stop."""
        if self._stopping or self._leader.step() != self._term:
            raise LeadLost

    def check_term(self) -> None:
        """*Raise* `LeadLost` if the lease has ended. No request."""
        if self._term is None or self._leader.term != self._term:
            raise LeadLost

    def stop(self) -> None:
        """Let the next `renew` end the step. Any thread may call this."""
        self._stopping = True

    def close(self) -> None:
        """Release the lead to another process."""
        self._leader.release()

    def _log_loss(self) -> None:
        logger.warning('%s does not lead any more: it could not renew its lease in time', self.process)


class Led:
    """The loop of a process that offers to do a duty. After any error it tries again.

    It is run by a thread of its own (`start`), or by somebody else's loop that calls `turn`.
    """

    def __init__(
        self,
        connection: Any,
        duty: Callable[[Any, Callable[[], None]], Duty],
        failed: str,
        again: str,
        setup: str = 'setup',
    ) -> None:
        """`duty(connection, wake)` makes the duty; any thread may call `wake()` when there is something to do.

        `connection` is a connection of kombu, which is released at the end. Log lines about errors say `failed`, *just
        now*, and why, and to run the command `setup` if a database is missing; the line about their end says `again`.
        """
        self._connection, self._make_duty, self._setup = connection, duty, setup
        self._outage = Outage(logger, f'{failed} just now: %s', again)
        #: None until CouchDB was reached first. After an outage the connection reaches it again by itself.
        self.duty: Duty | None = None
        self._wake, self._due, self._stopped = threading.Event(), -inf, False
        self._thread: threading.Thread | None = None

    def turn(self, seconds: float = inf) -> None:
        """Do a step if one is due, and wait until the next one is due, or something wakes this; at most `seconds`."""
        if self._wake.is_set() or time.monotonic() >= self._due:
            self._wake.clear()
            pause = self._step()
            self._due = time.monotonic() + pause
        if not self._stopped:
            self._wake.wait(max(0.0, min(seconds, self._due - time.monotonic())))

    def start(self, name: str) -> None:
        """Run the loop in a thread of this name."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the thread end soon; any thread may call this."""
        self._stopped = True
        if (duty := self.duty) is not None:
            duty.stop()
        self._wake.set()

    def stop(self) -> None:
        """Stop the thread, and wait up to 5 seconds for what it is doing."""
        self.end()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def close(self) -> None:
        """Release the lead to another process, and close the connections."""
        if self.duty is not None:
            self.duty.close()
        self._connection.release()

    def _run(self) -> None:
        while not self._stopped:
            self.turn()
        self.close()

    def _step(self) -> float:
        try:
            if self.duty is None:
                self.duty = self._make_duty(self._connection, self._wake.set)
            seconds = self.duty.step()
        except Exception as exc:
            is_missing = isinstance(cause_of(exc), (DatabaseMissing, NotFound))
            hint = f'; run "celery -A your_app couchdb {self._setup}"' if is_missing else ''
            return self._outage.failed(exc, f'{exc}{hint}')
        self._outage.recovered()
        return seconds
