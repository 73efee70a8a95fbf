"""The other consumers of a database, and which of them listen to its changes feed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import Any
from zlib import crc32

Document = dict[str, Any]


def queues_of(doc: Document) -> frozenset[str]:
    """Return the queues that a Consumer document names; none if the document is malformed."""
    queues = doc.get('queues')
    return frozenset(name for name in queues if isinstance(name, str)) if isinstance(queues, list) else frozenset()


#: How many consumers of each queue listen, and the most listeners of a database that are chosen so. With many queues,
#: fewer of each queue listen, but at least one: each listener costs CouchDB 0.4 ms for each update of the database.
_PER_QUEUE, _MAX_LISTENERS = 2, 12

#: For how long a consumer is new, in seconds.
_NEW_SECONDS = 5.0


class Peers:
    """The known living consumers of a database, with their queues."""

    def __init__(self) -> None:
        self._queues: dict[str, frozenset[str]] = {}
        self._listeners: list[str] | None = None
        #: When the new ones were first seen, by the monotonic clock.
        self._new: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def seen(self, doc: Document) -> None:
        """Take in a Consumer document that was written or deleted."""
        if doc.get('_deleted'):
            self._queues.pop(doc['_id'], None)
            self._new.pop(doc['_id'], None)
        else:
            if doc['_id'] not in self._queues:
                self._new[doc['_id']] = time.monotonic()
            self._queues[doc['_id']] = queues_of(doc)
        self._listeners = None

    def keep(self, living: Collection[str]) -> None:
        """Forget all consumers but those with these ids."""
        self._queues = {name: queues for name, queues in self._queues.items() if name in living}
        self._new = {name: since for name, since in self._new.items() if name in living}
        self._listeners = None

    def to_read(self, living: Collection[str]) -> list[str]:
        """Return those of these ids whose documents must be read: unknown ones, and once more the new ones.

        A consumer that starts names its queues one after the other.
        """
        wanted = sorted({*living} - self._queues.keys() | self._new.keys())
        before = time.monotonic() - _NEW_SECONDS
        self._new = {name: since for name, since in self._new.items() if since > before}
        return wanted

    def set_own(self, own: str, queues: Collection[str]) -> None:
        """Take in the queues of this consumer itself, `own`."""
        if self._queues.get(own) != frozenset(queues):
            self._queues[own], self._listeners = frozenset(queues), None

    @property
    def listeners(self) -> list[str]:
        """The ids of the consumers that listen to the queues that several consumers share, by rank.

        All consumers that know of the same consumers choose the same: first those with the most queues.
        """
        if self._listeners is None:
            count = Counter(queue for queues in self._queues.values() for queue in queues)
            shared = {
                name: {queue for queue in queues if count[queue] > 1} for name, queues in sorted(self._queues.items())
            }
            ranked = sorted(shared, key=lambda name: (-len(shared[name]), crc32(name.encode())))
            for per_queue in range(_PER_QUEUE, 0, -1):
                self._listeners, served = [], Counter[str]()
                for name in ranked:
                    if any(served[queue] < per_queue for queue in shared[name]):
                        self._listeners.append(name)
                        served.update(shared[name])
                if len(self._listeners) <= _MAX_LISTENERS:
                    break
        return self._listeners or []

    def listeners_of(self, queue: str) -> list[str]:
        """Return the sorted ids of the listeners of a queue."""
        return sorted(name for name in self.listeners if queue in self._queues[name])

    def is_shared(self, queue: str, own: str) -> bool:
        """Tell whether other consumers than `own` serve this queue."""
        return any(queue in queues for name, queues in self._queues.items() if name != own)

    def of(self, queue: str, own: str) -> list[str]:
        """Return the sorted ids of a queue's consumers, with `own`: all consumers sort them in the same way."""
        return sorted({own} | {name for name, queues in self._queues.items() if queue in queues})
