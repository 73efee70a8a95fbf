"""Relay of a prefork pool: children hand their results to the worker's parent process over a Unix socket.

The children inherit one end of a pair of sockets, so the relay has no name in the file system, other processes cannot
connect to it, and a process that is killed leaves no file behind.

The sockets keep the boundaries of messages (``SOCK_SEQPACKET``): all children send through the same socket, and a child
that is killed or interrupted has sent a message completely or not at all. Each message is a result. A child that has
sent a result has handed it over: the parent receives everything that was sent before it writes an acknowledgement, see
`Relay.receive`. A message may have a socket, which the parent closes when the result is done; one without a result asks
the parent to close the socket when everything is done that was sent before.

If the parent process does not receive for the time of the timeout, or has ended, the child writes to CouchDB itself. So
does each child on systems without such sockets, such as macOS and Windows.
"""

from __future__ import annotations

import os
import selectors
import socket
from array import array
from contextlib import ExitStack, suppress
from typing import NamedTuple

from kombu_couchdb.couchdb.fork_safety import close_in_child
from kombu_couchdb.log import get_logger

logger = get_logger(__name__)

#: The most bytes in a message. The kernel's limit is usually 212,992 bytes; a child stores a larger result itself.
_MAX_BYTES = 212_992

#: The bytes of one file descriptor beside a message.
_FD_BYTES = array('i').itemsize

#: The text of a message with a socket.
_FLUSH = b'.'


class Received(NamedTuple):
    """A message of a child: a result, which may be empty, and sockets on which the child waits."""

    message: bytes
    waiting: list[socket.socket]


class Relay:
    """Messages from the children of a pool to the process that opened it.

    A child waits up to `timeout` seconds for the parent to receive a message, or to close a socket. In the parent, one
    thread calls `wait`, any thread may call `wake`, and all other methods need the lock of the result queue.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        #: The inherited pair: children send through the second.
        self._parent_end: socket.socket | None = None
        self._child_end: socket.socket | None = None
        self._owner_pid = 0
        self._selector: selectors.BaseSelector | None = None

    def open(self) -> None:
        """Open the sockets that wake the thread."""
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._signal_end = map(close_in_child, socket.socketpair())
        self._wake_end.setblocking(False)
        self._signal_end.setblocking(False)
        self._selector.register(self._wake_end, selectors.EVENT_READ)

    def serve_children(self) -> None:
        """Serve the children that are forked from now on."""
        if self._parent_end is not None or self._selector is None:
            return
        with ExitStack() as undo:
            try:
                parent_end, child_end = map(
                    undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                )
                # Set before the fork: whether a socket blocks is the same in all processes that share it.
                child_end.settimeout(self._timeout)
                parent_end.setblocking(False)
                self._selector.register(parent_end, selectors.EVENT_READ)
            except (OSError, AttributeError) as exc:
                logger.debug('the children of the pool store their results themselves: %s', exc)
                return
            undo.pop_all()
        # A child that kept the parent's end would not notice that the parent process has ended.
        self._parent_end, self._child_end, self._owner_pid = close_in_child(parent_end), child_end, os.getpid()
        self._buffer = memoryview(bytearray(_MAX_BYTES))

    def close(self) -> None:
        """Close all sockets; the thread must have ended."""
        for end in (self._wake_end, self._signal_end, self._parent_end, self._child_end):
            if end is not None:
                end.close()
        self._child_end = None
        self.reset()

    @property
    def serves_children(self) -> bool:
        """Whether this process serves children."""
        return self._parent_end is not None

    @property
    def is_child(self) -> bool:
        """Whether this process is a child whose parent may serve it."""
        return self._child_end is not None and self._owner_pid != os.getpid()

    def reset(self) -> None:
        """Close the selector, also in a forked child, which keeps nothing but the socket through which it sends."""
        if self._selector is not None:
            self._selector.close()
        self._parent_end = self._selector = None

    # -- in a child

    def send(self, message: bytes, waiting: socket.socket | None = None) -> bool:
        """Send a result, and a socket on which the child waits; return False if the child must store it itself."""
        if self._child_end is None or len(message) > _MAX_BYTES:
            return False
        try:
            if waiting is None:
                self._child_end.send(message)
            else:
                with waiting:
                    socket.send_fds(self._child_end, [message], [waiting.fileno()])
        except OSError as exc:
            logger.debug('the parent process stores no results for this child, which stores them itself: %r', exc)
            return False
        return True

    def flush(self) -> None:
        """Wait until everything is done that this child has sent before, or until the parent does not respond."""
        if self._child_end is None:
            return
        end, other = socket.socketpair()
        with end, other, suppress(OSError):
            end.settimeout(self._timeout)
            socket.send_fds(self._child_end, [_FLUSH], [other.fileno()])
            other.close()
            end.recv(1)  # ends when the parent closes its copy of `other`, or has ended

    # -- in the parent

    def wake(self) -> None:
        """End the thread's `wait`."""
        with suppress(BlockingIOError):  # enough to wake it is sent already
            self._signal_end.send(b'.')

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds for a message or `wake`."""
        if self._selector is not None:
            self._selector.select(timeout)
        with suppress(BlockingIOError):
            while self._wake_end.recv(4096):
                pass

    def receive(self) -> list[Received]:
        """Return all messages that were sent before this call; does not wait."""
        found: list[Received] = []
        while self._parent_end is not None:
            try:
                # With a buffer of our own, this takes a tenth of the time of `socket.recv_fds`.
                size, ancillary, _, _ = self._parent_end.recvmsg_into([self._buffer], socket.CMSG_SPACE(_FD_BYTES))
            except BlockingIOError:
                break
            message = bytes(self._buffer[:size])
            # If this process has too many open files, the socket is lost, and the child does not wait.
            numbers = [number for _, _, data in ancillary for number in array('i', data)]
            waiting = [socket.socket(fileno=number) for number in numbers]
            found.append(Received(b'' if message == _FLUSH else message, waiting))
        return found
