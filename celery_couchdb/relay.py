"""How the children of a prefork pool store results: through the worker's process, which writes those of several in one request.

Each child has but one result at a time, and a request for each is what limits such a worker. So a child hands its documents
to its parent over a Unix socket and waits for the answer, as it would wait for CouchDB: when it goes on, they are stored.
Whatever goes wrong between the two, the child writes by itself, after some seconds at the most; a document that the parent
has stored all the same then stands in conflict with itself, which the store looks into anyway.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import BinaryIO

from kombu.log import get_logger
from kombu.utils.json import dumps

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.group_commit import GroupCommit

from .documents import Document

__all__ = ['Relay']

logger = get_logger(__name__)

#: How many children may wait to be connected.
_BACKLOG = 128

#: How long the parent waits when it cannot take another connection, in seconds.
_PAUSE = 1.0


class Relay:
    """Writes documents by a group commit: in the process that opened it, and for its children. `patience` is in seconds."""

    def __init__(self, commit: GroupCommit, patience: float) -> None:
        self._commit, self._patience = commit, patience
        self._listener: socket.socket | None = None
        self._served: set[socket.socket] = set()
        self._address: str | None = None
        self._owner = 0
        #: The child's connection to its parent, once it has one.
        self._link: _Link | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Serve the children that are forked from now on, if the system has Unix sockets."""
        if self._listener is not None:
            return
        with ExitStack() as undo:
            try:
                folder = tempfile.mkdtemp(prefix='celery-couchdb-')  # only this user can enter it
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
                address = os.path.join(folder, 'results')
                listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(address)
                listener.listen(_BACKLOG)
                threading.Thread(target=self._accept, args=(listener,), name='celery-couchdb-relay', daemon=True).start()
            except (OSError, AttributeError, RuntimeError) as exc:
                logger.debug('the children of the pool store their results themselves: %s', exc)
                return
            undo.pop_all()
        self._listener, self._address, self._owner = listener, address, os.getpid()
        atexit.register(self._tidy, folder, self._owner)

    def write(self, docs: Sequence[Document]) -> list[Document]:
        """Write documents and return CouchDB's answer for each; *raises* what `GroupCommit.write` raises."""
        if self._address is not None and self._owner != os.getpid() and self._lock.acquire(blocking=False):
            try:
                answers = self._ask(docs, self._address)
            finally:
                self._lock.release()
            if answers is not None:
                return answers
        return self._commit.write(docs)

    def reset(self) -> None:
        """Start over, after a fork: what the parent listens to and answers is its own."""
        for end in (self._listener, *self._served):
            if end is not None and (number := end.detach()) >= 0:
                os.close(number)  # at once: a `close` would wait for the file that reads from it, in a thread that is not here
        self._listener, self._served, self._link, self._lock = None, set(), None, threading.Lock()

    @staticmethod
    def _tidy(folder: str, owner: int) -> None:
        if owner == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)

    # -- in a child

    def _ask(self, docs: Sequence[Document], address: str) -> list[Document] | None:
        """Let the parent write; return None if it did not, or if that is unknown."""
        link, self._link = self._link, None
        text = dumps(docs).encode()
        try:
            link = link or _Link(address, self._patience)
            answers: list[Document] | None = json.loads(link.ask(text))
        except (OSError, EOFError, ValueError) as exc:
            logger.debug('the parent does not store results: %r', exc)
            return None
        self._link = link  # not after an exception: an answer may be on its way that nobody waits for
        return answers

    # -- in the parent

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                with ExitStack() as undo:
                    end = undo.enter_context(listener.accept()[0])
                    self._served.add(end)
                    undo.callback(self._served.discard, end)
                    threading.Thread(target=self._serve, args=(end,), name='celery-couchdb-relay', daemon=True).start()
                    undo.pop_all()
            except (OSError, RuntimeError) as exc:  # too many files or threads: the children do not wait for ever
                logger.debug('a child of the pool stores its results itself: %s', exc)
                time.sleep(_PAUSE)

    def _serve(self, end: socket.socket) -> None:
        """Answer one child until it is gone."""
        try:
            with end, end.makefile('rb') as incoming:
                while True:
                    _send(end, json.dumps(self._written(_received(incoming))).encode())
        except (OSError, EOFError, ValueError):
            pass  # the child is gone, or has given up and comes again
        finally:
            self._served.discard(end)

    def _written(self, text: bytes) -> list[Document] | None:
        try:
            return self._commit.write(json.loads(text))
        except CouchDBError:
            return None  # the child tries by itself, and learns why it fails


class _Link:
    """A child's connection. *Every* method raises `OSError` or `EOFError` when it takes longer than `patience` seconds."""

    def __init__(self, address: str, patience: float) -> None:
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._end.settimeout(patience)
        self._end.connect(address)
        self._incoming = self._end.makefile('rb')

    def ask(self, text: bytes) -> bytes:
        """Send one message and return the answer to it."""
        _send(self._end, text)
        return _received(self._incoming)


def _send(end: socket.socket, text: bytes) -> None:
    end.sendall(len(text).to_bytes(8, 'big') + text)


def _received(incoming: BinaryIO) -> bytes:
    head = incoming.read(8)
    text = incoming.read(int.from_bytes(head, 'big')) if len(head) == 8 else b''
    if not text:
        raise EOFError
    return text
