"""Intake: brings what threads and children hand over into the backlog, and wakes the thread that stores it."""

from __future__ import annotations

import selectors
import socket
import threading

from kombu_couchdb.log import get_logger

from .backlog import Backlog
from .handed import Handed
from .prefork_relay import Kind, Received, Relay

__all__ = ['Intake']

logger = get_logger(__name__)

#: How often a thread looks again whether there is room for more results, in seconds.
_CHECK_SECONDS = 0.1


class Intake:
    """The way into one backlog. One thread calls `wait`; any thread may call `signal` and `take_in`."""

    def __init__(self, backlog: Backlog, relay: Relay) -> None:
        self._backlog, self._relay = backlog, relay
        self._is_signalled = False
        self._taken_by: threading.Thread | None = None

    def open(self) -> None:
        """Open the sockets that wake the thread."""
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._signal_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)

    def serve_children(self) -> None:
        """Let children that are forked from now on hand over results."""
        self._relay.open(self._selector)

    def close(self) -> None:
        """Close all sockets; the thread must have ended."""
        self._relay.close()
        self._selector.close()
        self._wake_end.close()
        self._signal_end.close()

    def signal(self) -> None:
        """Wake the thread."""
        with self._backlog.changed:
            if not self._is_signalled:
                self._is_signalled = True
                self._signal_end.send(b'.')

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds until something is handed over, and take it in."""
        self._taken_by = threading.current_thread()
        if self._backlog.is_full:
            with self._backlog.changed:
                self._backlog.changed.wait(_CHECK_SECONDS)
        else:
            self._selector.select(timeout)
        with self._backlog.changed:
            self._is_signalled = False
            _drain(self._wake_end)
        self.take_in()

    def take_in(self) -> bool:
        """Receive everything that children have sent before; return False if there is no room for it."""
        with self._backlog.changed:
            if self._backlog.is_full:
                return False
            messages = self._relay.receive()
            for received in messages:
                self._accept(received)
        if messages and threading.current_thread() is not self._taken_by:
            self.signal()  # the thread may wait for these messages
        return True

    def _accept(self, received: Received) -> None:
        if received.kind is not Kind.FLUSH:
            try:
                result = Handed.from_bytes(received.message)
            except ValueError:
                logger.exception('a result of a child of the pool cannot be read')
                return
            result.is_awaited = received.kind is Kind.CONFIRM
            self._backlog.add(result)
        if received.kind is not Kind.HAND:
            self._backlog.when_done(received.respond)


def _drain(end: socket.socket) -> None:
    try:
        while end.recv(4096):
            pass
    except BlockingIOError:
        pass
