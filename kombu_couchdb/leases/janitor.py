"""The janitor: deletes documents that killed processes left behind, a limited number at a time.

Killed processes leave three kinds of documents: bindings of queues that do not exist any more, broadcasts that no
publisher overwrites, and heartbeats of consumers whose leases expired long ago. Rate keys that are not used any more
leave a fourth: a document whose next start is in the past says no more than a missing one. The janitor needs only the
rights of a member of the database. Its deletions leave tombstones, as those of messages do; see `admin.vacuum`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document, chunks
from ..documents import rates
from ..documents.ids import BINDING, BROADCAST, QUEUE, RATE
from ..errors import NotFound
from ..queues.broadcasts_database import BroadcastsDatabase
from ..queues.store import Store
from .lease_expiry import Watch, expires_of

#: The janitor deletes a broadcast or a heartbeat so many seconds after it expired, and a rate so many seconds after its
#: next start: listeners may be behind, and clocks differ.
_KEPT_SECONDS = 3600.0

#: The janitor deletes a binding that had no queue for so many seconds: a process that declares both may have stored
#: only the binding yet.
_ORPHAN_SECONDS = 60.0

#: The assumed lease of a consumer whose document has no valid one: the default `visibility_timeout`.
_DEFAULT_LEASE_SECONDS = 60.0

#: The most documents that one request reads or deletes.
_MAX_BATCH_DOCS = 250


class Janitor:
    """Cleans up one database.

    It remembers bindings without a queue and consumers without heartbeats from call to call. It deletes such a document
    only if a second look, some time later, finds it unchanged: another process may be about to declare the queue, and a
    clock may have jumped. It also deletes old broadcasts in the database `broadcasts`.
    """

    def __init__(self, client: Client, broadcasts: BroadcastsDatabase | None = None) -> None:
        self._client, self._broadcasts = client, broadcasts
        self._watch = Watch(client.clock, _DEFAULT_LEASE_SECONDS, clock_share=0.0)
        #: Bindings without a queue: revision and monotonic time of the first look, by id.
        self._orphans: dict[str, tuple[str, float]] = {}

    def clean_up(self, limit: int) -> dict[str, int]:
        """Delete up to `limit` documents of each kind; return how many, with the names of the kinds.

        These are `bindings`, `broadcasts`, `consumers` and `rates`. *Raises* the errors of `Client`; the next call goes
        on.
        """
        return {
            'bindings': self._delete_bindings(limit),
            'broadcasts': self._delete_broadcasts(limit),
            'consumers': self._delete_consumers(limit),
            'rates': self._delete_rates(limit),
        }

    def _delete_bindings(self, limit: int) -> int:
        found = {doc['_id']: doc for doc in self._without_queue(list(_documents(self._client, BINDING)))}
        now = time.monotonic()
        seen, self._orphans = self._orphans, {}
        for doc_id, doc in found.items():
            rev, since = seen.get(doc_id, ('', now))
            self._orphans[doc_id] = (doc['_rev'], since if rev == doc['_rev'] else now)
        proven = [found[doc_id] for doc_id, (_, since) in self._orphans.items() if now - since >= _ORPHAN_SECONDS]
        proven = proven[:limit]
        count = self._delete(proven)
        # A process that declared the queue at this moment found its binding stored and did not store it: restore it.
        orphans = {doc['_id'] for doc in self._without_queue(proven)}
        restored = [
            {name: value for name, value in doc.items() if name != '_rev'}
            for doc in proven
            if doc['_id'] not in orphans
        ]
        if restored:
            self._client.bulk(restored)
        for doc in proven:
            del self._orphans[doc['_id']]
        return count - len(restored)

    def _without_queue(self, bindings: list[Document]) -> list[Document]:
        bindings = [doc for doc in bindings if doc.get('type') != 'Exchange']
        names = sorted({QUEUE + str(doc.get('queue')) for doc in bindings})
        declared = {doc['_id'] for part in chunks(names, _MAX_BATCH_DOCS) for doc in self._client.find(part) if doc}
        return [doc for doc in bindings if QUEUE + str(doc.get('queue')) not in declared]

    def _delete_broadcasts(self, limit: int) -> int:
        now = self._client.clock.now()

        def delete(client: Client) -> int:
            expired = (doc for doc in _documents(client, BROADCAST) if _is_long_expired(doc, now))
            return _delete(client, list(islice(expired, limit)))

        elsewhere = self._broadcasts.ask(delete, create=False) if self._broadcasts else None
        return delete(self._client) + (elsewhere or 0)

    def _delete_consumers(self, limit: int) -> int:
        asked = time.monotonic()
        try:
            leases = Store(self._client).leases()
        except NotFound:
            return 0  # a result database has no such view
        now = self._client.clock.now()
        # A consumer that has claims is left to the sweep, which also releases its messages.
        expired = {
            name: stats['max']
            for name, stats in leases['consumer'].items()
            if stats['max'] + _KEPT_SECONDS < now and name not in leases['claim']
        }
        # One lease is enough for a proof: if the server's clock is an hour ahead, an idle consumer begins a new one.
        self._watch.observe(expired, asked, self._client.fetch, expired)
        silent = self._watch.silent()[:limit]
        docs = [doc for part in chunks(silent, _MAX_BATCH_DOCS) for doc in self._client.fetch(part)]
        return self._delete([doc for doc in docs if doc and expires_of(doc) == self._watch.expires(doc['_id'])])

    def _delete_rates(self, limit: int) -> int:
        now = self._client.clock.now()
        unused = (
            doc
            for doc in _documents(self._client, RATE)
            if doc.get('type') == 'Rate' and rates.next_of(doc, now) + _KEPT_SECONDS < now
        )
        # A consumer that takes a start at this moment has written a later revision, which is not deleted.
        return self._delete(list(islice(unused, limit)))

    def _delete(self, docs: list[Document]) -> int:
        return _delete(self._client, docs)


def _delete(client: Client, docs: list[Document]) -> int:
    """Delete these revisions of documents, and no later ones; return how many were deleted."""
    deletions = [deletion(doc) for doc in docs]
    return sum(1 for part in chunks(deletions, _MAX_BATCH_DOCS) for result in client.bulk(part) if result.is_stored)


def _is_long_expired(doc: Document, now: float) -> bool:
    expires = doc.get('expires')
    return isinstance(expires, (int, float)) and expires + _KEPT_SECONDS < now


def _documents(client: Client, prefix: str) -> Iterator[Document]:
    """Yield the documents whose ids start with `prefix`, a page at a time."""
    last = None
    while rows := client.id_range(prefix, docs=True, limit=_MAX_BATCH_DOCS, after=last):
        yield from (row['doc'] for row in rows)
        last = rows[-1]['id']
