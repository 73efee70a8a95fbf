"""Old results go by themselves: a thread of each worker looks now and then for what has expired, without beat.

A look is one read of a view, which costs nothing while nothing is due. Workers look at different times, and what one has
deleted the next does not find. A result counts as gone from its very time on, whenever it is swept up.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kombu.log import get_logger

from kombu_couchdb.errors import RETRIED, CouchDBError

from .store import Store

__all__ = ['Sweeper', 'sweep']

logger = get_logger(__name__)

#: Documents deleted before the server is given a rest.
_BATCH = 500


def sweep(store: Store) -> list[str]:
    """Delete what has expired, and return the ids of the chords that have not changed for some time.

    *Raises* the errors of `kombu_couchdb.errors`; `NotFound` if the design document is missing.
    """
    now = store.client.clock.now()
    chords: list[str] = []
    left = 0
    while True:
        began = time.monotonic()
        rows = store.view('due', endkey=now, limit=_BATCH, skip=left)
        expired = [{'_id': row['id'], '_rev': row['value']} for row in rows if row['value']]
        chords += [row['id'] for row in rows if not row['value']]
        deleted = store.delete_all(expired)
        left += len(rows) - deleted
        if deleted:
            logger.info('%d expired results were deleted', deleted)
        if len(rows) < _BATCH:
            gone = {doc['_id'] for doc in expired}
            return [doc_id for doc_id in chords if doc_id not in gone]
        time.sleep(time.monotonic() - began)  # half the time is for others


class Sweeper:
    """Calls `work()` every now and then, in a thread of its own; `interval`, in seconds, is the longest pause."""

    def __init__(self, work: Callable[[], None], interval: float) -> None:
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
            self._thread = threading.Thread(target=self._run, args=(self._end,), name='celery-couchdb-sweeper', daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it: nothing is asked of the server afterwards."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, end: threading.Event) -> None:
        said = ''
        while True:
            try:
                self._work()
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
