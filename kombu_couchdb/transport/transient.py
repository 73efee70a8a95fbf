"""Transient messages: events, and replies of remote control, which a thread stores so that a worker does not wait.

Celery publishes them in a worker's event loop, and tries again without a limit. While CouchDB does not respond, that
would stop the loop: the worker would start no task, enforce no time limit and obey no signal. Here they wait in memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..couchdb.fork_safety import at_exit, reset_in_child
from ..errors import RETRIED, ServerUnavailable
from ..log import get_logger
from ..outage import Outage

logger = get_logger(__name__)

#: The most messages that wait; of more, the oldest are dropped during an outage. And the most that are stored together.
_MAX_MESSAGES, _MAX_TOGETHER = 1000, 200

#: How long a publisher waits for room if there is no outage, in seconds. After that CouchDB counts as not responding.
_ROOM_SECONDS = 1.0

#: The thread ends if no message comes for so long, in seconds.
_IDLE_SECONDS = 5.0

#: How long a channel that closes waits until its messages are stored, in seconds.
_CLOSE_SECONDS = 1.0

#: AMQP's delivery mode of a message that may be lost.
_TRANSIENT = 1

#: The headers that Celery gives to events, and kombu to replies.
_OF_EVENT, _OF_REPLY = 'hostname', 'ticket'


def is_transient(message: Any) -> bool:
    """Tell whether a message is an event or a reply, and may be lost: it has AMQP's delivery mode 1.

    Other messages with this mode are stored before `publish` returns, as all are: in order, or with an error.
    """
    headers = message['headers']
    return (
        message['properties'].get('delivery_mode') == _TRANSIENT
        and (_OF_EVENT in headers or _OF_REPLY in headers)
        and 'task' not in headers
    )


class TransientMessages:
    """Stores the transient messages of one channel in a thread, in their order. Thread-safe."""

    def __init__(self, store: Callable[[Sequence[Any]], None]) -> None:
        """Store messages with `store(messages)`, which *raises* the errors of `kombu_couchdb.errors`."""
        self._store = store
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Forget everything in a forked child: the messages and the thread belong to the parent."""
        self._changed = threading.Condition()  # reentrant: a signal handler may publish a message, too
        self._waiting: deque[Any] = deque(maxlen=_MAX_MESSAGES)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._outage = Outage(logger, 'events and replies wait until CouchDB responds: %s', level=logging.DEBUG)
        self._began = 0.0  # the monotonic time of the last attempt to store messages

    def add(self, message: Any) -> None:
        """Store a message soon. If CouchDB responds, wait until there is room for it."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._outage.lasts or len(self._waiting) < _MAX_MESSAGES, _ROOM_SECONDS
            ):
                self._outage.failed(ServerUnavailable(f'no request was answered for {_ROOM_SECONDS:g} s'))
            self._waiting.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name='transient-messages', daemon=True)
                self._thread.start()
                self._revoke_at_exit = at_exit(self.close)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread when all messages are stored.

        This waits for up to a second, and not at all during an outage, or for a request that has taken longer already.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            waits = _CLOSE_SECONDS if not self._began or time.monotonic() - self._began < _CLOSE_SECONDS else 0.0
            self._changed.wait_for(lambda: self._thread is None or self._outage.lasts, waits)

    def _run(self) -> None:
        while messages := self._next():
            try:
                self._began = time.monotonic()
                self._store(messages)
                self._outage.recovered()
                self._began = 0.0
            except RETRIED as exc:
                with self._changed:
                    pause = self._outage.failed(exc)
                    self._waiting = deque([*messages, *self._waiting], _MAX_MESSAGES)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed, pause)
            except Exception as exc:  # the thread must go on
                level = logging.DEBUG if self._closed else logging.ERROR  # a closed channel cannot store any more
                logger.log(level, '%d events or replies are lost: %s', len(messages), exc)

    def _next(self) -> list[Any]:
        """Wait for messages and return some; an empty list if the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE_SECONDS)
            if not self._waiting or (self._closed and self._outage.lasts):
                self._thread = None
                self._revoke_at_exit()
                self._changed.notify_all()
                return []
            self._changed.notify_all()
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_TOGETHER))]
