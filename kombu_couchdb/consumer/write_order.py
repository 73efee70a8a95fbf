"""Write order: what must be stored before a decision about a message is written.

A worker stores the result of a task a moment after the task has ended (`celery_couchdb.results.result_queue`). If it
stored the acknowledgement before and were killed then, the result would be lost. So an acknowledgement, or a dead
letter, waits until everything is stored that was handed over before it. A release does not wait: the task runs again.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from ..couchdb.fork_safety import reset_in_child
from ..documents import workitem
from .pace import Pace, Wakeup
from .pending_writes import PendingWrite


class Precondition(Protocol):
    """Something of this process that is stored elsewhere, in the order in which it is handed over."""

    def mark(self) -> int | None:
        """Return a mark for everything that was handed over before this call; None if that cannot be told now."""

    def is_stored(self, mark: int) -> bool:
        """Tell whether everything up to a mark is stored."""

    def wait(self) -> bool:
        """Wait until everything is stored that was handed over before; return False if it is given up."""


class _Registry:
    """The preconditions and the orders of this process."""

    def __init__(self) -> None:
        self.preconditions: list[Precondition] = []
        self.orders: weakref.WeakSet[WriteOrder] = weakref.WeakSet()
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Make a new lock in a forked child."""
        self.lock = threading.Lock()


_process = _Registry()


def register(precondition: Precondition) -> None:
    """Let decisions of all consumers of this process wait for `precondition`; it calls `stored` after each write."""
    with _process.lock:
        if precondition not in _process.preconditions:
            _process.preconditions.append(precondition)


def unregister(precondition: Precondition) -> None:
    """Let decisions wait for `precondition` no more."""
    with _process.lock:
        if precondition in _process.preconditions:
            _process.preconditions.remove(precondition)
    stored()


def stored() -> None:
    """Wake the consumers whose decisions may be written now."""
    with _process.lock:
        orders = list(_process.orders)
    for order in orders:
        order.look()


class WriteOrder:
    """The decisions of one consumer that wait; for its I/O thread alone, except `look` and `wait`."""

    def __init__(self, wakeup: Wakeup, pace: Pace, preconditions: list[Precondition] = _process.preconditions) -> None:
        """`wakeup` makes the I/O thread call `writable` again; `preconditions` are those of this process."""
        self._wakeup, self._pace, self._preconditions = wakeup, pace, preconditions
        #: Decisions, and the marks that they wait for; None: the mark is not known yet.
        self._waiting: list[tuple[list[PendingWrite], dict[Precondition, int | None]]] = []
        with _process.lock:
            _process.orders.add(self)

    def writable(self, decisions: list[PendingWrite]) -> list[PendingWrite]:
        """Return those of these decisions, and of the waiting ones, that may be written now. The others wait."""
        if not self._preconditions and not self._waiting:
            return decisions
        found: list[PendingWrite] = []
        waiting: list[PendingWrite] = []
        for write in decisions:
            # The acknowledgement of a unique job puts the next message in its place, so that it looks like a release.
            is_release = workitem.is_waiting(write[0]) and not workitem.is_unique(write[0])
            (found if is_release else waiting).append(write)
        if waiting:
            self._waiting.append((waiting, dict.fromkeys(self._preconditions)))
        for group in list(self._waiting):
            if self._is_ready(group[1]):
                found += group[0]
                self._waiting.remove(group)
        return found

    def look(self) -> None:
        """Wake the I/O thread if decisions wait: some can perhaps be written now. Any thread may call it."""
        waiting = [doc for writes, _ in list(self._waiting) for doc, _ in writes]
        if waiting:
            # The messages in `next` of a unique job wait for its ack. Others share the next cycle of a flow.
            self._wakeup.set(0.0 if any(map(workitem.is_unique, waiting)) else self._pace.seconds_to_next)

    def wait(self) -> bool:
        """Wait until all decisions can be written; return False if what they wait for is given up."""
        waited = [each.wait() for each in tuple(self._preconditions)]  # for each of them, also if one is given up
        return all(waited)

    def _is_ready(self, marks: dict[Precondition, int | None]) -> bool:
        for each, mark in marks.items():
            if mark is None:
                marks[each] = each.mark()
        return all(
            each not in self._preconditions or (mark is not None and each.is_stored(mark))
            for each, mark in marks.items()
        )
