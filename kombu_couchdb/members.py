"""Who else consumes: the Consumer documents that are known, and one's own place among those of a queue."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ['CONSUMER', 'Members', 'queues_of']

Document = dict[str, Any]

#: The ids of Consumer documents start with this.
CONSUMER = 'broker:consumer:'


def queues_of(doc: Document) -> frozenset[str]:
    """Return the queues that a Consumer document names; none, if somebody spoilt it."""
    queues = doc.get('queues')
    return frozenset(name for name in queues if isinstance(name, str)) if isinstance(queues, list) else frozenset()


class Members:
    """The living consumers of a database, as far as is known."""

    def __init__(self) -> None:
        self._queues: dict[str, frozenset[str]] = {}

    def seen(self, doc: Document) -> None:
        """Take in a Consumer document that was written or deleted."""
        if doc.get('_deleted'):
            self._queues.pop(doc['_id'], None)
        else:
            self._queues[doc['_id']] = queues_of(doc)

    def keep(self, living: Collection[str]) -> None:
        """Forget all but these ids."""
        self._queues = {name: queues for name, queues in self._queues.items() if name in living}

    def place(self, own: str, queue: str) -> tuple[int, int]:
        """Return the position of consumer `own` among those of a queue, and how many they are, itself included."""
        names = sorted({own} | {name for name, queues in self._queues.items() if queue in queues})
        return names.index(own), len(names)
