"""Relay of a prefork pool: children store results through the worker's process, several in one request.

Each child has but one result at a time, and a request for each is what limits such a worker. So a child hands its documents
to its parent over a Unix socket and waits for the answer, as it would wait for CouchDB: when it goes on, they are stored.
Children inherit one socket, the *door*, and pass the parent one end of a connection of their own through it: so the relay has
no name in the file system, no other process can reach it, and a process that is killed leaves nothing behind.
Whatever goes wrong between the two, the child writes by itself, after some seconds at the most; a document that the parent
has stored all the same then stands in conflict with itself, which the store looks into anyway.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import BinaryIO

from kombu.utils.json import dumps

from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

from .documents import Document

__all__ = ['Relay']

logger = get_logger(__name__)

#: How long the parent waits when it cannot take another connection, in seconds.
_PAUSE_SECONDS = 1.0


class Relay:
    """Writes documents by a group commit: in the process that opened it, and for its children. `patience` is in seconds."""

    def __init__(self, commit: GroupCommit, patience: float) -> None:
        self._commit, self._patience = commit, patience
        #: Where the parent receives connections, and where its children send them.
        self._arrivals: socket.socket | None = None
        self._door: socket.socket | None = None
        self._served: set[socket.socket] = set()
        self._owner = 0
        #: The child's connection to its parent, once it has one.
        self._link: _Link | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Serve the children that are forked from now on, if the system has Unix sockets."""
        if self._arrivals is not None:
            return
        with ExitStack() as undo:
            try:
                arrivals, door = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
                door.settimeout(
                    self._patience
                )  # here, for whether a socket blocks is the same in all processes that share it
                threading.Thread(
                    target=self._accept, args=(arrivals,), name='celery-couchdb-relay', daemon=True
                ).start()
            except (OSError, AttributeError, RuntimeError) as exc:
                logger.debug('the children of the pool store their results themselves: %s', exc)
                return
            undo.pop_all()
        self._arrivals, self._door, self._owner = arrivals, door, os.getpid()

    def write(self, docs: Sequence[Document]) -> list[WriteResult]:
        """Write documents and return the result for each; *raises* what `GroupCommit.write` raises."""
        if self._door is not None and self._owner != os.getpid() and self._lock.acquire(blocking=False):
            try:
                results = self._ask(docs, self._door)
            finally:
                self._lock.release()
            if results is not None:
                return results
        return self._commit.write(docs)

    def reset(self) -> None:
        """Start over, after a fork: what the parent listens to and answers is its own."""
        for end in (self._arrivals, *self._served):
            if end is not None and (number := end.detach()) >= 0:
                os.close(
                    number
                )  # at once: a `close` would wait for the file that reads from it, in a thread that is not here
        self._arrivals, self._served, self._link, self._lock = None, set(), None, threading.Lock()

    # -- in a child

    def _ask(self, docs: Sequence[Document], door: socket.socket) -> list[WriteResult] | None:
        """Let the parent write; return None if it did not, or if that is unknown."""
        link, self._link = self._link, None
        text = dumps(docs).encode()
        try:
            link = link or _Link(door, self._patience)
            found: list[list[str]] | None = json.loads(link.ask(text))
            results = None if found is None else [_result(*fields) for fields in found]
        except (OSError, EOFError, ValueError, TypeError) as exc:
            logger.debug('the parent does not store results: %r', exc)
            return None
        self._link = link  # not after an exception: an answer may be on its way that nobody waits for
        return results

    # -- in the parent

    def _accept(self, arrivals: socket.socket) -> None:
        while arrivals.fileno() >= 0:
            try:
                call, numbers, _, _ = socket.recv_fds(arrivals, 1, 1)
            except OSError as exc:
                logger.debug('no child of the pool is connected: %s', exc)
                time.sleep(_PAUSE_SECONDS)  # not for an event: nobody tells that there is memory again
                continue
            if not call:
                return
            # Without a descriptor there are too many files here, and the child sees its connection closed.
            for end in (socket.socket(fileno=number) for number in numbers):
                self._served.add(end)
                try:
                    threading.Thread(target=self._serve, args=(end,), name='celery-couchdb-relay', daemon=True).start()
                except RuntimeError as exc:
                    logger.debug('a child of the pool stores its results itself: %s', exc)
                    self._served.discard(end)
                    end.close()

    def _serve(self, end: socket.socket) -> None:
        """Answer one child until it is gone."""
        try:
            with end, end.makefile('rb') as incoming:
                end.sendall(_WELCOME)
                while True:
                    _send(end, json.dumps(self._written(_received(incoming))).encode())
        except (OSError, EOFError, ValueError):
            pass  # the child is gone, or has given up and comes again
        finally:
            self._served.discard(end)

    def _written(self, text: bytes) -> list[WriteResult] | None:
        try:
            return self._commit.write(json.loads(text))
        except CouchDBError:
            return None  # the child tries by itself, and learns why it fails


#: What a child sends with its connection, and the parent when it has it.
_WELCOME = b'.'


class _Link:
    """A child's connection. *Every* method raises `OSError` or `EOFError` when it takes longer than `patience` seconds."""

    def __init__(self, door: socket.socket, patience: float) -> None:
        self._end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._end.settimeout(patience)
        self._incoming = self._end.makefile('rb')
        with other:
            socket.send_fds(door, [_WELCOME], [other.fileno()])
            if sys.platform != 'darwin':
                other.close()  # a parent that ends is noticed at once; macOS loses what is closed before it has arrived
            if self._incoming.read(len(_WELCOME)) != _WELCOME:
                raise EOFError

    def ask(self, text: bytes) -> bytes:
        """Send one message and return the answer to it."""
        _send(self._end, text)
        return _received(self._incoming)


def _result(doc_id: str, status: str, rev: str, error: str, reason: str) -> WriteResult:
    return WriteResult(doc_id, WriteStatus(status), rev, error, reason)


def _send(end: socket.socket, text: bytes) -> None:
    end.sendall(len(text).to_bytes(8, 'big') + text)


def _received(incoming: BinaryIO) -> bytes:
    head = incoming.read(8)
    text = incoming.read(int.from_bytes(head, 'big')) if len(head) == 8 else b''
    if not text:
        raise EOFError
    return text
