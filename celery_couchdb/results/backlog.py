"""Backlog: the results that were handed over and are not done, in their order. No I/O.

A result is *done* when it is stored and, if it is a part of a chord, counted. Each has a number, so that an
acknowledgement or a child can wait until everything is done that was handed over before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .documents import is_outdated
from .handed import Handed

__all__ = ['Backlog']

#: The most results, and their bytes, that wait in memory.
_MAX_RESULTS, _MAX_BYTES = 10_000, 64_000_000

#: Results come quickly if each comes at most this number of seconds after the one before.
_FLOW_SECONDS = 0.008

#: Called with True when everything up to a number is done, and with False if that takes too long.
Respond = Callable[[bool], None]


class Backlog:
    """The results of one process. Thread-safe; `changed` is notified when results are stored or done."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        #: The number of the last result that was handed over.
        self.number = 0
        #: Whether results come quickly.
        self.is_flowing = False
        self._last_at = float('-inf')
        #: The number and the bytes of the results that are not stored.
        self._unstored = self._bytes = 0
        #: By number: the results that are not done.
        self._open: dict[int, Handed] = {}
        #: By document id, in the order of the writes: the results that no request contains yet.
        self._waiting: dict[str, Handed] = {}
        self._waits: list[tuple[int, Respond]] = []

    def __len__(self) -> int:
        """Return the number of results that no request contains yet."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more results should be handed over now.

        Only results that are not stored count: to complete a chord may make other results, which must find room.
        """
        return self._unstored >= _MAX_RESULTS or self._bytes >= _MAX_BYTES

    def add(self, result: Handed) -> None:
        """Add a result. Results of one task that no request contains yet become one."""
        with self.changed:
            self.number = result.number = self.number + 1
            self._open[result.number] = result
            self._unstored, self._bytes = self._unstored + 1, self._bytes + result.size
            self._last_at, last = time.monotonic(), self._last_at
            self.is_flowing = self._last_at - last < _FLOW_SECONDS
            before = self._waiting.pop(result.id, None)
            if before is not None and is_outdated(result.head, before.head):
                before.replaced.append(result)
                result = before
            elif before is not None:
                if before.part and not result.part:
                    result.part_id, result.part = before.part_id, before.part
                    result.group_id, result.body = before.group_id, before.body
                result.replaced += [before, *before.replaced]
            self._waiting[result.id] = result

    def take(self, limit: int) -> list[Handed]:
        """Return up to `limit` results to be written in one request; they have different ids."""
        with self.changed:
            return [self._waiting.pop(doc_id) for doc_id in list(self._waiting)[:limit]]

    def note_stored(self, results: Sequence[Handed]) -> None:
        """Note that these results are stored."""
        with self.changed:
            for each in results:
                for one in (each, *each.replaced):
                    self._leave(one)
            self.changed.notify_all()

    def note_done(self, results: Sequence[Handed]) -> None:
        """Note that nothing is left to do for these results."""
        with self.changed:
            for each in [one for result in results for one in (result, *result.replaced)]:
                self._leave(each)
                self._open.pop(each.number, None)
            ended = [wait for wait in self._waits if self.is_done(wait[0])]
            self._waits = [wait for wait in self._waits if wait not in ended]
            for _, respond in ended:
                respond(True)
            self.changed.notify_all()

    def _leave(self, result: Handed) -> None:
        if not result.is_stored and result.number in self._open:
            self._unstored, self._bytes = self._unstored - 1, self._bytes - result.size
        result.is_stored = True

    def is_done(self, number: int) -> bool:
        """Tell whether all results up to this number are done."""
        with self.changed:
            return not self._open or next(iter(self._open)) > number

    def unstored(self) -> list[str]:
        """Return the document ids of the results that are not stored."""
        with self.changed:
            return list({each.id: None for each in self._open.values() if not each.is_stored})

    def when_done(self, respond: Respond) -> None:
        """Call `respond(True)` when everything is done that was handed over before; see also `end_waits`."""
        with self.changed:
            if self.is_done(self.number):
                respond(True)
            else:
                self._waits.append((self.number, respond))

    def end_waits(self, results: Sequence[Handed] | None = None) -> None:
        """Call `respond(False)` of those that wait for one of these results, or of all that wait."""
        with self.changed:
            numbers = None if results is None else {one.number for each in results for one in (each, *each.replaced)}
            ended = [wait for wait in self._waits if numbers is None or wait[0] in numbers]
            self._waits = [wait for wait in self._waits if wait not in ended]
            for _, respond in ended:
                respond(False)
            self.changed.notify_all()
