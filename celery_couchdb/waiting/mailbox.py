"""A mailbox: documents for one waiting thread, from the subscriber's thread."""

from __future__ import annotations

import threading
from collections import deque

from kombu_couchdb.errors import CouchDBError

from ..results.documents import Document

__all__ = ['Mailbox']


class Mailbox:
    """Documents for one waiting thread, from the subscriber's thread."""

    def __init__(self) -> None:
        self._items: deque[Document | CouchDBError] = deque()
        self._condition = threading.Condition()
        self._revs: dict[str, str] = {}
        self._interrupted = False

    def deliver(self, item: Document | CouchDBError) -> None:
        """Put in a document, unless the same revision was delivered before; or the error that prevents delivery."""
        if isinstance(item, dict):
            if self._revs.get(item['_id']) == item['_rev']:
                return
            self._revs[item['_id']] = item['_rev']
        with self._condition:
            self._items.append(item)
            self._condition.notify()

    def interrupt(self) -> None:
        """End a running `receive` early, or else the next one."""
        with self._condition:
            self._interrupted = True
            self._condition.notify()

    def receive(self, timeout: float | None) -> list[Document]:
        """Return the delivered documents, waiting up to `timeout` seconds for the first.

        *Raises* a delivered error once no document is left to return.
        """
        with self._condition:
            if not self._items and not self._interrupted:
                self._condition.wait(timeout)
            self._interrupted = False
            items = list(self._items)
            self._items.clear()
        docs = [item for item in items if isinstance(item, dict)]
        errors = [item for item in items if not isinstance(item, dict)]
        if errors and not docs:
            raise errors[0]
        with self._condition:
            self._items.extendleft(errors[:1])  # the next call raises it, after these documents
        return docs

    def forget_revision(self, doc_id: str) -> None:
        """Forget which revision of a document was delivered: nothing watches it any more."""
        self._revs.pop(doc_id, None)
