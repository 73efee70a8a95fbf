"""The agenda of the leader: all entries and their states, in memory, ordered by their next due dates."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .entries import Entry, ScheduleState

__all__ = ['Agenda']


class Agenda:
    """The entries and states of one schedule, by name."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.states: dict[str, ScheduleState] = {}
        self._heap: list[tuple[float, str]] = []  # may have dates that have changed since

    def set_state(self, name: str, state: ScheduleState) -> None:
        """Set the state of an entry as it is stored."""
        self.states[name] = state
        if state['due'] is not None:
            heapq.heappush(self._heap, (state['due'], name))

    def remove(self, name: str) -> None:
        """Forget a deleted entry."""
        self.entries.pop(name, None)
        self.states.pop(name, None)

    def next_due(self) -> float | None:
        """Return the earliest due date of all entries."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float, limit: int) -> Iterator[str]:
        """Yield the names of up to `limit` entries that are due, the earliest first.

        The agenda forgets their due dates until `set_state` is called.
        """
        for _ in range(limit):
            due = self.next_due()
            if due is None or due > now:
                return
            yield heapq.heappop(self._heap)[1]

    def _is_current(self, due: float, name: str) -> bool:
        return name in self.entries and name in self.states and self.states[name]['due'] == due
