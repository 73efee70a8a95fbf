"""A follower of the changes of a database, which says when something may have been missed.

Whoever follows reads the documents first, and then follows them from an update sequence on that is older than the read.
Each call of `follow` gives one report: changes, or that something may have been missed. Until the next call there are
no requests, so that somebody who is busy causes none. A report is only a hint: it may come twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import CouchDBError
from ..log import get_logger
from .changes import ContinuousFeed
from .client import Client, Document, Row

logger = get_logger(__name__)

#: The pauses between two attempts to follow while CouchDB does not respond, in seconds.
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.5, 5.0


class Changes(NamedTuple):
    """One report."""

    rows: Sequence[Row]
    #: The update sequence after them; None: the database cannot be followed just now. Read the documents again, or
    #: follow from the former sequence, if it is known that the database is still the same one.
    last: Any

    @property
    def ids(self) -> list[str]:
        """The ids of the documents that have changed or were deleted."""
        return [row['id'] for row in self.rows]


class Follower:
    """Follows the changes of a database. One thread uses it, and a thread of its own waits for CouchDB.

    It raises no errors. After an error it makes the next attempt not before a pause, which becomes longer.
    """

    def __init__(
        self, client: Client, name: str, wake: Callable[[], object] = lambda: None, *, docs: bool = False
    ) -> None:
        """`name` is the name of the thread, which calls `wake()` when there is a report.

        The rows of reports contain the documents if `docs` is true.
        """
        self._client, self._name, self._wake, self._docs = client, name, wake, docs
        self._feed: ContinuousFeed | None = None
        self._reported = threading.Condition()
        self._report: Changes | None = None
        self._asked: tuple[Any, Document] | None = None  # what the thread waits for

    @property
    def is_following(self) -> bool:
        """Whether the next change will be reported."""
        return self._asked is not None

    def follow(self, since: Any, selector: Document | None = None, *, doc_ids: Sequence[str] | None = None) -> None:
        """Report the next changes after the update sequence `since`, unless these are being waited for already.

        `selector` or `doc_ids` says which changes; without them, all are reported.
        """
        body: Document = {'selector': selector} if selector else {} if doc_ids is None else {'doc_ids': [*doc_ids]}
        if self._asked == (since, body):
            return
        if self._feed is None:
            self._feed = ContinuousFeed(self._client, self._on_rows, self._on_error, self._name, docs=self._docs)
        self._asked = since, body
        self._feed.ask(since, body)

    def take(self, seconds: float = 0.0) -> Changes | None:
        """Return the last report, once; wait up to `seconds` for it. None if there is none."""
        with self._reported:
            self._reported.wait_for(lambda: self._report is not None, max(0.0, seconds))
            report, self._report = self._report, None
        return report

    def pause(self) -> None:
        """Report nothing until the next call of `follow`."""
        self._asked = None
        if self._feed is not None:
            self._feed.pause()
        self.take()

    def close(self) -> None:
        """End the thread."""
        self._asked = None
        if self._feed is not None:
            self._feed.close()

    # -- in the thread of the feed

    def _on_rows(self, rows: Sequence[Row], last: Any) -> None:
        self._note(Changes(rows, last), 0.0)

    def _on_error(self, exc: CouchDBError) -> None:
        logger.debug('%s cannot be followed just now: %s', self._client.address.url, exc)
        previous = self._feed.min_interval if self._feed is not None else 0.0
        self._note(Changes((), None), min(_MAX_RETRY_SECONDS, max(_MIN_RETRY_SECONDS, 2 * previous)))

    def _note(self, report: Changes, pause: float) -> None:
        if self._feed is not None:
            self._feed.min_interval = pause
        with self._reported:
            self._asked, self._report = None, report
            self._reported.notify()
        self._wake()
