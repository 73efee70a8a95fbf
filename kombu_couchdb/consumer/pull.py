"""A `basic_get`: kombu's thread waits while the I/O thread claims one message."""

from __future__ import annotations

import threading
from typing import Any

from ..errors import CouchDBError
from .delivery import Credit, Delivery

__all__ = ['Pull']


class Pull:
    """One request for the next message of a queue."""

    def __init__(self, queue: str, no_ack: bool) -> None:
        self.queue, self.no_ack = queue, no_ack
        #: As in AMQP, a message that `basic_get` returns does not count for the channel's prefetch count.
        self.credit = Credit(limit=1)
        #: The ids of messages whose claims CouchDB refused.
        self.refused: set[str] = set()
        self._done = threading.Event()
        self._result: Any = None

    def set_result(self, result: Delivery | Exception | None) -> None:
        """End the wait of the other thread with a delivery, with None (the queue has no message) or with an error."""
        self._result = result
        self._done.set()

    def wait(self, thread: threading.Thread) -> Delivery | None:
        """Wait for the result; *raises* it if it is an error, or `CouchDBError` if the I/O thread has ended."""
        while not self._done.wait(1.0):
            if not thread.is_alive():
                raise CouchDBError('the connection was closed')
        if isinstance(self._result, Exception):
            raise self._result
        return self._result  # type: ignore[no-any-return]
