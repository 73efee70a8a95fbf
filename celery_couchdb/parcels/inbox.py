"""The inbox of the leader: the documents of a database that wait to be processed, and those that arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, ClassVar, NamedTuple

from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.leases.leader import Duty, LeaderLease
from kombu_couchdb.log import get_logger

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


class Inbox(Duty):
    """Processes the documents of a database, and then follows them. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    process = 'this worker'

    #: Logged when this process becomes the leader, with the URL of the database.
    done_by_leader: ClassVar[str]

    def __init__(self, leader: LeaderLease, client: Client, selector: dict[str, Any], wake: Callable[[], None]) -> None:
        """Follow the documents of the database of `client` that match `selector`.

        Another thread calls `wake()` when they have changed.
        """
        super().__init__(leader)
        self._client, self._selector = client, selector
        self._follower = Follower(client, 'celery-couchdb-parcels-feed', wake)
        self._again_at, self._pause = inf, _MIN_PAUSE_SECONDS

    def do_these(self, ids: Sequence[str]) -> None:
        """Process these few documents, which were written just now."""
        raise NotImplementedError

    def do_batch(self) -> Batch:
        """Process a batch of documents. After a batch without documents the leader waits for the next change."""
        raise NotImplementedError

    def begin(self) -> None:
        """Say that this process leads."""
        logger.info(self.done_by_leader, self._client.url)

    def rest(self) -> float:
        """Follow nothing."""
        self._follower.pause()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Process all documents that wait."""
        changes = self._follower.take()
        is_due = time.monotonic() >= self._again_at
        if stale or changes is not None or is_due:
            if stale or changes is None or is_due or changes.last is None or len(changes.rows) > _FEW_DOCS:
                since = self._client.sequence()
                is_repeated = self._do_all() and not stale and changes is None
            else:
                self.do_these(changes.ids)
                since, is_repeated = changes.last, False
            if self._client.replicas > 1:
                # The node that was asked may not have everything that another one has reported.
                self._look_again_in(_CLUSTER_SECONDS if is_repeated else SYNC)
            self._follower.follow(since, self._selector)
        return self._again_at - time.monotonic()

    def close(self) -> None:
        """Release the lead to another process, and close the connections."""
        self._follower.close()
        super().close()
        self._client.close()

    def _do_all(self) -> bool:
        """Process batches until nothing can be done; return whether nothing could be done at all."""
        self._again_at, is_idle = inf, True
        while (batch := self.do_batch()).done:
            is_idle, self._pause = False, _MIN_PAUSE_SECONDS
            self.renew()
        if batch.found:
            self._look_again_in(self._pause)
            self._pause = min(_MAX_PAUSE_SECONDS, 2 * self._pause)
        return is_idle

    def _look_again_in(self, seconds: float) -> None:
        self._again_at = min(self._again_at, time.monotonic() + seconds)
