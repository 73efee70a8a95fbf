"""Old results go by themselves: a thread of each worker looks now and then for what has expired, without beat.

A look is one read of a view, which costs nothing while nothing is due. Workers look at different times, and what one has
deleted the next does not find. A result counts as gone from its very time on, whenever it is swept up.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kombu_couchdb.couchdb.shapes import exactly, members, revision, text
from kombu_couchdb.errors import RETRIED, CouchDBError
from kombu_couchdb.log import get_logger

from .chords.counter import Chords
from .results.store import Store

__all__ = ['Sweeper', 'sweep']

logger = get_logger(__name__)

#: The rows of the view: what it is, and its revision.
_DUE = members(id=text, value=exactly(text, revision))

#: Documents deleted before the server is given a rest.
_BATCH = 500


def sweep(store: Store, chords: Chords, is_over: Callable[[], bool]) -> list[str]:
    """Delete what has expired, until `is_over`, and return the ids of the chords that may be unfinished.

    *Raises* the errors of `kombu_couchdb.errors`; `NotFound` if the design document is missing.
    """
    now = store.client.clock.now()
    unfinished: list[str] = []
    left = 0
    while not is_over():
        began = time.monotonic()
        rows = store.view('due', _DUE, endkey=now, limit=_BATCH, skip=left)
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
        if len(rows) < _BATCH:
            break
        left += max(0, len(rows) - deleted)
        time.sleep(time.monotonic() - began)  # half the time is for others
    return unfinished


#: How long the end of a worker waits for a sweep that is under way, in seconds.
_GRACE = 5.0


class Sweeper:
    """Calls `work(is_over)` every now and then, in a thread of its own; `interval`, in seconds, is the longest pause."""

    def __init__(self, work: Callable[[Callable[[], bool]], None], interval: float) -> None:
        self._work, self._interval = work, interval
        self.reset()

    def reset(self) -> None:
        """Forget the thread, after a fork: it is the parent's."""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None:
            self._end = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._end,), name='celery-couchdb-sweeper', daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """End the thread and wait a moment for it: it should ask nothing of the server afterwards."""
        self._end.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_GRACE)

    def _run(self, end: threading.Event) -> None:
        said = ''
        while True:
            try:
                self._work(end.is_set)
                said = ''
            except RETRIED as exc:
                logger.debug('expired results are not looked for: %s', exc)
            except CouchDBError as exc:
                if said != (said := str(exc)):
                    logger.error('expired results are not deleted: %s', exc)
            except Exception:  # one chord that cannot be brought to an end must not keep all results for ever
                logger.exception('the search for expired results failed')
            if end.wait(self._interval * random.uniform(0.5, 1.0)):
                return
