"""Commits: write claims and decisions, and find out what CouchDB stored when a response was lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..couchdb.uncertain import still_writable
from ..couchdb.write_result import MISSING_STUB, WriteResult
from ..documents import dead_letter
from ..errors import CouchDBError
from ..leases.lease import Lease
from ..leases.sweeper import UnprovenClaims
from ..log import get_logger
from ..queues.store import Store
from .pending_writes import PendingWrite
from .unacked import Unacked

__all__ = ['Commits']

logger = get_logger(__name__)


class Commits:
    """The writes of one consumer; for the I/O thread alone."""

    def __init__(self, store: Store, unacked: Unacked, lease: Lease, unproven: UnprovenClaims) -> None:
        self._store, self._unacked, self._lease, self._unproven = store, unacked, lease, unproven
        #: Whether CouchDB may have stored claims that this consumer does not know of: their responses were lost.
        self._has_orphans = False
        #: Whether CouchDB may have stored some of the pending writes.
        self._uncertain = False

    def on_outage(self) -> None:
        """Note that a response was lost: which writes CouchDB stored is unknown."""
        self._has_orphans = self._uncertain = True

    def on_orphans(self) -> None:
        """Note that the database has claims of this consumer that the consumer does not know of."""
        self._has_orphans = True

    def write(self, *lists: list[PendingWrite]) -> None:
        """Write these lists and remove from them what got a response; *raises* `CouchDBError` if some did not."""
        first: dict[str, PendingWrite] = {}
        for write in itertools.chain(*lists):
            if first.setdefault(write[0]['_id'], write) is not write:
                # Two writes of one document: send only the first; the second is in conflict, as it would be in CouchDB.
                write[1](WriteResult.conflict(write[0]['_id']))
        # A unique job that is done, or dead with other messages in `next`, makes two documents: its copy, then the job
        # with the next message or its deletion.
        docs = [part for doc, _ in first.values() for part in (dead_letter.apart(doc) if doc.get('status') else [doc])]
        failure = None
        try:
            results: Sequence[WriteResult] = self._store.client.bulk(docs) if docs else ()
        except CouchDBError as exc:
            results, failure = exc.answered, exc
        for result in results:
            self._has_orphans |= result.error == MISSING_STUB  # some nodes may have stored this claim
            if result.id in first:
                _, react = first.pop(result.id)
                react(result)
        for writes in lists:
            writes[:] = [write for write in writes if first.get(write[0]['_id']) is write]
        if failure is not None:
            raise failure

    def drop_stored(self, pending: list[PendingWrite]) -> None:
        """After a lost response, remove from `pending` the writes that would be in conflict.

        CouchDB has stored them, or another process has changed the documents.
        """
        if self._uncertain:
            writable = still_writable(self._store.client, [doc for doc, _ in pending])
            for (doc, react), is_writable in zip(pending, writable, strict=True):
                if not is_writable:
                    react(WriteResult.conflict(doc['_id']))
            pending[:] = [write for write, is_writable in zip(pending, writable, strict=True) if is_writable]
            self._uncertain = False

    def release_orphans(self) -> None:
        """Release the claims of this consumer that it does not know of: the responses to them were lost."""
        if not self._has_orphans:
            return
        known = {*self._unacked.ids(), *self._unproven}
        orphans = [doc for doc in self._store.claims(self._lease.id) if doc['_id'] not in known]
        if self._store.client.replicas > 1:  # CouchDB may have confirmed another consumer's claim of the same message
            for doc in orphans:
                self._unproven.add(doc['_id'], doc['_rev'])
        else:
            self._store.release(orphans)
            for doc in orphans:
                logger.debug('releasing message %s: the response to its claim was lost', doc['_id'])
        self._has_orphans = False
