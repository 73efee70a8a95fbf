"""The claim order of one queue: which consumers may claim a message first, which of them do, and the wait for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..design.rows import WaitingRow
from ..leases.peers import Turns
from .probes import STAGGER_SECONDS
from .runs import Runs

__all__ = ['ClaimOrder']

#: A consumer waits before it claims a message that other consumers (not counting busy ones) may claim first:
#: `STAGGER_SECONDS` for each of the first `_MAX_STAGGERED` of them, and `_MOMENT_SECONDS` for each further one. So they
#: do not all try it at once.
_MAX_STAGGERED, _MOMENT_SECONDS = 5, 0.01

#: The number of further consumers after which the moments start again at zero, so that no consumer waits longer than
#: 0.8 seconds: any member of the database may write Consumer documents that have no consumer.
_MAX_MOMENTS = 30

#: In a queue with more consumers than this, those that were never seen to claim anything count as busy (see
#: `peers.Turns`).
_MANY_CONSUMERS = 64


class ClaimOrder:
    """The turns of the consumers of a queue, and the runs of its messages; for the I/O thread alone."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._runs = Runs()
        self._of_runs: dict[str, tuple[int, float]] = {}  # by the key of a run, see `of`
        #: The other consumers that have claimed a message, or may have claimed one that this consumer lost.
        self._seen_claiming: set[str] = set()

    def set_consumers(self, own: str, names: Sequence[str]) -> None:
        """Set the consumers of the queue: `names`, with this consumer (`own`) among them."""
        self._seen_claiming &= {*names}
        unseen = {*names} - self._seen_claiming if len(names) > _MANY_CONSUMERS else set[str]()
        self.turns, self._of_runs = Turns(names, own, self.turns.busy | unseen), {}

    def won(self, doc_id: str, left_to: str | None) -> bool:
        """Note that this consumer claimed a message: those that could claim it first count as busy.

        `left_to` is the only one of them if the message was a probe. Tell whether that changed the order.
        """
        return self._note(busy=self.before(doc_id) if left_to is None else [left_to])

    def lost(self, doc_id: str, to: str | None) -> bool:
        """Note that another consumer (`to`, if it is known) claimed a message; tell whether that changed the order."""
        before = [to] if to else self.before(doc_id)
        # Without `to`, any consumer that comes before this one may have claimed it. If they are many, only the first
        # one stops counting as busy; later claims show whether others should.
        idle = before if len(before) <= _MAX_STAGGERED else before[:1]
        self._seen_claiming.update(idle)
        return len(self.turns) > 1 and self._note(idle=idle)

    def _note(self, *, busy: Collection[str] = (), idle: Collection[str] = ()) -> bool:
        if not self.turns.note(busy=busy, idle=idle):
            return False
        self._of_runs = {}
        return True

    def read(self, rows: Sequence[WaitingRow]) -> None:
        """Divide the rows of a page into runs."""
        self._runs.read(rows, len(self.turns))
        self._of_runs = {}

    def clear(self) -> None:
        """Forget all messages."""
        self._runs.clear()
        self._of_runs = {}

    def of(self, doc_id: str) -> tuple[int, float]:
        """Return how many idle consumers may claim a message before this one, and the wait for them in seconds."""
        key = self._runs.key(doc_id)
        if key not in self._of_runs:
            turn = self.turns.idle_before(key)
            found = turn, self._wait(key, turn)
            if key == doc_id:
                return found
            self._of_runs[key] = found
        return self._of_runs[key]

    def before(self, doc_id: str) -> list[str]:
        """Return the consumers that may claim this message before this one, in order."""
        return self.turns.before(self._runs.key(doc_id))

    def first_idle(self, doc_id: str) -> str:
        """Return the consumer that may claim this message first of those that are not known to be busy."""
        return self.turns.first_idle(self._runs.key(doc_id))

    def _wait(self, key: str, turn: int) -> float:
        if not turn:
            # The consumer that may claim first counts as busy, perhaps wrongly. Give it a moment to claim the message
            # and so prove that it is not busy.
            return _MOMENT_SECONDS if self.turns.busy and self.turns.first(key) in self.turns.busy else 0.0
        return (
            min(turn, _MAX_STAGGERED) * STAGGER_SECONDS + max(0, turn - _MAX_STAGGERED) % _MAX_MOMENTS * _MOMENT_SECONDS
        )
