"""Temporary queues of a connection: a queue that is deleted with its last consumer.

If several connections consume such a queue, or a consumer is killed, the sweep deletes it (see `leases.temporary`).
"""

from __future__ import annotations

import os
from typing import Any

from ..errors import CouchDBError
from ..log import get_logger

__all__ = ['TemporaryQueues']

logger = get_logger(__name__)


class TemporaryQueues:
    """The temporary queues that one connection has declared."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._queues: set[str] = set()
        self._pid = os.getpid()

    def __contains__(self, queue: str) -> bool:
        return queue in self._queues

    def declared(self, queue: str, *, temporary: bool) -> None:
        """Note whether a queue that was declared here is temporary."""
        if temporary:
            self._queues.add(queue)
        else:
            self._queues.discard(queue)

    def forget(self, queue: str) -> None:
        """Note that a queue was deleted."""
        self._queues.discard(queue)

    def consumer_added(self, queue: str) -> None:
        """If the queue is temporary, wait until the stored heartbeat names it, so that no other process deletes it.

        This waits for at most `request_timeout` seconds: the I/O thread retries while the server does not respond.
        """
        if queue in self._queues:
            self._connection.consumer.announced.wait_for(queue, self._connection.options.request_timeout)

    def consumer_cancelled(self, queue: str) -> None:
        """If the queue is temporary and has no consumer left, delete it; if others consume it, let the sweep watch it.

        A forked child deletes nothing: its parent may still consume.
        """
        if queue not in self._queues or self._pid != os.getpid():
            return
        connection = self._connection
        try:
            if connection.has_consumer(queue):
                connection.consumer.watch(queue)  # the other consumers may be cancelled at this moment, too
            else:
                self.forget(queue)
                connection.listener.unbind(queue)
                connection.store.purge(queue)
                connection.topology.delete_queue(queue)
        except CouchDBError as exc:
            logger.warning('temporary queue %r could not be deleted; it is deleted when it expires: %s', queue, exc)
