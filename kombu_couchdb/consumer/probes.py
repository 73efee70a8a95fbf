"""Probes: messages that a consumer claims out of turn, to find out whether the consumers that come first claim at all.

In a long queue each consumer claims only the messages that it may claim first. The share of a consumer that is busy (it
has no credit, for example) would wait. So from time to time a consumer tries to claim one message of each of the
others. If it succeeds, the other consumer counts as busy, and its share is open to all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..couchdb.client import Document

__all__ = ['STAGGER_SECONDS', 'Candidate', 'Probes']

#: How long a consumer leaves a new message to each of the first few consumers that come before it, in seconds.
STAGGER_SECONDS = 0.1

#: How often a consumer probes in a long queue, in seconds: one message of each of the others.
_PROBE_SECONDS = 1.0


@dataclass(eq=False)
class Candidate:
    """A message that may be claimed; `doc` is None until the document is read."""

    id: str
    #: The priority's rank: 0 is claimed first.
    rank: int
    date: float
    #: How many consumers that are not known to be busy may claim the message before this one.
    turn: int
    #: The monotonic time at which the first consumer may claim the message; the others wait from this time on.
    since: float
    #: The monotonic time before which this consumer does not claim it.
    at: float
    #: The monotonic time at which `doc` was read, or, before that, at which the message was found.
    seen: float
    doc: Document | None = None

    @property
    def order(self) -> tuple[int, int, float, str]:
        """The key by which candidates are sorted."""
        return self.rank, self.turn, self.date, self.id

    def note(self, doc: Document | None) -> None:
        """Set the document, which was read just now."""
        self.doc, self.seen = doc, time.monotonic()


class Probes:
    """Messages of one queue that other consumers may claim first and this one tries; for the I/O thread alone."""

    def __init__(self) -> None:
        self._left: dict[str, Candidate] = {}  # by consumer: a message of it to be tried
        self._tried: dict[str, str] = {}  # by message: the consumer that comes first for it
        self._next_at = float('-inf')

    def clear(self) -> None:
        """Forget all messages."""
        self._left, self._tried = {}, {}

    @property
    def wants_more(self) -> bool:
        """Whether it is time to note messages of the other consumers, see `note`."""
        return time.monotonic() >= self._next_at

    def note(self, consumer: str, candidate: Candidate) -> None:
        """Note a message that is left to another consumer; only the first message for each consumer is kept."""
        self._left.setdefault(consumer, candidate)

    def take(self, count: int) -> list[Candidate]:
        """Return up to `count` messages to be tried now: those that their consumers did not claim in time."""
        now = time.monotonic()
        due = [(name, each) for name, each in self._left.items() if each.since + STAGGER_SECONDS <= now][:count]
        if due:
            self._left, self._next_at = {}, now + _PROBE_SECONDS
        for name, candidate in due:
            candidate.doc = None
            self._tried[candidate.id] = name
        return [candidate for _, candidate in due]

    def won(self, doc_id: str) -> str | None:
        """Note that a message was claimed here; return the consumer that it was left to, None if it was not tried."""
        consumer = self._tried.pop(doc_id, None)
        if consumer is not None:
            self._next_at = float('-inf')  # other consumers may be busy, too
        return consumer

    def lost(self, doc_id: str) -> None:
        """Note that another consumer claimed a message."""
        self._tried.pop(doc_id, None)
