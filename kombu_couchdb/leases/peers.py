"""The other consumers of a database, and the order in which consumers of one queue claim an item.

The id of an item says which of a queue's consumers claims it first, and in which order the others follow: so consumers that see
the same items seldom claim the same one. A consumer that has no credit leaves the items that it goes first for. The others notice
that, and pass it over until they see that it claims again; nothing is written for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

__all__ = ['Peers', 'Turns', 'queues_of']

Document = dict[str, Any]


def queues_of(doc: Document) -> frozenset[str]:
    """Return the queues that a Consumer document names; none, if somebody spoilt it."""
    queues = doc.get('queues')
    return frozenset(name for name in queues if isinstance(name, str)) if isinstance(queues, list) else frozenset()


class Peers:
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

    def of(self, queue: str, own: str) -> list[str]:
        """Return the ids of a queue's consumers, in an order that all agree on; `own` is one of them."""
        return sorted({own} | {name for name, queues in self._queues.items() if queue in queues})


class Turns:
    """The order in which the consumers of one queue claim an item, as one of them, `own`, sees it."""

    def __init__(self, names: Sequence[str] = ('',), own: str = '', busy: Iterable[str] = ()) -> None:
        self.names, self.own = tuple(names), own
        self.position = self.names.index(own)
        #: Those that were seen to leave to others what they go first for.
        self.busy: set[str] = set()
        self.note(busy=busy)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def idle(self) -> int:
        """How many of them claim what they go first for, as far as is known."""
        return self._idle[-1]

    def note(self, *, busy: Iterable[str] = (), idle: Iterable[str] = ()) -> bool:
        """Note who leaves its items to others, and who claims them; tell whether that is news."""
        before = set(self.busy)
        self.busy = ((self.busy | {*busy}) - {*idle, self.own}) & {*self.names}
        # How many of the first n names are not busy: so the idle ones in any stretch are counted at once.
        self._idle = [0, *accumulate(name not in self.busy for name in self.names)]
        return self.busy != before

    def first(self, doc_id: str) -> str:
        """Return who goes first in claiming this item."""
        return self.names[self._start(doc_id)]

    def first_idle(self, doc_id: str) -> str:
        """Return who of those that are not known to be busy goes first in claiming this item."""
        return next((name for name in self.before(doc_id) if name not in self.busy), self.own)

    def before(self, doc_id: str) -> list[str]:
        """Return those who go before `own` in claiming this item."""
        start, end = self._start(doc_id), self.position
        return list(self.names[start:end] if start <= end else self.names[start:] + self.names[:end])

    def idle_before(self, doc_id: str) -> int:
        """Return how many go before `own`, without those that are known to be busy."""
        start, end = self._start(doc_id), self.position
        between = self._idle[end] - self._idle[start]
        return between if start <= end else self._idle[-1] + between

    def _start(self, doc_id: str) -> int:
        return crc32(doc_id.encode()) % len(self.names)
