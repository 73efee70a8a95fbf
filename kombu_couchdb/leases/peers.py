"""The other consumers of a database, and the order in which the consumers of a queue may claim a message.

The id of a message says which of the queue's consumers claims it first, and in which order the others follow. So
consumers that read the same candidates rarely claim the same message.

A consumer without prefetch credit does not claim the messages that it may claim first. If another consumer waits and
then claims such a message itself, it counts the first consumer as *busy*. It does not wait for a busy consumer until it
sees that the busy consumer has claimed a message again. Nothing is written for this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

__all__ = ['Peers', 'Turns', 'queues_of']

Document = dict[str, Any]


def queues_of(doc: Document) -> frozenset[str]:
    """Return the queues that a Consumer document names; none if the document is malformed."""
    queues = doc.get('queues')
    return frozenset(name for name in queues if isinstance(name, str)) if isinstance(queues, list) else frozenset()


class Peers:
    """The known living consumers of a database, with their queues."""

    def __init__(self) -> None:
        self._queues: dict[str, frozenset[str]] = {}

    def seen(self, doc: Document) -> None:
        """Take in a Consumer document that was written or deleted."""
        if doc.get('_deleted'):
            self._queues.pop(doc['_id'], None)
        else:
            self._queues[doc['_id']] = queues_of(doc)

    def keep(self, living: Collection[str]) -> None:
        """Forget all consumers but those with these ids."""
        self._queues = {name: queues for name, queues in self._queues.items() if name in living}

    def of(self, queue: str, own: str) -> list[str]:
        """Return the sorted ids of a queue's consumers, with `own`: all consumers sort them in the same way."""
        return sorted({own} | {name for name, queues in self._queues.items() if queue in queues})


class Turns:
    """The order in which the consumers `names` of one queue may claim a message, for the consumer `own` among them."""

    def __init__(self, names: Sequence[str] = ('',), own: str = '', busy: Iterable[str] = ()) -> None:
        self.names, self.own = tuple(names), own
        self.position = self.names.index(own)
        #: Consumers that did not claim messages which they could claim first; the others count as idle.
        self.busy: set[str] = set()
        self.note(busy=busy)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def idle(self) -> int:
        """The number of consumers that are not known to be busy."""
        return self._idle[-1]

    def note(self, *, busy: Iterable[str] = (), idle: Iterable[str] = ()) -> bool:
        """Note which consumers leave messages to others (`busy`) or claim (`idle`); tell whether `busy` changed."""
        before = set(self.busy)
        self.busy = ((self.busy | {*busy}) - {*idle, self.own}) & {*self.names}
        # For each n, how many of the first n names are idle. A difference is the number of idle ones in a range.
        self._idle = [0, *accumulate(name not in self.busy for name in self.names)]
        return self.busy != before

    def first(self, doc_id: str) -> str:
        """Return the consumer that may claim this message first."""
        return self.names[self._start(doc_id)]

    def first_idle(self, doc_id: str) -> str:
        """Return the consumer that may claim this message first of those that are not known to be busy."""
        return next((name for name in self.before(doc_id) if name not in self.busy), self.own)

    def before(self, doc_id: str) -> list[str]:
        """Return the consumers that may claim this message before `own`, in order."""
        start, end = self._start(doc_id), self.position
        return list(self.names[start:end] if start <= end else self.names[start:] + self.names[:end])

    def idle_before(self, doc_id: str) -> int:
        """Return the number of consumers before `own` that are not known to be busy; 0: `own` claims first."""
        start, end = self._start(doc_id), self.position
        between = self._idle[end] - self._idle[start]
        return between if start <= end else self._idle[-1] + between

    def _start(self, doc_id: str) -> int:
        return crc32(doc_id.encode()) % len(self.names)
