"""The I/O thread of a consuming connection: the only thread that claims, acknowledges, writes heartbeats and sweeps.

While CouchDB does not respond, the thread retries and logs that once. kombu is not told: leases and acknowledgements
outlive the connection. A proxy that answers with a page of its own counts as an outage, too. kombu gets only the errors
that a person must correct: missing rights and wrong options.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache

from kombu.utils.compat import detect_environment

from ..couchdb.call import urgent
from ..couchdb.client import Client
from ..couchdb.fork_safety import at_exit
from ..errors import AccessDenied, ConfigurationError, CouchDBError
from ..leases.lease import GRACE_SECONDS
from ..log import get_logger
from ..options import Options, heartbeat_interval
from ..outage import Outage
from ..queues.databases import ensure
from ..queues.fanout import Listener
from ..queues.topology import Topology
from .bodies import deliver_some
from .cycle import Cycle
from .delivery import Delivery, Mailbox, Pull

logger = get_logger(__name__)

#: A consumer without anything to do ends its lease and its threads after this time, in seconds. The next use starts
#: another one.
_IDLE_SECONDS = 5.0

#: How long a consumer that closes waits for a request without a response, in seconds: if it has decided nothing about
#: messages, or during an outage; and if both is true, or the results of its tasks are given up.
_CLOSE_SECONDS, _GIVE_UP_SECONDS = 3.0, 0.5

#: From this `visibility_timeout` on, in seconds, a warning says what it means: it was probably copied from Redis, where
#: no task may take longer.
_LONG_LEASE_SECONDS = 600.0

_running: weakref.WeakSet[IOThread] = weakref.WeakSet()


@cache
def _warn_of_long_lease(seconds: float) -> None:
    """Warn, once in a process."""
    logger.warning(
        'visibility_timeout is %g s: if this process is killed, its messages wait for so long before others receive '
        'them. Remove the option unless you want that: a process that runs keeps its messages, however long its tasks '
        'take (the default is %g s)',
        seconds,
        Options.visibility_timeout,
    )


class IOThread:
    """Claims messages for the subscriptions in `unacked`, and writes what kombu decides about them."""

    def __init__(
        self,
        client: Client,
        options: Options,
        mailbox: Mailbox,
        listener: Listener,
        topology: Topology,
        name: str,
    ) -> None:
        """Start the thread, with the name `name`. Deliveries, and errors for kombu, are put into `mailbox`."""
        if options.visibility_timeout > _LONG_LEASE_SECONDS:
            _warn_of_long_lease(options.visibility_timeout)
        self._client, self._options, self._mailbox = client, options, mailbox
        self._topology = topology
        self._cycle = Cycle(client, options, mailbox, listener, topology, name)
        self.unacked, self.announced = self._cycle.unacked, self._cycle.lease.announced
        self._abandoned = self._has_ended = False
        self._idle_since: float | None = None
        self._outage = Outage(logger, '%s; trying again until it responds', f'{client.url} responds again')
        self._was_late = False
        self._began = time.monotonic()
        self._outage_since: float | None = None  # a monotonic time
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._revoke_at_exit = at_exit(self._close_at_exit)
        self._thread.start()
        _running.add(self)

    @classmethod
    def runs_here(cls) -> bool:
        """Tell whether any consumer runs in this process. A forked child has none of its parent's."""
        return any(each._thread.is_alive() for each in list(_running))

    @property
    def id(self) -> str:
        """The id of the heartbeat document."""
        return self._cycle.lease.id

    @property
    def ended(self) -> bool:
        """Whether the thread has given up; it has put the reason into the mailbox."""
        return not (self._thread.is_alive() or self.unacked.retired)

    @property
    def in_outage(self) -> bool:
        """Whether CouchDB did not respond to the last request."""
        return self._outage.lasts

    def wait(self, pull: Pull) -> Delivery | None:
        """Return the message that a `basic_get` asked for, or None if there is none; *raises* `CouchDBError`."""
        return pull.wait(self._thread)

    def watch(self, queue: str) -> None:
        """Delete a temporary queue later, when no consumer uses it any more."""
        self._cycle.sweeper.abandon(queue)

    def close(self, timeout: float, *, in_outage: bool = False) -> None:
        """Release all messages, end the lease and the thread; wait up to `timeout` seconds for that.

        If CouchDB does not respond this waits for 0.5 to 3 seconds only. Then other consumers get the messages when the
        lease expires. `in_outage` says that another request got no response.
        """
        self._revoke_at_exit()
        in_outage, began = in_outage or self.in_outage, time.monotonic()
        if has_decided := bool(self.unacked.writes.unstored):
            if not self.unacked.writes.wait():
                timeout = _GIVE_UP_SECONDS
            elif in_outage and time.monotonic() - began < _GIVE_UP_SECONDS:  # else CouchDB has responded just now
                timeout = min(timeout, _CLOSE_SECONDS)
        else:
            timeout = min(timeout, _GIVE_UP_SECONDS if in_outage else _CLOSE_SECONDS)
        self._closing.set()
        self.unacked.wakeup.set()
        self._thread.join(timeout)
        if self._thread.is_alive() and has_decided:
            logger.warning(
                '%s does not respond; other workers receive the messages of this one when its lease expires',
                self._client.url,
            )

    def abandon(self) -> None:
        """End as with `close`, without waiting: the connection was dropped.

        Takes no lock while the thread runs: a finalizer calls it.
        """
        self._abandoned = True
        self.unacked.wakeup.set()
        if self._has_ended:
            self._close_sockets()

    def _close_at_exit(self) -> None:
        # The program ends without closing its connection. Release its messages now, not when the lease expires.
        self.close(self._options.request_timeout)

    def _close_sockets(self) -> None:
        self._mailbox.close()
        self._client.close()

    def _run(self) -> None:
        try:
            with urgent():
                while not (self._closing.is_set() or self._abandoned or self.unacked.retired):
                    self._guard(self._work)
                self._guard(self._finish)
        finally:
            self._cycle.notifier.close()
            self.announced.close()
            self.unacked.fail_pulls(CouchDBError('the connection was closed'))
            self.unacked.end_waiting()
            self._revoke_at_exit()
            self._has_ended = True  # before `_abandoned` is read: one of the two threads closes the sockets
            if self._abandoned:
                self._close_sockets()

    def _work(self) -> None:
        """Wait until there is something to do, and do it."""
        at = self._cycle.next_at()
        if self._idle_since is not None:
            at = min(at, self._idle_since + _IDLE_SECONDS)
        slept_at, longest = time.monotonic(), max(heartbeat_interval(self._cycle.lease.timeout), GRACE_SECONDS)
        at = max(min(at, slept_at + longest), slept_at)  # so that a stall is noticed
        cycle_is_due = self.unacked.wakeup.wait(at - slept_at)
        self._note_stall(slept_at, at + longest)
        if not cycle_is_due and self._cycle.next_at() > time.monotonic():
            self._began = time.monotonic()
            self._closing.wait(self.unacked.begun_pause)
            self._cycle.store_begun()
            self._note_stall(self._began, self._began + longest)
            return
        self._began = time.monotonic()
        self._warn_if_late(self._began - at)
        if self._cycle.is_busy:
            self._idle_since = None
        self._cycle.run()
        if self._outage_since is not None:
            self._cycle.sweeper.interrupted(time.monotonic() - self._outage_since)
            self._outage_since = None
        deliver_some(self._client, self.unacked)
        self._note_stall(self._began, self._began + longest)
        swept_at = time.monotonic()
        self._cycle.sweep()
        self._note_stall(swept_at, swept_at + longest)
        if self._outage.lasts:
            self._outage.recovered()
            self.unacked.begin_waiting(in_outage=False)
        if not self._cycle.is_busy:
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() >= self._idle_since + _IDLE_SECONDS:
                self.unacked.retire()

    def _note_stall(self, since: float, latest: float) -> None:
        """If this thread is here only after `latest`, note that the time since `since` says nothing of others.

        The process was stalled, and probably other consumers of this machine were, too. A stall that is not noticed
        cannot silence a consumer for its whole lease, even if it begins just before a heartbeat.
        """
        now = time.monotonic()
        if now > latest:
            self._cycle.sweeper.interrupted(now - since)

    def _warn_if_late(self, seconds: float) -> None:
        """Warn once if this thread is a greenlet, and a task has kept it from running for the time of a heartbeat."""
        lease = self._cycle.lease.timeout
        if (
            seconds > heartbeat_interval(lease)
            and not self._was_late
            and (library := detect_environment()) != 'default'
        ):
            self._was_late = True
            logger.warning(
                'a task has blocked the event loop of %s for %.1f s, and no heartbeat could be written meanwhile: '
                'let the task yield, use the pool prefork or threads, or set a longer visibility_timeout than %g s, '
                'or other workers run the same messages, too',
                library,
                seconds,
                lease,
            )

    def _finish(self) -> None:
        holds = bool(self.unacked.ids())
        try:
            self._cycle.finish()
        except CouchDBError as exc:
            level = logging.WARNING if holds else logging.DEBUG
            logger.log(level, '%s; other workers receive the messages of this one when its lease expires', exc)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (AccessDenied, ConfigurationError) as exc:
            self._give_up(exc)
        except CouchDBError as exc:
            self._retry_later(exc)
        except Exception as exc:
            logger.exception('the consumer thread failed')
            self._give_up(exc)

    def _give_up(self, exc: Exception) -> None:
        self._closing.set()
        self._mailbox.put(exc)
        self.unacked.fail_pulls(exc)

    def _retry_later(self, exc: CouchDBError) -> None:
        pause = self._outage.failed(exc)
        self.unacked.begin_waiting(in_outage=True)
        self._outage_since = self._began if self._outage_since is None else self._outage_since
        self._cycle.on_outage()
        self._closing.wait(pause)
        try:
            # The database may have been deleted: create it again, with everything that this connection had declared in
            # it.
            ensure(self._client, self._options.create_database)
            self._topology.redeclare()
        except CouchDBError as again:
            logger.debug('still no response: %s', again)
        self.unacked.wakeup.set()
