"""Relay of a prefork pool: children store results through the worker's parent process, several in one request.

Each child stores one result at a time, and a request for each result is what limits a worker with many children. With
the relay, a child sends its documents to the parent process over a Unix socket and waits for the response. After that
the documents are stored, as after a request to CouchDB.

The children inherit one end of a pair of datagram sockets. A child makes a stream socket pair for itself and sends one
end of it to the parent through the inherited socket. So the relay has no name in the file system, other processes
cannot connect to it, and a process that is killed leaves no file behind.

If the parent process does not respond within the timeout, or the connection fails, the child writes the documents
itself. If the parent stored them nevertheless, the child's write is in conflict with the same document; the store
handles such conflicts, see `store.Store.write`.

The messages have a length in front. `multiprocessing.connection` has such messages, too, but no timeout for sending,
nor for the rest of a message whose first bytes have arrived: a parent process that is stopped would block its children.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO

from kombu.utils.json import dumps

from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

__all__ = ['Relay']

logger = get_logger(__name__)

#: How long the parent waits when it cannot accept another connection, in seconds.
_PAUSE_SECONDS = 1.0

#: A child sends this with its connection; the parent sends it back when it serves the connection.
_GREETING = b'.'

#: The length of the number in front of each message, in bytes.
_HEADER_BYTES = 8


class Relay:
    """Writes documents by a group commit, in the process that opened it, for this process and its children.

    A child waits up to `timeout` seconds for each step: to connect, to send and to receive. Then it writes itself.
    """

    def __init__(self, commit: GroupCommit, timeout: float) -> None:
        self._commit, self._timeout = commit, timeout
        #: The inherited pair: the parent receives connections at the first, its children send them through the second.
        self._parent_end: socket.socket | None = None
        self._child_end: socket.socket | None = None
        self._served: set[socket.socket] = set()
        self._owner_pid = 0
        #: The child's connection to the parent process, after its first write.
        self._connection: _Connection | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Serve the children that are forked from now on. Without Unix sockets, each child writes by itself."""
        if self._parent_end is not None:
            return
        with ExitStack() as undo:
            try:
                parent_end, child_end = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
                # Set before the fork: whether a socket blocks is the same in all processes that share it.
                child_end.settimeout(self._timeout)
                threading.Thread(
                    target=self._accept, args=(parent_end,), name='celery-couchdb-relay', daemon=True
                ).start()
            except (OSError, AttributeError, RuntimeError) as exc:
                logger.debug('the children of the pool store their results themselves: %s', exc)
                return
            undo.pop_all()
        self._parent_end, self._child_end, self._owner_pid = parent_end, child_end, os.getpid()

    def write(self, docs: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
        """Write documents and return the result for each; *raises* what `GroupCommit.write` raises."""
        if self._child_end is not None and self._owner_pid != os.getpid() and self._lock.acquire(blocking=False):
            try:
                results = self._write_through_parent(docs, self._child_end)
            finally:
                self._lock.release()
            if results is not None:
                return results
        return self._commit.write(docs)

    def reset(self) -> None:
        """Start over in a forked child: close the sockets at which only the parent process listens."""
        for end in (self._parent_end, *self._served):
            if end is not None and (number := end.detach()) >= 0:
                # By number: `socket.close` waits until the file that reads from it is closed, which a thread of the
                # parent process uses and this process has not.
                os.close(number)
        self._parent_end, self._served, self._connection, self._lock = None, set(), None, threading.Lock()

    # -- in a child

    def _write_through_parent(
        self, docs: Sequence[Mapping[str, Any]], child_end: socket.socket
    ) -> list[WriteResult] | None:
        """Let the parent write; return None if it did not, or if that is unknown."""
        connection, self._connection = self._connection, None
        text = dumps(docs).encode()
        try:
            connection = connection or _Connection(child_end, self._timeout)
            found: list[list[str]] | None = json.loads(connection.request(text))
            results = None if found is None else [_write_result(*fields) for fields in found]
        except (OSError, EOFError, ValueError, TypeError) as exc:
            logger.debug('the parent process stores no results for this child, which stores them itself: %r', exc)
            return None
        # Kept only without an exception: else the next request might receive the response to this one.
        self._connection = connection
        return results

    # -- in the parent

    def _accept(self, parent_end: socket.socket) -> None:
        while parent_end.fileno() >= 0:
            try:
                greeting, numbers, _, _ = socket.recv_fds(parent_end, 1, 1)
            except OSError as exc:
                logger.debug('the connection of a child of the pool failed: %s', exc)
                time.sleep(_PAUSE_SECONDS)  # no event says that memory or file descriptors are free again
                continue
            if not greeting:
                return
            # No descriptor arrives if this process has too many open files. The child's connection is closed then.
            for end in (socket.socket(fileno=number) for number in numbers):
                self._served.add(end)
                try:
                    threading.Thread(target=self._serve, args=(end,), name='celery-couchdb-relay', daemon=True).start()
                except RuntimeError as exc:
                    logger.debug('a child of the pool stores its results itself: %s', exc)
                    self._served.discard(end)
                    end.close()

    def _serve(self, end: socket.socket) -> None:
        """Write the documents of one child until it closes its connection."""
        try:
            with end, end.makefile('rb') as incoming:
                end.sendall(_GREETING)
                while True:
                    _send(end, json.dumps(self._write_for_child(_receive(incoming))).encode())
        except (OSError, EOFError, ValueError):
            pass  # the child has ended, or its timeout has passed and it connects again
        finally:
            self._served.discard(end)

    def _write_for_child(self, text: bytes) -> list[WriteResult] | None:
        try:
            return self._commit.write(json.loads(text))
        except CouchDBError:
            return None  # the child writes by itself, and its own request raises the error


class _Connection:
    """A child's connection to the parent process.

    *Every* method raises `OSError` or `EOFError` if the connection fails or a step takes longer than `timeout` seconds.
    """

    def __init__(self, child_end: socket.socket, timeout: float) -> None:
        self._end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._end.settimeout(timeout)
        self._incoming = self._end.makefile('rb')
        with other:
            socket.send_fds(child_end, [_GREETING], [other.fileno()])
            if sys.platform != 'darwin':
                # Closed here, so that the child notices at once when the parent ends. macOS loses a descriptor that is
                # closed before it has arrived.
                other.close()
            if self._incoming.read(len(_GREETING)) != _GREETING:
                raise EOFError

    def request(self, text: bytes) -> bytes:
        """Send one message and return the response to it."""
        _send(self._end, text)
        return _receive(self._incoming)


def _write_result(doc_id: str, status: str, rev: str, error: str, reason: str) -> WriteResult:
    return WriteResult(doc_id, WriteStatus(status), rev, error, reason)


def _send(end: socket.socket, text: bytes) -> None:
    end.sendall(len(text).to_bytes(_HEADER_BYTES, 'big') + text)


def _receive(incoming: BinaryIO) -> bytes:
    head = incoming.read(_HEADER_BYTES)
    text = incoming.read(int.from_bytes(head, 'big')) if len(head) == _HEADER_BYTES else b''
    if not text:
        raise EOFError
    return text
