"""A `basic_get`: kombu's thread asks, the I/O thread answers."""

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
        #: As in AMQP, what is asked for does not count for the channel's prefetch count.
        self.credit = Credit(limit=1)
        #: The ids of messages that the database did not let be taken.
        self.refused: set[str] = set()
        self._done = threading.Event()
        self._answer: Any = None

    def answer(self, answer: Delivery | Exception | None) -> None:
        """Give the waiting thread what it gets: a delivery, None, or an error."""
        self._answer = answer
        self._done.set()

    def wait(self, thread: threading.Thread) -> Delivery | None:
        """Wait for the answer; *raises* it if it is an error, or `CouchDBError` if the thread has ended."""
        while not self._done.wait(1.0):
            if not thread.is_alive():
                raise CouchDBError('the connection was closed')
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer  # type: ignore[no-any-return]
