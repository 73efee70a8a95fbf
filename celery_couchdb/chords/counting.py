"""Counting of chord parts by the process that stores them: one count for many parts of one chord, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kombu_couchdb.couchdb.fork_safety import reset_in_child
from kombu_couchdb.log import get_logger

from ..results.documents import Packed
from ..results.queue_item import QueueItem
from ..results.result_queue import Done

__all__ = ['Counting']

logger = get_logger(__name__)

#: Called with the id of a group, the ids of parts that were stored just now, and the encoded body of the chord.
Count = Callable[[str, list[str], Packed], None]


class Counting:
    """Counts stored parts with `count`. The thread is started for the first part."""

    def __init__(self, count: Count) -> None:
        self._count = count
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
                    self._count(group_id, [each.part_id or each.id for each, _ in parts], parts[0][0].packed_body())
                except BaseException:  # also what a callback raises to end its process; a sweep completes the chord
                    logger.exception('the parts of chord %s cannot be counted', group_id)
                for each, done in parts:
                    done([each])
