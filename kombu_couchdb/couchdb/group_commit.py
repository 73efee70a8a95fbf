"""Group commit: writes of several threads at the same time share one request to CouchDB.

A thread sends its request at once if no other request is in progress. Otherwise it waits for the end of that request,
and one of the waiting threads then sends the documents of all of them. `write` returns after the thread's own documents
are stored, or raises. Therefore the guarantees are those of a separate request, and no thread waits for others to join.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from ..errors import RETRIED, CouchDBError
from .address import Address
from .bulk import BATCH_DOCS
from .call import HTTPOptions
from .client import Client
from .fork_safety import Shared, reset_in_child
from .http import encoded
from .pacing import RequestKind
from .write_result import WriteResult

#: Seconds after which a waiting thread checks whether another thread still sends, in case that ended without
#: notification.
_CHECK_SECONDS = 1.0


class _Entry:
    """The documents of one call of `write`."""

    def __init__(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes]) -> None:
        self.docs, self.texts = docs, texts
        self.size = sum(map(len, self.texts))
        #: Its results or its error, when it is done.
        self.results: list[WriteResult] = []
        self.error: BaseException | None = None
        self.done = False
        #: The entries in the request that this entry's thread sends.
        self.batch: list[_Entry] = []
        #: Whether its thread has left `write`.
        self.abandoned = False


class GroupCommit:
    """Writes documents of any number of threads through one client: as `Client.bulk` does, or as `create_once`."""

    def __init__(self, client: Client, *, once: bool = False) -> None:
        self._client, self._once = client, once
        self.reset()
        reset_in_child(self)

    @classmethod
    def of_new(cls, client: Client) -> GroupCommit:
        """Return this process's object for new documents with the database and options of `client`.

        All its clients share it.
        """
        return _shared.of(
            (client.address, client.options),
            lambda: cls(Client(client.address, client.options), once=True),
        )

    def reset(self) -> None:
        """Discard pending writes in a forked child: they belong to threads of the parent."""
        self._changed = threading.Condition()
        self._pending: list[_Entry] = []
        #: The entry whose thread sends a request at present.
        self._sender: _Entry | None = None

    def close(self) -> None:
        """Close idle connections. Later writes open new ones."""
        self._client.close()

    def write(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes] | None = None) -> list[WriteResult]:
        """Write documents and return the result for each, in the same order.

        `texts` are the documents as JSON, if the caller has encoded them.

        *Raises* the errors of `Client.bulk`; after `ServerUnavailable` it is unknown which documents are stored.
        """
        # Encoded in this thread, so that it alone gets the error if a document cannot be encoded.
        texts = [encoded(doc) for doc in docs] if texts is None else texts
        if len(docs) > BATCH_DOCS:  # it is sent alone, while others go on
            return self._write(docs, texts)
        entry = _Entry(docs, texts)
        # A task's time limit may raise an exception between any two of these lines. Other threads must be able to write
        # after that.
        try:
            with self._changed:
                self._pending.append(entry)
                while self._sender is not None and not entry.done:
                    self._changed.wait(_CHECK_SECONDS)
                if not entry.done:
                    self._sender = entry
                    entry.batch = self._take_batch(entry)
            if not entry.done:
                self._send(entry.batch)
        finally:
            if self._sender is entry:
                self._sender = None
            self._finish(entry)
        if entry.error is not None:
            raise entry.error
        return entry.results

    def _take_batch(self, own: _Entry) -> list[_Entry]:
        """Take the entries for one request. Two entries with the same document are written in different requests."""
        self._pending.remove(own)
        if not self._pending:
            return [own]
        batch, ids, size, max_size = [own], {doc['_id'] for doc in own.docs}, own.size, self._client.request_size.bytes
        pace = self._client.pace
        most = min(BATCH_DOCS, pace.most(RequestKind.WRITE)) if pace else BATCH_DOCS
        for entry in self._pending:
            new = {doc['_id'] for doc in entry.docs}
            fits = len(ids) + len(new) <= most and size + entry.size <= max_size
            if fits and not ids & new:
                batch, ids, size = [*batch, entry], ids | new, size + entry.size
        self._pending = [entry for entry in self._pending if entry not in batch]
        return batch

    def _send(self, batch: list[_Entry]) -> None:
        docs, texts = list[Mapping[str, Any]](), list[bytes]()
        for entry in batch:
            docs += entry.docs
            texts += entry.texts
        try:
            results = self._write(docs, texts)
        except RETRIED as exc:
            for entry in batch:
                entry.error = copy.copy(exc)  # a copy for each thread, which adds its own traceback
                entry.error.__cause__ = exc.__cause__
                entry.done = True
        except CouchDBError as exc:  # other exceptions, such as a task's time limit, concern this thread only
            if len(batch) == 1:
                batch[0].error, batch[0].done = exc, True
                return
            # CouchDB refuses a whole request because of one document: send each entry alone.
            for entry in batch:
                self._send([entry])
        else:
            for entry in batch:
                entry.results, results = results[: len(entry.docs)], results[len(entry.docs) :]
                entry.done = True

    def _write(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes]) -> list[WriteResult]:
        return (self._client.create_once if self._once else self._client.bulk)(docs, texts=texts)

    def _finish(self, entry: _Entry) -> None:
        """Remove an entry when its thread leaves `write`; return unwritten entries of its batch to the next sender."""
        entry.abandoned = True
        with self._changed:
            if not entry.done or len(entry.batch) > 1:
                unsent = [other for other in entry.batch if not other.done and other not in self._pending]
                self._pending = [other for other in unsent + self._pending if not other.abandoned]
            self._changed.notify_all()


#: The objects of this process, see `GroupCommit.of_new`.
_shared: Shared[tuple[Address, HTTPOptions], GroupCommit] = Shared(WeakValueDictionary())
