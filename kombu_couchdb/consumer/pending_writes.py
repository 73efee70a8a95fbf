"""Decisions about held messages that are not written yet: the half of the ledger that the I/O thread empties."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..couchdb.client import Document
from ..couchdb.write_result import WriteResult
from ..documents import workitem
from ..log import get_logger
from .wakeup import Wakeup

__all__ = ['Change', 'PendingWrites']

logger = get_logger(__name__)

#: A document to be written, and the function that takes the result of the write.
Change = tuple[Mapping[str, Any], Callable[[WriteResult], None]]


class PendingWrites:
    """The changes to be written, and what becomes of those that publishers of unique jobs are in conflict with."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: Wakes the I/O thread: there is something to do.
        self.wakeup = Wakeup()
        self._outbox: list[Change] = []
        self._returned: list[Document] = []
        #: Unique jobs that others have changed, with what was decided about them.
        self._conflicted: list[tuple[Document, Callable[[Document], Mapping[str, Any]]]] = []
        self._settling: set[str] = set()  # ids of items that are settled here, and not in the database for certain

    @property
    def unwritten(self) -> bool:
        """Whether anything is to be written, or not in the database for certain."""
        return bool(self._outbox or self._settling or self._conflicted)

    def decide(self, held: Document, change: Callable[[Document], Mapping[str, Any]]) -> None:
        """Have `change(held)` written, for an item that is held no more."""
        with self._lock:
            self._settling.add(held['_id'])
            self._write(held, change)

    def take_writes(self) -> list[Change]:
        """Return what is to be written; it is the caller's now."""
        with self._lock:
            outbox, self._outbox = self._outbox, []
            return outbox

    def return_writes(self, outbox: list[Change]) -> None:
        """Take back what could not be written, or not for certain."""
        with self._lock:
            # What was stored already conflicts with itself when it is sent again: that is no news.
            # A unique job may also conflict since a publisher has changed it: it is read again.
            again: list[Change] = [
                (doc, react if workitem.is_unique(doc) else lambda result, doc=doc: self._settling.discard(doc['_id']))  # type: ignore[misc]
                for doc, react in outbox
            ]
            self._outbox = again + self._outbox

    def resettle(self, fetch: Callable[[list[str]], list[Document | None]]) -> None:
        """Decide again about unique jobs that publishers have changed while they were held, as they are now.

        `fetch(ids)` reads documents, in the I/O thread; *raises* what it raises, and can then be called again.
        """
        conflicted = list(self._conflicted)
        found = fetch([doc['_id'] for doc, _ in conflicted]) if conflicted else []
        with self._lock:
            del self._conflicted[: len(conflicted)]
            for (doc, change), now in zip(conflicted, found, strict=True):
                if now is not None and now.get('claimed') == doc['claimed']:
                    self._write(now, change)
                else:
                    self._settling.discard(doc['_id'])
                    if now is not None and workitem.task_id(now) == workitem.task_id(
                        doc
                    ):  # else our own earlier try was stored
                        logger.warning('unique job %s had been taken from this consumer before it was done', doc['_id'])

    def take_returned(self) -> list[Document]:
        """Return the items that were given back to their queues since the last call, as they stand now."""
        returned, self._returned = self._returned, []
        return returned

    def _write(self, held: Document, change: Callable[[Document], Mapping[str, Any]]) -> None:
        doc = change(held)
        self._outbox.append((doc, lambda result: self._settled(held, change, doc, result)))

    def _settled(
        self,
        held: Document,
        change: Callable[[Document], Mapping[str, Any]],
        doc: Mapping[str, Any],
        result: WriteResult,
    ) -> None:
        if result.is_conflict and 'key' in held:
            self._conflicted.append((held, change))
            self.wakeup.set()
            return
        self._settling.discard(doc['_id'])
        if result.is_conflict:
            logger.warning(
                'message %s had been taken from this consumer before it was done with it (%s)',
                doc['_id'],
                result.reason,
            )
        elif result.is_refused:
            logger.error('the outcome of message %s cannot be stored: %s', doc['_id'], result.reason)
        elif workitem.is_waiting(doc):
            self._returned.append({**doc, '_rev': result.rev})
