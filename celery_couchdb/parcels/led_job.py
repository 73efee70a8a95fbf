"""A job that only the leader of all workers does, when documents of a database change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kombu_couchdb.couchdb.changes import ContinuousFeed
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases.leader import RENEWAL_SECONDS, Leader
from kombu_couchdb.log import get_logger

__all__ = ['LedJob']

logger = get_logger(__name__)


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

    @property
    def next_in(self) -> float:
        """The number of seconds until the next call of `step` is useful, unless `wake()` is called before."""
        return RENEWAL_SECONDS

    def do_batch(self) -> int:
        """Process a batch of documents and return their number; 0 ends the work until the next change."""
        raise NotImplementedError

    def step(self) -> None:
        """Process all documents that wait, if this process is the leader.

        Call it after `wake()`, and at the latest after `next_in` seconds.
        """
        was_leader = self._leader.leads
        if not self._leader.step():
            self._stale = True
            if self._feed is not None:
                self._feed.pause()
            return
        if not was_leader:
            logger.info(self.done_by_leader, self._client.url)
        if not self._stale:
            return
        since = self._client.sequence()
        while self.do_batch():
            if self._stopping or not self._leader.step():
                return
        self._stale = False
        if self._feed is None:
            self._feed = ContinuousFeed(
                self._client,
                lambda rows, last: self._note_change(),
                lambda exc: self._note_change(),
                'celery-couchdb-parcels-feed',
                docs=False,
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

    def _note_change(self) -> None:
        self._stale = True
        self._wake()
