"""Writing what was decided and claimed, many documents in one request, and what is in doubt if that is not answered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..couchdb.uncertain import still_writable
from ..couchdb.write_result import MISSING_STUB, WriteResult
from ..documents import dead_letter
from ..errors import CouchDBError
from ..leases.lease import Lease
from ..leases.unproven import UnprovenClaims
from ..queues.store import Store
from .pending_writes import Change
from .unacked import Unacked

__all__ = ['Commits']


class Commits:
    """The writes of one consumer; for the I/O thread alone."""

    def __init__(self, store: Store, unacked: Unacked, lease: Lease, unproven: UnprovenClaims) -> None:
        self._store, self._unacked, self._lease, self._unproven = store, unacked, lease, unproven
        #: Whether a claim may have been stored whose answer was lost, and whether so may what is in the outbox.
        self._orphans = self._unsure = False

    def was_cut(self) -> None:
        """Note that the server did not answer: what was stored is unknown."""
        self._orphans = self._unsure = True

    def on_orphans(self) -> None:
        """Note that the database has claims of this consumer that it does not know of."""
        self._orphans = True

    def write(self, *lists: list[Change]) -> None:
        """Write the changes in these lists, and take out of them what was answered; *raises* `CouchDBError`: the rest was not."""
        first: dict[str, Change] = {}
        for change in itertools.chain(*lists):
            if first.setdefault(change[0]['_id'], change) is not change:
                change[1](
                    WriteResult.conflict(change[0]['_id'])
                )  # two changes of one document: the first wins, as in CouchDB
        # Of a dead unique job with others behind it a copy is written, too, and before it.
        now = self._store.client.clock.now()
        docs = [part for doc, _ in first.values() for part in dead_letter.apart(doc, now)]
        failure = None
        try:
            results: Sequence[WriteResult] = self._store.client.bulk(docs) if docs else ()
        except CouchDBError as exc:
            results, failure = exc.answered, exc
        for result in results:
            self._orphans |= result.error == MISSING_STUB  # some nodes of the cluster may have stored it
            if result.id in first:
                _, react = first.pop(result.id)
                react(result)
        for changes in lists:
            changes[:] = [change for change in changes if first.get(change[0]['_id']) is change]
        if failure is not None:
            raise failure

    def find_out(self, outbox: list[Change]) -> None:
        """Take out of `outbox` what was stored by a request that was not answered."""
        if self._unsure:
            writable = still_writable(self._store.client, [doc for doc, _ in outbox])
            for (doc, react), is_writable in zip(outbox, writable, strict=True):
                if not is_writable:
                    react(WriteResult.conflict(doc['_id']))
            outbox[:] = [change for change, is_writable in zip(outbox, writable, strict=True) if is_writable]
            self._unsure = False

    def release_orphans(self) -> None:
        """Give back claims of ours that we do not know of: the answer that told of them was lost."""
        if not self._orphans:
            return
        known = {*self._unacked.ids(), *self._unproven}
        orphans = [doc for doc in self._store.claims(self._lease.id) if doc['_id'] not in known]
        if self._store.client.replicas > 1:  # others may have been told that they have them
            for doc in orphans:
                self._unproven.add(doc['_id'], doc['_rev'])
        else:
            self._store.release(orphans)
        self._orphans = False
