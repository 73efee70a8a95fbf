"""Deletion of expired results in a thread of each worker. Celery's beat is not needed.

The thread reads one view at random intervals, which is cheap while nothing has expired. Several workers do not repeat
each other's work, because deleted documents leave the view. Reading an expired result returns nothing even before it is
deleted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kombu_couchdb.couchdb.shapes import exactly, members, revision, text
from kombu_couchdb.errors import RETRIED
from kombu_couchdb.log import get_logger
from kombu_couchdb.outage import Outage

from ..chords.counter import Chords
from ..results.result_store import ResultStore

logger = get_logger(__name__)

#: The shape of a row of the view `due`: the kind of document and its revision.
_DUE = members(id=text, value=exactly(text, revision))

#: Documents deleted in one go, before a pause.
_BATCH_DOCS = 500

#: How long a worker that stops waits for the last request of a sweep, which another worker would repeat.
_STOP_SECONDS = 0.5


def sweep(store: ResultStore, chords: Chords, is_over: Callable[[], bool]) -> list[str]:
    """Delete expired results, groups and chords, and return the ids of the chords that may be unfinished.

    The sweep ends early when `is_over()` is true. *Raises* the errors of `kombu_couchdb.errors`; `NotFound` if the
    design document is missing.
    """
    now = store.client.clock.now()
    unfinished: list[str] = []
    skip = 0
    while not is_over():
        began = time.monotonic()
        rows = store.view('due', _DUE, endkey=now, limit=_BATCH_DOCS, skip=skip)
        found: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            kind, rev = row['value']
            found.setdefault(kind, []).append({'_id': row['id'], '_rev': rev})
        unfinished += [doc['_id'] for doc in found.get('Unfinished', ())]
        deleted = store.delete_all([*found.get('Result', ()), *found.get('Group', ())])
        if 'Chord' in found or 'Part' in found:
            deleted += chords.expire([doc['_id'] for doc in found.get('Chord', ())], found.get('Part', []))
        if deleted:
            logger.info('%d expired results were deleted', deleted)
        if len(rows) < _BATCH_DOCS:
            break
        skip += max(0, len(rows) - deleted)  # these rows stay in the view
        time.sleep(time.monotonic() - began)  # use the server for at most half of the time
    return unfinished


class ExpirySweeper:
    """Calls `work(is_over)` again and again in a thread.

    `interval` is the longest pause in seconds; each pause is random, at least half as long.
    """

    def __init__(self, work: Callable[[Callable[[], bool]], None], interval: float) -> None:
        self._work, self._interval = work, interval
        self.reset()

    def reset(self) -> None:
        """Forget the thread after a fork: it exists in the parent process only."""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._end = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._end,), name='celery-couchdb-sweeper', daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Stop the thread and wait up to half a second for its last request."""
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_STOP_SECONDS)

    def _run(self, end: threading.Event) -> None:
        outage = Outage(logger, 'expired results are not deleted: %s')
        while True:
            try:
                self._work(end.is_set)
                outage.recovered()
            except RETRIED as exc:
                logger.debug('expired results are not looked for: %s', exc)
            except Exception as exc:  # go on: one chord that cannot be ended must not keep all results forever
                outage.failed(exc)
            if end.wait(self._interval * random.uniform(0.5, 1.0)):
                return
