"""Relay of a prefork pool: children hand their results to the worker's parent process over a Unix socket.

The children inherit one end of a pair of datagram sockets. A child makes a stream socket pair for itself and sends one
end of it to the parent through the inherited socket. So the relay has no name in the file system, other processes
cannot connect to it, and a process that is killed leaves no file behind.

Each message of a child has a kind and its length in front. A child that has sent a message has handed it over: the
parent receives everything that was sent before it writes an acknowledgement, see `Relay.receive`. For some kinds the
child waits for a response of one byte.

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
from contextlib import ExitStack
from enum import IntEnum
from typing import NamedTuple

from kombu_couchdb.log import get_logger

__all__ = ['Kind', 'Received', 'Relay']

logger = get_logger(__name__)

#: A child sends this with its connection; the parent sends it back when it serves the connection.
_GREETING = b'.'

#: The length of what is in front of each message: its kind, in one byte, and its length.
_HEADER_BYTES = 9

#: The bytes that are read at a time.
_READ_BYTES = 262_144


class Kind(IntEnum):
    """What a child wants with its message."""

    #: Store a result. The child goes on.
    HAND = 0
    #: Store a result. The child waits, and stores it itself unless the response says that it is stored.
    CONFIRM = 1
    #: No result: the child waits until everything is stored that it has handed over before.
    FLUSH = 2


class Received(NamedTuple):
    """A message of a child; `respond(success)` ends the child's wait."""

    kind: Kind
    message: bytes
    respond: Callable[[bool], None]


class Relay:
    """Messages from the children of a pool to the process that opened it.

    A child waits up to `timeout` seconds for each step: to connect, to send and to receive a response.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        #: The inherited pair: the parent receives connections at the first, its children send them through the second.
        self._parent_end: socket.socket | None = None
        self._child_end: socket.socket | None = None
        self._owner_pid = 0
        self._served: dict[socket.socket, _Served] = {}
        #: The child's connection to the parent process, after its first message.
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def open(self, selector: selectors.BaseSelector) -> None:
        """Serve the children that are forked from now on; `selector` watches their sockets.

        Without Unix sockets, each child writes by itself.
        """
        if self._parent_end is not None:
            return
        with ExitStack() as undo:
            try:
                parent_end, child_end = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
                # Set before the fork: whether a socket blocks is the same in all processes that share it.
                child_end.settimeout(self._timeout)
                parent_end.setblocking(False)
                selector.register(parent_end, selectors.EVENT_READ)
            except (OSError, AttributeError) as exc:
                logger.debug('the children of the pool store their results themselves: %s', exc)
                return
            undo.pop_all()
        self._selector = selector
        self._parent_end, self._child_end, self._owner_pid = parent_end, child_end, os.getpid()

    def close(self) -> None:
        """Serve children no more."""
        with self._lock:
            for end in (self._parent_end, self._child_end, *self._served):
                if end is not None:
                    end.close()
            self._parent_end, self._child_end, self._served = None, None, {}

    @property
    def is_open(self) -> bool:
        """Whether this process serves children."""
        return self._parent_end is not None

    @property
    def is_child(self) -> bool:
        """Whether this process is a child whose parent may serve it."""
        return self._child_end is not None and self._owner_pid != os.getpid()

    def reset(self) -> None:
        """Start over in a forked child: close the sockets at which only the parent process listens."""
        for end in (self._parent_end, *self._served):
            if end is not None and (number := end.detach()) >= 0:
                os.close(number)
        self._parent_end, self._served, self._connection, self._lock = None, {}, None, threading.Lock()

    # -- in a child

    def send(self, kind: Kind, message: bytes = b'') -> bool:
        """Send a message, and wait for the response if its kind has one; return False if the child must act itself."""
        if self._child_end is None or not self._lock.acquire(blocking=False):
            return False
        try:
            # Kept only without an exception: else the parent might wait for the rest of this message, or the next
            # response might be that to this message. A time limit may raise an exception anywhere.
            connection, self._connection = self._connection, None
            try:
                connection = connection or self._connect(self._child_end)
                connection.sendall(kind.to_bytes(1, 'big') + len(message).to_bytes(_HEADER_BYTES - 1, 'big') + message)
                response = b'' if kind is Kind.HAND else connection.recv(1)
                if kind is not Kind.HAND and not response:
                    raise EOFError
            except (OSError, EOFError) as exc:
                logger.debug('the parent process stores no results for this child, which stores them itself: %r', exc)
                return False
            self._connection = connection
            return kind is Kind.HAND or response == b'1'
        finally:
            self._lock.release()

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
            if end.recv(len(_GREETING)) != _GREETING:
                raise EOFError
        return end

    # -- in the parent

    def receive(self) -> list[Received]:
        """Return all messages that were sent before this call; does not wait. Any thread may call it."""
        if self._parent_end is None:
            return []
        with self._lock:
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
            end = _HEADER_BYTES + int.from_bytes(self._bytes[1:_HEADER_BYTES], 'big')
            if len(self._bytes) < end:
                break
            found.append(Received(Kind(self._bytes[0]), bytes(self._bytes[_HEADER_BYTES:end]), self._respond))
            del self._bytes[:end]
        return found, is_open

    def _respond(self, success: bool) -> None:
        try:
            self.end.send(b'1' if success else b'0')
        except OSError:
            pass  # the child has ended, or its timeout has passed and it connects again
