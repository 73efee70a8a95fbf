"""The end of a connection's queues with `auto_delete`: such a queue is deleted when its last subscription is cancelled.

An exclusive queue is deleted when its connection is closed, also if nothing has subscribed to it.

If several connections have subscribed to such a queue, or if a process is killed, a sweep deletes the queue (see
`leases.housekeeping`).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ..couchdb.call import time_limit
from ..errors import CouchDBError
from ..log import get_logger
from ..outage import Outage

logger = get_logger(__name__)

#: How long the deletion of a queue may take, in seconds: at first, and after one that got no response.
_CANCEL_SECONDS, _AGAIN_SECONDS = 2.0, 0.5


class TemporaryQueues:
    """The queues with `auto_delete` that one connection has declared."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        #: Queues that no other connection may use: they are deleted when this one is closed.
        self.exclusive: set[str] = set()
        self._pid = os.getpid()
        self._outage = Outage(
            logger, 'a temporary queue could not be deleted; it is deleted when it expires: %s', level=logging.WARNING
        )

    @property
    def in_outage(self) -> bool:
        """Whether CouchDB did not respond when a queue was last to be deleted."""
        return self._outage.lasts

    def __contains__(self, queue: str) -> bool:
        return bool(self._connection.topology.declared_queue(queue).get('auto_delete'))

    def close(self) -> None:
        """Delete the exclusive queues that are left: nothing has subscribed to them."""
        for queue in sorted(self.exclusive):
            self.subscription_cancelled(queue)

    def subscription_added(self, queue: str) -> None:
        """If the queue is temporary, wait until the heartbeat document names it: then no other process deletes it.

        This waits for at most `request_timeout` seconds: the I/O thread retries while the server does not respond.
        """
        if queue in self:
            self._connection.consumer.announced.wait_for(queue, self._connection.options.request_timeout)

    def subscription_cancelled(self, queue: str) -> None:
        """If the queue is temporary, delete it; if it has other subscriptions, let the sweep watch it.

        A forked child deletes nothing: its parent may still be subscribed. A worker that stops calls this, so it waits
        for at most 2 seconds, and not at all during an outage: the queue is then deleted when it expires.
        """
        if queue not in self or self._pid != os.getpid():
            return
        connection = self._connection
        try:
            if queue in connection.topology.paused:
                return  # it expires after it is resumed
            seconds = _AGAIN_SECONDS if self.in_outage else _CANCEL_SECONDS
            with time_limit(0.0 if connection.in_outage else seconds):
                if connection.has_consumer(queue):
                    connection.consumer.watch(queue)  # the other subscriptions may be cancelled at this moment, too
                else:
                    connection.listener.unbind(queue)
                    connection.topology.delete_queue(queue)
                    connection.store.purge(queue)  # last: see `Store.delete_without_queue`
            self._outage.recovered()
        except CouchDBError as exc:
            self._outage.failed(exc, f'{queue!r}: {exc}')
