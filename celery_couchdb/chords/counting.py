"""Counting of the parts that the process of a worker has stored: one count for many parts of one chord."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kombu_couchdb.couchdb.fork_safety import reset_in_child
from kombu_couchdb.log import get_logger

from ..results.queue_item import QueueItem
from ..results.result_queue import Done

logger = get_logger(__name__)


class Counting:
    """Counts stored parts in a thread, which is started for the first part.

    `is_complete` is called with the id of a group and the ids of its parts that were stored just now. If it returns
    true, one task that waits for the answer completes the chord. If none waits, `complete` is called with the group's
    id.
    """

    def __init__(self, is_complete: Callable[[str, list[str]], bool], complete: Callable[[str], object]) -> None:
        self._is_complete, self._complete = is_complete, complete
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Forget everything in a forked child: the thread exists in the parent process only."""
        self._parts: SimpleQueue[tuple[QueueItem, Done]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, results: Sequence[QueueItem], done: Done) -> None:
        """Count the parts among these stored results; then, and for the other results now, call `done(results)`."""
        done([each for each in results if not each.group_id])
        for each in results:
            if each.group_id:
                self._parts.put((each, done))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name='celery-couchdb-chords', daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while True:
            taken = [self._parts.get()]
            while not self._parts.empty():
                taken.append(self._parts.get())
            groups: dict[str, list[tuple[QueueItem, Done]]] = {}
            for part in taken:
                groups.setdefault(part[0].group_id, []).append(part)
            for group_id, parts in groups.items():
                try:
                    self._count(group_id, [each for each, _ in parts])
                except BaseException:  # a sweep completes the chord
                    logger.exception('the parts of chord %s cannot be counted', group_id)
                for each, done in parts:
                    done([each])

    def _count(self, group_id: str, parts: Sequence[QueueItem]) -> None:
        if self._is_complete(group_id, [each.part_id or each.id for each in parts]) and not any(
            each.tell_waiting() for each in parts
        ):
            self._complete(group_id)
