"""Due times: when something is to be done again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

_Key = TypeVar('_Key')


class DueTimes(Generic[_Key]):
    """The monotonic times at which things are due. A thing has one time: the last one replaces those before."""

    def __init__(self) -> None:
        self._at: dict[_Key, float] = {}
        #: All times, the next one first, also those that were replaced.
        self._heap: list[tuple[float, _Key]] = []

    def put(self, keys: Iterable[_Key], seconds: float) -> None:
        """Let things be due after so many seconds."""
        at = time.monotonic() + seconds
        for key in keys:
            self._at[key] = at
            heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + 100:  # most of them were replaced
            self._heap = sorted((at, key) for key, at in self._at.items())

    def discard(self, key: _Key) -> None:
        """Forget the time of a thing, if it has one."""
        self._at.pop(key, None)

    def take(self) -> list[_Key]:
        """Return what is due, the first one first, and forget its times."""
        due, now = list[_Key](), time.monotonic()
        while self.next_at <= now:
            due.append(heappop(self._heap)[1])
            del self._at[due[-1]]
        return due

    @property
    def next_at(self) -> float:
        """The monotonic time at which something is due; infinite if nothing is."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf
