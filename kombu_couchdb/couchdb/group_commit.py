"""Group commit: what several threads write at the same time goes to CouchDB in one request.

Who writes alone sends at once. Who comes while a request is under way waits for its end, and shares the next with all who
came meanwhile. Each returns when its own documents are stored, or raises: no promise is weaker, nobody waits for company.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from weakref import WeakValueDictionary

from ..errors import RETRIED, Conflict, CouchDBError
from .address import Address
from .client import Client, Document
from .fork_safety import Shared, reset_in_child
from .http import encoded
from .write_result import WriteResult, WriteStatus

__all__ = ['GroupCommit']

#: The most documents in one request; who has more does not let others wait for it.
_MOST = 200

#: How often who waits looks whether nobody leads, in seconds: should a thread end so suddenly that it told nobody.
_LOOK = 1.0


class _Entry:
    def __init__(self, docs: Sequence[Document]) -> None:
        self.docs = docs
        #: Encoded by the thread that writes it: what cannot be encoded is its own affair.
        self.texts = [encoded(doc) for doc in docs]
        self.size = sum(map(len, self.texts))
        self.results: list[WriteResult] | None = None
        self.error: BaseException | None = None
        #: What it sends, if it leads.
        self.batch: list[_Entry] = []
        #: Whether its thread has gone on.
        self.left = False

    @property
    def done(self) -> bool:
        return self.results is not None or self.error is not None


class GroupCommit:
    """Writes through one client, for any number of threads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.reset()
        reset_in_child(self)

    @classmethod
    def of(cls, client: Client) -> GroupCommit:
        """Return the one of this process for a database and its timeouts: every thread may have a connection of its own."""
        return _shared.of(
            (client.address, client.timeouts), lambda: cls(Client(client.address, *reversed(client.timeouts)))
        )

    def reset(self) -> None:
        """Start over, after a fork: whoever waited or wrote is the parent's."""
        self._changed = threading.Condition()
        self._pending: list[_Entry] = []
        #: Whose thread sends a request just now.
        self._leader: _Entry | None = None

    def close(self) -> None:
        """Close the idle connections; who goes on to write opens new ones."""
        self._client.close()

    def write(self, docs: Sequence[Document]) -> list[WriteResult]:
        """Write documents and return the result for each, as `Client.bulk` does; *raises* what that raises.

        After `ServerUnavailable` it is unknown which of them are stored.
        """
        if len(docs) > _MOST:
            return self._client.bulk(docs, texts=[encoded(doc) for doc in docs])
        entry = _Entry(docs)
        # A time limit may strike between any two of these lines: whatever happens, the others can go on.
        try:
            with self._changed:
                self._pending.append(entry)
                while self._leader is not None and not entry.done:
                    self._changed.wait(_LOOK)
                if not entry.done:
                    self._leader = entry
                    entry.batch = self._next_batch(entry)
                    self._pending = [other for other in self._pending if other not in entry.batch]
            if not entry.done:
                self._lead(entry.batch)
        finally:
            if self._leader is entry:
                self._leader = None
            self._leave(entry)
        if entry.error is not None:
            raise entry.error
        assert entry.results is not None
        return entry.results

    def _next_batch(self, own: _Entry) -> list[_Entry]:
        """Return what goes in one request; what writes a document that another of them writes waits for the next."""
        batch, ids, size, most = [own], {doc['_id'] for doc in own.docs}, own.size, self._client.request_bytes
        for entry in self._pending:
            its = {doc['_id'] for doc in entry.docs}
            if entry is not own and len(ids) + len(its) <= _MOST and size + entry.size <= most and not ids & its:
                batch, ids, size = [*batch, entry], ids | its, size + entry.size
        return batch

    def _lead(self, batch: list[_Entry]) -> None:
        try:
            self._write(batch)
        except RETRIED as exc:
            for entry in batch:
                entry.error = copy.copy(exc)  # each is raised in a thread of its own
                entry.error.__cause__ = exc.__cause__
        except CouchDBError as exc:  # any other, such as a time limit, is for the thread that it strikes
            if len(batch) == 1:
                batch[0].error = exc
                return
            # What the server refuses in one document it refuses for all in the request: each for itself.
            for entry in batch:
                self._lead([entry])

    def _write(self, batch: list[_Entry]) -> None:
        docs = [doc for entry in batch for doc in entry.docs]
        texts = [text for entry in batch for text in entry.texts]
        results = [self._put(docs[0], texts[0])] if len(docs) == 1 else self._client.bulk(docs, texts=texts)
        for entry in batch:
            entry.results, results = results[: len(entry.docs)], results[len(entry.docs) :]

    def _put(self, doc: Document, text: bytes) -> WriteResult:
        try:
            return WriteResult(doc['_id'], WriteStatus.STORED, self._client.put(doc, text=text))
        except Conflict as exc:
            return WriteResult.conflict(doc['_id'], str(exc))

    def _leave(self, entry: _Entry) -> None:
        """Take back what is not written: of one's own nobody knows any more, and the others are sent by the next."""
        entry.left = True
        with self._changed:
            unsent = [other for other in entry.batch if not other.done and other not in self._pending]
            self._pending = [other for other in unsent + self._pending if not other.left]
            self._changed.notify_all()


#: Those that connections share.
_shared: Shared[tuple[Address, tuple[float, float]], GroupCommit] = Shared(WeakValueDictionary())
