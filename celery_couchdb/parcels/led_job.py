"""A job that only the leader of all workers does, when documents of a database change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, ClassVar, NamedTuple

from kombu_couchdb.couchdb.changes import ContinuousFeed
from kombu_couchdb.couchdb.client import Client, Row
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.leases.leader import RENEWAL_SECONDS, Leader
from kombu_couchdb.log import get_logger

__all__ = ['Batch', 'Changes', 'LedJob']

logger = get_logger(__name__)


#: If the changes feed reports more documents than this at once, the view is read, which tells how large they are.
_FEW_DOCS = 5


#: The pauses after a batch in which no document could be processed, in seconds. A node of a cluster may still show
#: processed documents, or another worker may have taken the whole batch.
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 30.0

#: The interval at which the leader in a cluster looks for documents that the feed of a node has not reported.
_CLUSTER_SECONDS = 60.0


class Batch(NamedTuple):
    """The number of documents in a batch, and the number of those that were processed."""

    found: int
    done: int


class Changes(NamedTuple):
    """A report of the changes feed: the ids of documents, and the sequence after them."""

    ids: Sequence[str]
    last: Any


class LedJob:
    """Processes the documents of a database, and then waits for changes. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    #: Logged when this process becomes the leader, with the URL of the database.
    done_by_leader: ClassVar[str]

    def __init__(self, leader: Leader, client: Client, selector: dict[str, Any], wake: Callable[[], None]) -> None:
        """Watch the documents of the database of `client` that match `selector`.

        Another thread calls `wake()` when they have changed.
        """
        self._leader, self._client, self._selector, self._wake = leader, client, selector, wake
        self._feed: ContinuousFeed | None = None
        self._stale, self._stopping = True, False
        self._changes: Changes | None = None  # what the feed has reported; the feed waits until it is told to go on
        self._again_at, self._pause = inf, _MIN_PAUSE_SECONDS

    @property
    def next_in(self) -> float:
        """The number of seconds until the next call of `step` is useful, unless `wake()` is called before."""
        return max(0.0, min(RENEWAL_SECONDS, self._again_at - time.monotonic()))

    def do_these(self, ids: Sequence[str]) -> None:
        """Process these few documents, which were written just now."""
        raise NotImplementedError

    def do_batch(self) -> Batch:
        """Process a batch of documents. After a batch without documents the job waits for the next change."""
        raise NotImplementedError

    def step(self) -> None:
        """Process all documents that wait, if this process is the leader.

        Call it after `wake()`, and at the latest after `next_in` seconds.
        """
        term = self._leader.term
        if self._leader.step() is None:
            self._stale = True
            if self._feed is not None:
                self._feed.pause()
            return
        if self._leader.term is not term:
            self._stale = True  # another process may have led in between
            logger.info(self.done_by_leader, self._client.url)
        changes, self._changes = self._changes, None
        is_due = self._stale or time.monotonic() >= self._again_at
        if not is_due and changes is None:
            return
        is_repeated = not self._stale and changes is None
        self._stale = True  # until all is done
        if is_due or changes is None or len(changes.ids) > _FEW_DOCS:
            self._again_at = inf
            since = self._client.sequence()
            while (batch := self.do_batch()).done:
                is_repeated, self._pause = False, _MIN_PAUSE_SECONDS
                if self._stopping or not self._leader.step():
                    return
            if batch.found:
                self._look_again_in(self._pause)
                self._pause = min(_MAX_PAUSE_SECONDS, 2 * self._pause)
        else:
            self.do_these(changes.ids)
            since = changes.last
        self._stale = False
        if self._client.replicas > 1:
            # The node that was asked may not have everything that another one has reported.
            self._look_again_in(_CLUSTER_SECONDS if is_repeated else SYNC)
        if self._feed is None:
            self._feed = ContinuousFeed(
                self._client, self._note_changes, self._note_error, 'celery-couchdb-parcels-feed', docs=False
            )
        self._feed.watch(since, self._selector)

    def stop(self) -> None:
        """Let `step` return after the current batch. Any thread may call this."""
        self._stopping = True

    def close(self) -> None:
        """Release the lead to another process, and close the connections."""
        if self._feed is not None:
            self._feed.close()
        self._leader.release()
        self._client.close()

    def _look_again_in(self, seconds: float) -> None:
        self._again_at = min(self._again_at, time.monotonic() + seconds)

    # -- in the thread of the feed

    def _note_changes(self, rows: Sequence[Row], last: Any) -> None:
        self._changes = Changes([row['id'] for row in rows], last)
        self._wake()

    def _note_error(self, exc: CouchDBError) -> None:
        self._stale = True
        self._wake()
