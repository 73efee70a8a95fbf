"""Queues, exchanges and bindings that a connection declared, and those that existed when it connected."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from ..couchdb.client import Row
from ..documents.ids import QUEUE

__all__ = ['Declarations']

#: Documents that were seen when the connection was established are not read again before they are declared, for this
#: many seconds.
_FRESH_SECONDS = 1.0


class Declarations:
    """What one connection knows without a request. kombu's thread and the I/O thread use it at the same time."""

    def __init__(self) -> None:
        self._docs: dict[str, Mapping[str, Any]] = {}  # what was declared here, by id
        self._deleted: set[str] = set()  # ids of what was declared here and deleted by other processes
        self._seen: dict[str, str] = {}  # revisions, by id
        self._seen_at, self._seen_all = float('-inf'), False

    # -- What the connection declared.

    def add(self, doc: Mapping[str, Any]) -> None:
        """Note that a document was declared."""
        self._docs[doc['_id']] = {name: value for name, value in doc.items() if name != '_rev'}

    def get(self, doc_id: str) -> Mapping[str, Any] | None:
        """Return a document as it was declared here, or None."""
        return self._docs.get(doc_id)

    def all(self) -> list[Mapping[str, Any]]:
        """Return all declared documents."""
        return list(self._docs.values())

    def is_temporary(self, queue: str) -> bool:
        """Tell whether a queue was declared here and has a lifetime."""
        return bool((self.get(QUEUE + queue) or {}).get('lifetime'))

    def remove(self, doc_id: str) -> None:
        """Forget a declaration that was taken back here."""
        self._docs.pop(doc_id, None)
        self._deleted.discard(doc_id)

    def remove_queue(self, queue: str) -> None:
        """Forget the declarations of a queue and its bindings."""
        for doc in self._of_queues({queue}):
            self.remove(doc['_id'])

    def remove_all(self, prefix: str) -> None:
        """Forget the declarations whose ids start with `prefix`."""
        for doc_id in [doc_id for doc_id in list(self._docs) if doc_id.startswith(prefix)]:
            self.remove(doc_id)

    def _of_queues(self, queues: Collection[str]) -> list[Mapping[str, Any]]:
        return [doc for doc in self.all() if _queue_of(doc) in queues]

    # -- What other processes deleted of it.

    def was_deleted(self, doc_id: str) -> None:
        """Note that another process deleted a document. Only temporary queues and their bindings are restored."""
        queue = _queue_of(self._docs.get(doc_id))
        if queue is not None and self.is_temporary(queue):
            self._deleted.add(doc_id)
        self.forget_seen(doc_id)

    def to_restore(self, queues: Collection[str], *, check: bool) -> list[Mapping[str, Any]]:
        """Return the declared documents of the temporary queues among `queues`, if other processes deleted one of them.

        With `check` they are returned in any case.
        """
        if not (check or self._deleted):
            return []
        docs = self._of_queues({queue for queue in queues if self.is_temporary(queue)})
        return docs if check or any(doc['_id'] in self._deleted for doc in docs) else []

    def were_restored(self, docs: Collection[Mapping[str, Any]]) -> None:
        """Note that documents are stored again."""
        self._deleted -= {doc['_id'] for doc in docs}

    # -- What the connection saw when it was established.

    def saw(self, rows: Collection[Row], at: float, limit: int) -> None:
        """Take in up to `limit` rows of `_all_docs` that were read from the monotonic time `at` on."""
        self._seen_all = len(rows) < limit
        self._seen = {row['id']: row['value']['rev'] for row in rows}
        self._seen_at = at

    @property
    def is_fresh(self) -> bool:
        """Whether what was seen is still trusted."""
        return time.monotonic() - self._seen_at < _FRESH_SECONDS

    @property
    def saw_all(self) -> bool:
        """Whether a document that was not seen does not exist."""
        return self._seen_all and self.is_fresh

    def seen(self, doc_id: str) -> str | None:
        """Return the revision of a document that was seen a moment ago, or None."""
        return self._seen.get(doc_id) if self.is_fresh else None

    def forget_seen(self, doc_id: str) -> None:
        """Forget that a document was seen: it was deleted."""
        self._seen.pop(doc_id, None)


def _queue_of(doc: Mapping[str, Any] | None) -> Any:
    """Return the name of the queue that a Queue or a Binding is about; None for an Exchange, and for None."""
    return doc.get('queue', doc['name'] if doc['type'] == 'Queue' else None) if doc else None
