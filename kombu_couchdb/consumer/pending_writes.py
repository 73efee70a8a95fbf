"""Pending writes: decisions about messages that are not written yet. kombu's thread adds, the I/O thread writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..couchdb.client import Document
from ..couchdb.write_result import WriteResult
from ..documents import dead_letter, workitem
from ..log import get_logger
from .wakeup import Wakeup

__all__ = ['PendingWrite', 'PendingWrites']

logger = get_logger(__name__)

#: A document to be written, and the function that takes the result of the write.
PendingWrite = tuple[Mapping[str, Any], Callable[[WriteResult], None]]


class PendingWrites:
    """The documents to be written. If a publisher or an operator changes one before, its write is made again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: Wakes the I/O thread: it has work.
        self.wakeup = Wakeup()
        self._writes: list[PendingWrite] = []
        self._released: list[Document] = []
        #: Messages whose writes were in conflict, as they were claimed, with the change to be made.
        self._changed: list[tuple[Document, Callable[[Document], Mapping[str, Any]]]] = []
        #: The ids of messages with a decision that CouchDB has not confirmed yet.
        self._unstored: set[str] = set()

    @property
    def unwritten(self) -> bool:
        """Whether a decision is not written, or not for certain."""
        return bool(self._writes or self._unstored or self._changed)

    def add_write(self, claimed: Document, change: Callable[[Document], Mapping[str, Any]]) -> None:
        """Add the write of `change(claimed)`, for a message that this consumer does not hold any more."""
        with self._lock:
            self._unstored.add(claimed['_id'])
            self._add(claimed, change)

    def take_writes(self) -> list[PendingWrite]:
        """Return the pending writes and forget them: the caller writes them, or calls `return_writes`."""
        with self._lock:
            pending, self._writes = self._writes, []
            return pending

    def return_writes(self, pending: list[PendingWrite]) -> None:
        """Put back writes that got no response: CouchDB may have stored them."""
        with self._lock:
            # If CouchDB has stored a write, the second attempt conflicts with the first: that needs no warning. For a
            # unique job the conflict may also come from a publisher that has changed the job: then the job is read
            # again.
            again: list[PendingWrite] = [
                (doc, react if workitem.is_unique(doc) else lambda result, doc=doc: self._unstored.discard(doc['_id']))  # type: ignore[misc]
                for doc, react in pending
            ]
            self._writes = again + self._writes

    def retry_changed(self, fetch: Callable[[list[str]], list[Document | None]]) -> None:
        """Read the messages that others have changed, and add the writes for those that this consumer still holds.

        A publisher changes a unique job, and an operator marks a message as removed. For the I/O thread. `fetch(ids)`
        reads documents; *raises* what it raises, and can then be called again.
        """
        changed = list(self._changed)
        found = fetch([doc['_id'] for doc, _ in changed]) if changed else []
        with self._lock:
            del self._changed[: len(changed)]
            for (doc, change), current in zip(changed, found, strict=True):
                if current is not None and current.get('claimed') == doc['claimed']:
                    self._add(current, change)
                    continue
                self._unstored.discard(doc['_id'])
                # If a unique job has another task now, or is deleted, an earlier attempt to write the decision was
                # stored. Other messages are read here only if their first write was in conflict.
                if workitem.is_unique(doc) and (current is None or workitem.task_id(current) != workitem.task_id(doc)):
                    continue
                logger.warning(
                    'this consumer lost its claim of message %s before the outcome was stored: it may run again',
                    doc['_id'],
                )

    def take_released(self) -> list[Document]:
        """Return the messages whose release was stored since the last call, with their new revisions."""
        released, self._released = self._released, []
        return released

    def _add(self, claimed: Document, change: Callable[[Document], Mapping[str, Any]]) -> None:
        doc = change(claimed)
        self._writes.append((doc, lambda result: self._on_result(claimed, change, doc, result)))

    def _on_result(
        self,
        claimed: Document,
        change: Callable[[Document], Mapping[str, Any]],
        doc: Mapping[str, Any],
        result: WriteResult,
    ) -> None:
        if result.is_conflict:
            self._changed.append((claimed, change))
            self.wakeup.set()
            return
        self._unstored.discard(doc['_id'])
        if result.is_refused:
            logger.error('the outcome of message %s cannot be stored: %s', doc['_id'], result.reason)
        elif result.is_stored:
            written = dead_letter.apart(doc)[-1] if doc.get('status') else doc
            if workitem.is_waiting(written):
                self._released.append({**written, '_rev': result.rev})
