"""Relay of a prefork pool: children hand their results to the worker's parent process over a Unix socket.

The children inherit one end of a pair of datagram sockets. A child makes a stream socket pair for itself and sends one
end of it to the parent through the inherited socket. So the relay has no name in the file system, other processes
cannot connect to it, and a process that is killed leaves no file behind.

Each message of a child has its length in front, and is a result. A child that has sent a result has handed it over: the
parent receives everything that was sent before it writes an acknowledgement, see `Relay.receive`. An empty message asks
for a response of one byte when everything is done that the child has sent before.

If the parent process does not respond within the timeout, or the connection fails, the child writes to CouchDB itself.
`multiprocessing.connection` has such messages, too, but no timeout for sending, nor for the rest of a message whose
first bytes have arrived: a parent process that is stopped would block its children.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple

from kombu_couchdb.log import get_logger

__all__ = ['Received', 'Relay']

logger = get_logger(__name__)

#: A child sends this with its connection; the parent sends it back when it serves the connection, and as a response.
_GREETING = b'.'

#: The length of what is in front of each message: its length.
_HEADER_BYTES = 8

#: The bytes that are read at a time.
_READ_BYTES = 262_144


class Received(NamedTuple):
    """A message of a child. If it is empty, `respond()` ends the child's wait."""

    message: bytes
    respond: Callable[[], None]


class Relay:
    """Messages from the children of a pool to the process that opened it.

    A child waits up to `timeout` seconds for each step: to connect, to send and to receive a response. In the parent,
    one thread calls `wait`, any thread may call `wake`, and all other methods need the lock of the result queue.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        #: The inherited pair: the parent receives connections at the first, its children send them through the second.
        self._parent_end: socket.socket | None = None
        self._child_end: socket.socket | None = None
        self._owner_pid = 0
        self._served: dict[socket.socket, _Served] = {}
        self.reset()

    def open(self) -> None:
        """Open the sockets that wake the thread."""
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._signal_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._signal_end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)

    def serve_children(self) -> None:
        """Serve the children that are forked from now on. Without Unix sockets, each child writes by itself."""
        if self._parent_end is not None:
            return
        with ExitStack() as undo:
            try:
                parent_end, child_end = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
                # Set before the fork: whether a socket blocks is the same in all processes that share it.
                child_end.settimeout(self._timeout)
                parent_end.setblocking(False)
                self._selector.register(parent_end, selectors.EVENT_READ)
            except (OSError, AttributeError) as exc:
                logger.debug('the children of the pool store their results themselves: %s', exc)
                return
            undo.pop_all()
        self._parent_end, self._child_end, self._owner_pid = parent_end, child_end, os.getpid()

    def close(self) -> None:
        """Close all sockets; the thread must have ended."""
        for end in (self._wake_end, self._signal_end, self._parent_end, self._child_end, *self._served):
            if end is not None:
                end.close()
        self._selector.close()
        self._parent_end, self._child_end, self._served = None, None, {}

    @property
    def serves_children(self) -> bool:
        """Whether this process serves children."""
        return self._parent_end is not None

    @property
    def is_child(self) -> bool:
        """Whether this process is a child whose parent may serve it."""
        return self._child_end is not None and self._owner_pid != os.getpid()

    def reset(self) -> None:
        """Start over in a forked child: close the sockets at which only the parent process listens."""
        if self._parent_end is not None:
            for end in (self._parent_end, *self._served):
                if (number := end.detach()) >= 0:
                    os.close(number)
        self._parent_end, self._served = None, {}
        #: The child's connection to the parent process, after its first message.
        self._connection: socket.socket | None = None
        self._sends = threading.Lock()

    # -- in a child

    def send(self, message: bytes) -> bool:
        """Send a message; return False if the child must store it itself."""
        return self._send(message, lambda connection: None)

    def flush(self) -> None:
        """Wait until everything is done that this child has sent before, or until the parent does not respond."""
        self._send(b'', _receive)

    def _send(self, message: bytes, then: Callable[[socket.socket], None]) -> bool:
        if self._child_end is None or not self._sends.acquire(blocking=False):
            return False
        try:
            # Kept only without an exception: else the parent might wait for the rest of this message, or the next
            # response might be that to this message. A time limit may raise an exception anywhere.
            connection, self._connection = self._connection, None
            try:
                connection = connection or self._connect(self._child_end)
                connection.sendall(len(message).to_bytes(_HEADER_BYTES, 'big') + message)
                then(connection)
            except (OSError, EOFError) as exc:
                logger.debug('the parent process stores no results for this child, which stores them itself: %r', exc)
                return False
            self._connection = connection
            return True
        finally:
            self._sends.release()

    def _connect(self, child_end: socket.socket) -> socket.socket:
        end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        end.settimeout(self._timeout)
        with other:
            socket.send_fds(child_end, [_GREETING], [other.fileno()])
            if sys.platform != 'darwin':
                # Closed here, so that the child notices at once when the parent ends. macOS loses a descriptor that is
                # closed before it has arrived.
                other.close()
            # Without this the child could lose a message: a parent with too many open files drops the connection.
            _receive(end)
        return end

    # -- in the parent

    def wake(self) -> None:
        """End the thread's `wait`."""
        with suppress(BlockingIOError):  # enough to wake it is sent already
            self._signal_end.send(b'.')

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds for a message or `wake`."""
        self._selector.select(timeout)
        with suppress(BlockingIOError):
            while self._wake_end.recv(4096):
                pass

    def receive(self) -> list[Received]:
        """Return all messages that were sent before this call; does not wait."""
        if self._parent_end is None:
            return []
        # Connections that are accepted now may have messages already.
        while self._accept(self._parent_end):
            pass
        # Every socket is read: what the selector reports may be behind while another thread asks it.
        return [message for served in list(self._served.values()) for message in self._read(served)]

    def _accept(self, parent_end: socket.socket) -> bool:
        try:
            greeting, numbers, _, _ = socket.recv_fds(parent_end, 1, 1)
        except BlockingIOError:
            return False
        except OSError as exc:
            logger.debug('the connection of a child of the pool failed: %s', exc)
            return False
        # No descriptor arrives if this process has too many open files. The child's connection is closed then.
        for end in (socket.socket(fileno=number) for number in numbers):
            try:
                end.setblocking(False)
                end.send(_GREETING)
                self._selector.register(end, selectors.EVENT_READ)
                self._served[end] = _Served(end)
            except OSError:  # the child has ended
                end.close()
        return bool(greeting)

    def _read(self, served: _Served) -> list[Received]:
        found, is_open = served.read()
        if not is_open:
            self._served.pop(served.end, None)
            self._selector.unregister(served.end)
            served.end.close()
        return found


class _Served:
    """The parent's end of one child's connection."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._bytes = bytearray()

    def read(self) -> tuple[list[Received], bool]:
        """Return the complete messages that have arrived, and whether the connection is still open."""
        is_open = True
        while True:
            try:
                part = self.end.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                part = b''
            if not part:
                is_open = False  # what the child has sent completely is stored; an unfinished message it stores itself
                break
            self._bytes += part
        found: list[Received] = []
        while len(self._bytes) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(self._bytes[:_HEADER_BYTES], 'big')
            if len(self._bytes) < end:
                break
            found.append(Received(bytes(self._bytes[_HEADER_BYTES:end]), self._respond))
            del self._bytes[:end]
        return found, is_open

    def _respond(self) -> None:
        with suppress(OSError):  # the child has ended, or its timeout has passed and it connects again
            self.end.send(_GREETING)


def _receive(connection: socket.socket) -> None:
    """Wait for a response of the parent; *raises* `EOFError` if it has closed the connection."""
    if not connection.recv(1):
        raise EOFError
