"""The lease of a consumer: a heartbeat document, so that one write renews the claims of all its messages.

A killed consumer writes no more heartbeats, and a sweeper deletes its document (see `sweeper`). If a consumer was only
paused, its next heartbeat is in conflict with that deletion. So it knows that its lease has ended, and two consumers
never both have a valid lease for one message.

The silence of other consumers is measured by this process's own monotonic clock. Each heartbeat changes `expires` in
the document. If a process reads the same value again, it knows that the consumer wrote no heartbeat in between,
whatever the clocks say. The server's time is only used to date a heartbeat that was written between two looks.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Container, Mapping
from math import inf
from typing import Any, NamedTuple

from .. import design
from ..couchdb.client import Document
from ..couchdb.clock import ServerClock, uptime
from ..documents.ids import CONSUMER
from ..documents.shared_documents import Consumer
from ..options import heartbeat_interval
from ..schema import Schema
from ..values import MAX_DATE, MAX_NUMBER

#: What `queues_of` reads of a heartbeat.
_QUEUES = Schema.of(Consumer, 'queues')

#: A consumer that holds nothing may be silent for this many leases: nobody waits for its messages.
IDLE_LEASES = 3.0

#: The interval of its heartbeats, as a part of that time. With a longer one, others would end its lease after an
#: outage: each notices only with its next request that the server does not respond, after 30 seconds if it rests.
_IDLE_SHARE = 2 / 3

#: A lease has expired if the consumer was silent for this much longer than the lease. It is also the error that the
#: server's time may have.
GRACE_SECONDS = 2.0

#: The largest part of a lease that may count as passed by the server's time alone, as a fraction. The sweeper must
#: measure the rest with its monotonic clock. The rest is 1.2 times the interval of heartbeats, so a living consumer
#: writes a heartbeat in it, and does not lose its lease because a clock is wrong.
CLOCK_SHARE = 1 - 1.2 * heartbeat_interval(1.0)


class _Process:
    #: The name of the Celery worker that this process is.
    worker: str | None = None


def set_worker(name: str | None) -> None:
    """Name the Celery worker that this process is: heartbeats and completed messages say it."""
    _Process.worker = name


def worker_name() -> str | None:
    """Return the name of the Celery worker that this process is; None if it is none, or the name is not known."""
    return _Process.worker


class Announced:
    """The queues that the stored heartbeat names: others see that they are used. Any thread can wait for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: frozenset[str] = frozenset()
        self._closed = False

    def set(self, queues: frozenset[str]) -> None:
        """Set the queues that the stored heartbeat names now."""
        if queues != self._queues:
            with self._changed:
                self._queues = queues
                self._changed.notify_all()

    def close(self) -> None:
        """End all waits: no further heartbeat is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, queue: str, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the heartbeat names a queue; tell whether it does."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or queue in self._queues, timeout)
            return queue in self._queues


class Lease:
    """The heartbeat document of one consumer: `{type, layout, host, pid, queues, …, expires, rates}`.

    `rates` has, for each queue, the messages acknowledged per second since the previous heartbeat.
    """

    def __init__(self, timeout: float) -> None:
        """Create a lease that lasts `timeout` seconds after each heartbeat. Nothing is written yet."""
        self.timeout, self.announced = timeout, Announced()
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
        #: The monotonic time at which the last stored heartbeat was made.
        self.sent = float('-inf')
        self._made = float('-inf')
        #: The `uptime` until which the lease lasts by the last heartbeat that was made, stored, and proven.
        self._made_until = self._stored_until = self._valid_until = float('-inf')
        self.announced.set(frozenset())
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
        """Whether the lease cannot have ended yet. `uptime` counts, too, while a process or its machine is paused."""
        return uptime() < self._valid_until

    @property
    def next_heartbeat(self) -> float:
        """The monotonic time of the next heartbeat: a third of the timeout after the last one.

        An idle consumer waits for longer, and writes the heartbeat with its next claim if the third has passed.
        """
        idle, busy = IDLE_LEASES * _IDLE_SHARE * self.timeout, heartbeat_interval(self.timeout)
        return self.sent + (idle if self.idle else busy)

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
        self._made, self._made_until, self._acked_then = time.monotonic(), uptime() + self.timeout, dict(acked)
        elapsed = self._made - self.sent  # infinite for the first heartbeat
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
        self.rev, self.proven = rev, proven
        self.announced.set(frozenset(self._queues))
        self._beats += 1
        self.sent, self._stored_until, self._acked = self._made, self._made_until, self._acked_then
        if proven:
            self._valid_until = self._stored_until

    def resume_from(self, leaves: Collection[Document]) -> bool:
        """Continue from the last stored heartbeat; return False if there is none or a sweeper deleted the document.

        `leaves` are all leaf revisions of the document.
        """
        if not leaves or any(leaf.get('_deleted') for leaf in leaves):
            return False
        # Only this consumer writes the document. A leaf with an unknown revision is a heartbeat of its own whose
        # response was lost or which was unproven.
        self.rev = str(max(leaves, key=lambda leaf: _number(leaf.get('date')) or 0.0)['_rev'])
        return True

    def prove_by(self, leaves: Collection[Document]) -> bool:
        """Do as `resume_from`; if it returns True, count the last heartbeat as proven."""
        if not self.resume_from(leaves):
            return False
        self.proven, self._valid_until = True, self._stored_until
        return True


class Unchanged:
    """Values that are proven to be the same for `seconds`. The server's clock, which may jump, proves nothing."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: By name: the value, and the monotonic time since which it is known.
        self._seen: dict[str, tuple[object, float]] = {}

    def observe(self, values: Mapping[str, object], asked: float) -> list[str]:
        """Take in all values of now, by name; return the names of those that were the same for long enough.

        The request that read them was sent at the monotonic time `asked`. One look never suffices.
        """
        before, now = self._seen, time.monotonic()
        self._seen = {
            name: before[name] if name in before and before[name][0] == value else (value, now)
            for name, value in values.items()
        }
        return [name for name, (_, since) in self._seen.items() if asked - since >= self._seconds]

    def left(self) -> list[float]:
        """Return the seconds until the next look can prove something, for each value that it did not prove."""
        now = time.monotonic()
        return [seconds for _, since in self._seen.values() if (seconds := since + self._seconds - now) > 0]


class _Seen(NamedTuple):
    """A heartbeat: its `expires`, the lease in seconds, and the monotonic time from which the silence counts."""

    expires: float
    lease: float
    since: float
    #: Whether the consumer holds something that others wait for.
    holds: bool

    @property
    def longest_silence(self) -> float:
        """The seconds after which the lease has ended if no heartbeat was written."""
        return self.lease * (1.0 if self.holds else IDLE_LEASES) + GRACE_SECONDS


class Watch:
    """The heartbeats of other consumers, as one process has seen them."""

    def __init__(self, clock: ServerClock, lease: float) -> None:
        """Create a watch that has seen no heartbeat; `lease` is assumed for documents without a valid one."""
        self._clock, self._lease = clock, lease
        self._seen: dict[str, _Seen] = {}
        #: The monotonic time at which the last look began, and how far the server's time was ahead of the monotonic
        #: clock.
        self._looked = -inf
        self._ahead: float | None = None

    def observe(
        self,
        expires: Mapping[str, float],
        asked: float,
        fetch: Callable[[list[str]], list[Document | None]],
        holding: Container[str],
    ) -> None:
        """Take in `expires` of all consumers, by id. The request that read it was sent at the monotonic time `asked`.

        `fetch` returns the documents of new consumers, from which their leases are read. `holding` has the ids of those
        that hold messages.
        """
        answered, now = time.monotonic(), self._clock.now()
        looked, self._looked = self._looked, asked
        ahead, self._ahead = self._ahead, now - answered
        # The server's time is not used if its clock was set since the last look. On the first look there is nothing to
        # compare with: then it is used only if the local clock agrees with it.
        trusted = self._clock.agrees if ahead is None else abs(self._ahead - ahead) <= GRACE_SECONDS
        new = sorted(expires.keys() - self._seen.keys())
        leases = {name: _lease_of(doc, self._lease) for name, doc in zip(new, fetch(new) if new else [], strict=True)}
        before, self._seen = self._seen, {}
        for name, end in expires.items():
            seen = before.get(name)
            if seen is None or seen.expires != end:
                lease = leases[name] if seen is None else seen.lease
                written = answered - (now - (end - lease)) if trusted else answered
                since = min(answered, max(written, looked, answered - CLOCK_SHARE * lease))
                seen = _Seen(end, lease, since, True)
            self._seen[name] = seen._replace(holds=name in holding)

    def interrupted(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence: consumers could not write, or this process could not read."""
        now = time.monotonic()
        self._seen = {name: seen._replace(since=min(now, seen.since + seconds)) for name, seen in self._seen.items()}
        self._looked = now  # for heartbeats that the next look finds changed, the silence begins now or later

    def expires(self, name: str) -> float | None:
        """Return `expires` of a consumer as the last look found it; None if it did not find the consumer."""
        return self._seen[name].expires if name in self._seen else None

    def silent(self) -> list[str]:
        """Return the ids of consumers that had been silent for longer than their leases at the last look."""
        return [name for name, seen in self._seen.items() if self._looked - seen.since > seen.longest_silence]

    @property
    def suspects(self) -> bool:
        """Whether, at the last look, the heartbeat of a consumer that holds something was missing."""
        return any(
            seen.holds and self._looked - seen.since > 1.5 * heartbeat_interval(seen.lease)
            for seen in self._seen.values()
        )

    def next_in(self) -> float:
        """Return the seconds until the next look is due; infinite if no consumer was seen.

        It is due when the first lease may have expired, and at the latest after `CLOCK_SHARE` of the shortest lease: a
        later look could not count the full age of a heartbeat that was written since this one.
        """
        now = time.monotonic()
        return min(
            (min(seen.since + seen.longest_silence - now, CLOCK_SHARE * seen.lease) for seen in self._seen.values()),
            default=inf,
        )


def queues_of(doc: Document) -> frozenset[str]:
    """Return the queues that a Consumer document names; none if the document is malformed."""
    return frozenset(_QUEUES.clean(doc).get('queues', ()))


def expires_of(doc: Document) -> float:
    """Return `expires` of a Consumer document as the view `leases` emits it."""
    return max(-MAX_DATE, min(MAX_DATE, _number(doc.get('expires')) or 0.0))


def ends_at(doc: Document, *, holds: bool = False) -> float:
    """Return the server's time at which a consumer's lease ends, if it writes no more heartbeats.

    `holds` says that it holds messages; otherwise it may be silent for longer. A sweep deletes the document of a
    consumer that is silent for longer. Without any consumer, nobody sweeps.
    """
    return expires_of(doc) + (0.0 if holds else (IDLE_LEASES - 1) * _lease_of(doc, 0.0))


def _lease_of(doc: Document | None, default: float) -> float:
    if not doc:
        return default
    date, expires = _number(doc.get('date')), _number(doc.get('expires'))
    lease = expires - date if date is not None and expires is not None else default
    return lease if 0 < lease <= MAX_NUMBER else default


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(max(-1e15, min(1e15, value)))
