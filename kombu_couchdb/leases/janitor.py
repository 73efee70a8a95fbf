"""The janitor deletes documents that killed processes left, some at a time, with a member's rights.

Three things stay behind when processes are killed: bindings of queues that are gone, broadcasts that nobody writes over,
and heartbeats of consumers that ended long ago. Deletions leave tombstones, as those of messages do; see `admin.vacuum`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document, chunks
from ..documents.ids import BINDING, BROADCAST, QUEUE
from ..errors import NotFound
from ..queues.store import Store
from .watch import Watch, mark_of

__all__ = ['Janitor']

#: How long broadcasts and heartbeats are left alone after they expired, in seconds: listeners may be behind, clocks differ.
_KEPT = 3600.0

#: How long a binding must have been without a queue, in seconds: another process may have declared only half of the two.
_ORPHANED = 60.0

#: The lease of a consumer that does not tell its own, in seconds: that of the default `visibility_timeout`.
_LEASE = 60.0

#: Documents read or deleted in one request.
_PAGE = 250


class Janitor:
    """Tidies one database. It remembers which bindings it found without a queue, and which consumers overdue.

    Only a second look proves anything: another process may be about to declare the queue, and a clock may have jumped.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._watch = Watch(client.clock, _LEASE, credit=0.0)
        self._orphans: dict[str, tuple[str, float]] = {}  # revision and monotonic time of the first look, by id

    @property
    def proven_in(self) -> float:
        """Seconds until what was found on the last look is proven to be of no use; consumers with long leases do not count."""
        latest = max((since for _, since in self._orphans.values()), default=float('-inf'))
        return max(0.0, latest + _ORPHANED - time.monotonic(), self._watch.proven_in(_LEASE))

    def tidy(self, limit: int) -> dict[str, int]:
        """Delete up to `limit` documents of each kind; return how many, as `bindings`, `broadcasts` and `consumers`."""
        return {
            'bindings': self._bindings(limit),
            'broadcasts': self._broadcasts(limit),
            'consumers': self._consumers(limit),
        }

    def _bindings(self, limit: int) -> int:
        found = {doc['_id']: doc for doc in self._without_queue(list(_documents(self._client, BINDING)))}
        now = time.monotonic()
        seen, self._orphans = self._orphans, {}
        for doc_id, doc in found.items():
            rev, since = seen.get(doc_id, ('', now))
            self._orphans[doc_id] = (doc['_rev'], since if rev == doc['_rev'] else now)
        proven = [found[doc_id] for doc_id, (_, since) in self._orphans.items() if now - since >= _ORPHANED][:limit]
        count = self._delete(proven)
        # Who declared the queue at this very moment was told that its binding was there: it shall be.
        orphans = {doc['_id'] for doc in self._without_queue(proven)}
        wanted = [
            {name: value for name, value in doc.items() if name != '_rev'}
            for doc in proven
            if doc['_id'] not in orphans
        ]
        if wanted:
            self._client.bulk(wanted)
        for doc in proven:
            del self._orphans[doc['_id']]
        return count - len(wanted)

    def _without_queue(self, bindings: list[Document]) -> list[Document]:
        bindings = [doc for doc in bindings if doc.get('type') != 'Exchange']
        names = sorted({QUEUE + str(doc.get('queue')) for doc in bindings})
        declared = {doc['_id'] for part in chunks(names, _PAGE) for doc in self._client.find(part) if doc}
        return [doc for doc in bindings if QUEUE + str(doc.get('queue')) not in declared]

    def _broadcasts(self, limit: int) -> int:
        now = self._client.clock.now()
        return self._delete(
            list(islice((doc for doc in _documents(self._client, BROADCAST) if _is_over(doc, now)), limit))
        )

    def _consumers(self, limit: int) -> int:
        asked = time.monotonic()
        try:
            leases = Store(self._client).leases()
        except NotFound:
            return 0  # a database of results has none
        now = self._client.clock.now()
        over = {
            name: float(stats['max'])
            for name, stats in leases['consumer'].items()
            if float(stats['max']) + _KEPT < now and name not in leases['claim']
        }
        self._watch.look(over, asked, self._client.fetch)
        docs = [doc for part in chunks(self._watch.silent()[:limit], _PAGE) for doc in self._client.fetch(part)]
        return self._delete([doc for doc in docs if doc and mark_of(doc) == self._watch.mark(doc['_id'])])

    def _delete(self, docs: list[Document]) -> int:
        """Delete these revisions of documents, and no later ones; return how many were still there."""
        gone = [deletion(doc) for doc in docs]
        return sum(1 for part in chunks(gone, _PAGE) for result in self._client.bulk(part) if result.is_stored)


def _is_over(doc: Document, now: float) -> bool:
    expires = doc.get('expires')
    return isinstance(expires, (int, float)) and expires + _KEPT < now


def _documents(client: Client, prefix: str) -> Iterator[Document]:
    """Yield the documents whose ids start with `prefix`, a page at a time."""
    last = None
    while rows := client.id_range(prefix, docs=True, limit=_PAGE, after=last):
        yield from (row['doc'] for row in rows)
        last = rows[-1]['id']
