"""Inbox: the documents of one database, read by a leader: those that have changed, and at its start all others once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Any

from kombu_couchdb.couchdb.changes import LIMIT, Changes, Follower, read
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.errors import AccessDenied, AnswerTooLarge, DatabaseMissing

#: The ids in one request for all documents.
_PAGE_IDS = 1000

#: Stands for a document that has not been read.
_UNREAD: Document = {}


class Inbox:
    """The documents of a database whose ids begin with certain prefixes. Use it in one thread.

    What has changed comes first, so that no backlog delays it. Documents may come several times: read them to decide.
    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(
        self,
        client: Client,
        wake: Callable[[], object],
        *prefixes: str,
        docs: bool = False,
        heartbeat: float = 3.0,
        poll: float = 0.0,
    ) -> None:
        """Another thread calls `wake()` when documents have changed. Without `prefixes`, all documents are meant.

        With `docs`, the feed sends the documents, so that they are not read in another request: for a distant server,
        whose documents are not large. It sends an empty line every `heartbeat` seconds. With `poll`, the feed is read
        at this interval, in seconds, and not followed: so it needs neither a thread nor a connection that waits.
        """
        self.client = client
        self._prefixes = prefixes or ('',)
        # `;` is the character after `:`.
        ranges = [{'_id': {'$gte': prefix, '$lt': f'{prefix[:-1]};'}} for prefix in prefixes]
        self._selector: Document | None = {'$or': ranges} if ranges else None
        self._poll = poll
        self._follower = Follower(client, 'celery-couchdb-inbox', wake, docs=docs, heartbeat=heartbeat)
        self.reset()

    def reset(self) -> None:
        """Forget everything, and follow nothing until the next call of `take`."""
        self._follower.pause()
        self._since: Any = None
        #: The documents that have changed; `_UNREAD` is for those that are to be read.
        self._changed: dict[str, Document | None] = {}
        #: The ids that the last call of `take` has returned, and those that come again, with their monotonic times.
        self._taken, self._later = list[str](), DueTimes()
        self._begin_scan()
        #: The monotonic times at which all is read again, and the feed is read if it is polled.
        self._scan_at, self._poll_at = inf, 0.0 if self._poll else inf

    def close(self) -> None:
        """End the thread of the changes feed."""
        self._follower.close()

    @property
    def next_at(self) -> float:
        """The monotonic time at which `take` has something to do, unless something changes before; infinite if not."""
        is_due = self._changed or self._left or self._page
        return 0.0 if is_due else min(self._scan_at, self._poll_at, self._later.next_at)

    def take(self, limit: int) -> dict[str, Document | None]:
        """Return up to `limit` documents by id, None for deleted ones.

        An empty dictionary says that there is nothing to do until `wake` is called, or `next_at` has come.
        """
        self._taken = []
        if self._since is None:
            self._since = self.client.sequence()
            if self.client.replicas > 1:  # the node that is asked may not have yet what others have stored
                self._scan_at = time.monotonic() + SYNC
        if time.monotonic() >= self._scan_at:
            self._begin_scan()
            self._scan_at = inf
        self._note_changes()
        self._changed |= dict.fromkeys(self._later.take(), _UNREAD)
        if not self._changed:
            self._read_page()
        source = self._changed or self._page
        found = {doc_id: source.pop(doc_id) for doc_id in list(source)[:limit]}
        self._taken = list(found)
        for doc_id in found:
            self._later.discard(doc_id)
        unread = [doc_id for doc_id, doc in found.items() if doc is _UNREAD]
        return {**found, **dict(zip(unread, self.client.fetch(unread), strict=True))}

    def put_back(self, ids: Iterable[str], seconds: float = 0.0) -> None:
        """Return these documents again, after so many seconds: they could not be processed, or are not due."""
        self._later.put(ids, seconds)

    def repeat(self) -> None:
        """Return the documents of the last call of `take` again: an error has interrupted what was done with them."""
        self.put_back(self._taken)

    def _begin_scan(self) -> None:
        #: The prefixes that are to be read, the last id of the last page, and the ids of that page.
        self._left, self._after = list(self._prefixes), ''
        self._page: dict[str, Document | None] = {}

    def _note_changes(self) -> None:
        changes = self._polled() if self._poll else self._follower.take()
        if changes is not None:
            if isinstance(changes.error, (AccessDenied, DatabaseMissing)):
                raise changes.error
            if isinstance(changes.error, AnswerTooLarge):  # documents that are too large together are read in parts
                self._since = self.client.sequence()
                self._begin_scan()
            elif changes.error is not None:
                self.client.sequence()  # it raises why the database cannot be read, if it still cannot
            # What the feed does not report just now is not missed: it goes on from the same sequence.
            if changes.last is not None:
                self._since = changes.last
            for row in changes.rows:
                if not row['id'].startswith('_'):
                    self._changed[row['id']] = None if row.get('deleted') else row.get('doc') or _UNREAD
        if not self._poll:
            self._follower.follow(self._since, self._selector)

    def _polled(self) -> Changes | None:
        if time.monotonic() < self._poll_at:
            return None
        body = {'selector': self._selector} if self._selector else {}
        found = read(self.client, self._since, body, LIMIT, docs=False)
        self._poll_at = time.monotonic() + (self._poll if len(found['results']) < LIMIT else 0.0)
        return Changes(found['results'], found['last_seq'])

    def _read_page(self) -> None:
        while not self._page and self._left:
            rows = self.client.id_range(self._left[0], limit=_PAGE_IDS, after=self._after or None)
            self._page = {row['id']: _UNREAD for row in rows if not row['id'].startswith('_')}
            self._after = rows[-1]['id'] if rows else ''
            if len(rows) < _PAGE_IDS:
                self._left, self._after = self._left[1:], ''


class DueTimes:
    """The monotonic times at which documents come again. Each has one time: the last one replaces those before."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        #: All times, the next one first, also those that were replaced.
        self._heap: list[tuple[float, str]] = []

    def put(self, ids: Iterable[str], seconds: float) -> None:
        """Let documents come after so many seconds."""
        at = time.monotonic() + seconds
        for doc_id in ids:
            self._at[doc_id] = at
            heappush(self._heap, (at, doc_id))
        if len(self._heap) > 2 * len(self._at) + 100:  # most of them were replaced
            self._heap = sorted((at, doc_id) for doc_id, at in self._at.items())

    def discard(self, doc_id: str) -> None:
        """Forget the time of a document, if it has one."""
        self._at.pop(doc_id, None)

    def take(self) -> list[str]:
        """Return what is due, the first one first, and forget its times."""
        due, now = list[str](), time.monotonic()
        while self.next_at <= now:
            due.append(heappop(self._heap)[1])
            del self._at[due[-1]]
        return due

    @property
    def next_at(self) -> float:
        """The monotonic time at which something is due; infinite if nothing is."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf
