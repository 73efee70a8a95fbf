"""Receipts: the process that moves parcels writes into them how the tasks ended.

A result names the parcel from which its task came, by the header `x-parcel`. While receipts are open, the changes feed
of the database of results reports such results. A new leader first looks up the results of all open receipts: none is
missed if a leader is killed. A result is written only into the receipt of the parcel that it names. Messages that end
without a result are looked up now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from celery import states

from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client, Document, chunks
from kombu_couchdb.couchdb.conflicts import delete_revisions
from kombu_couchdb.couchdb.shapes import exactly, items, members, number, revision, text
from kombu_couchdb.couchdb.write_result import DOCUMENT_TOO_LARGE, UNSTORABLE, WriteResult
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger
from kombu_couchdb.parcels import parcel

from ..backend import CouchDBBackend
from ..results.documents import error_text, is_final, unpack

logger = get_logger(__name__)

#: Results and messages that are looked up, and receipts that are read, in one request.
_BATCH_DOCS = 200

#: Receipts that are deleted in one request.
_EXPIRED_DOCS = 500

#: The least seconds between two deletions of receipts, because each brings the index up to date.
_SWEEP_SECONDS = 30.0

#: The seconds until a message is looked up first, and the longest pause between two look-ups of one message.
_FIRST_SECONDS, _MAX_SECONDS = 60.0, 600.0

#: How often a receipt is written if it changes at the same time.
_ATTEMPTS = 5

#: The changes of the database of results that end tasks of parcels.
_SELECTOR = {
    'type': 'Result',
    'parcel': {'$exists': True},
    'status': {'$in': sorted(states.READY_STATES)},
}

#: Rows of open receipts that are read in one request.
_OPEN_ROWS = 2_000

#: The shapes of the rows of the view `receipts`.
_OPEN = members(id=text, value=text)
_KEPT = members(id=text, key=exactly(text, number), value=items(revision))


class _End(NamedTuple):
    """The end of a task: the members of a receipt, see `receipt.closed`. `date` is None if it is not known."""

    state: str
    result: Any = None
    error: str | None = None
    date: float | None = None


_DROPPED = _End(
    states.REVOKED, error='the message of the task expired, or was deleted, before a worker acknowledged it'
)


class Receipts:
    """The receipts in the database of parcels of `client`. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, transport: Any, client: Client, wake: Callable[[], None]) -> None:
        """Use the connected `transport` of the broker. Another thread calls `wake()` when tasks have ended."""
        self._client = client
        self._keep, self._region = transport.options.receipts_retention, transport.options.region
        self._messages = MessageEnds(transport.couchdb)
        self._backend: Any = app.backend if isinstance(app.backend, CouchDBBackend) else None
        if self._backend is None:
            logger.info('receipts do not tell how tasks end: the result backend is not CouchDB')
        else:
            self._results = Follower(self._backend.store.client, 'celery-couchdb-receipts-feed', wake)
        self.reset()

    def reset(self) -> None:
        """Forget which receipts are open, and stop waiting for results: another process may move parcels."""
        self._pause()
        #: The task of each open receipt, by the document id. Complete after `_load`.
        self._open: dict[str, str] = {}
        self._is_loaded = False
        #: The receipts whose results may have been stored before the feed reported any.
        self._unread: dict[str, str] = {}
        self._since: Any = None
        self._sweep_at = float('-inf')

    def close(self) -> None:
        """End the thread of the changes feed."""
        if self._backend is not None:
            self._results.close()

    def prepare(self) -> None:
        """Note where the feed of results is. Call this before messages are published."""
        if self._backend is None or self._open:
            return
        try:
            self._since = self._backend.store.sequence()
        except CouchDBError as exc:  # parcels are moved all the same
            logger.debug('the results of parcels are looked up later: %s', exc)
            self._since, self._is_loaded = None, False

    def add(self, docs: Iterable[Document]) -> None:
        """Wait for the results of these new receipts."""
        for doc in docs:
            self._open[doc['_id']] = doc['id']
            if not doc['_rev'].startswith('1-'):
                # A parcel that was changed may have been moved before, and its result may be stored.
                self._unread[doc['_id']] = doc['id']
            self._sweep_at = min(self._sweep_at, doc['kept_until'])

    def step(self) -> None:
        """Write the ends of tasks into receipts, and delete receipts whose time is over. Call it after `wake()`."""
        self._sweep()
        if self._backend is None:
            self._open.clear()
            return
        if not self._is_loaded:
            self._load()
        self._process_changes()
        self._look_up()
        self._end_without_results()
        if not self._open:
            self._pause()
        elif not self._results.is_following:
            self._results.follow(self._since, _SELECTOR)

    def _load(self) -> None:
        """Find all open receipts. Those that were moved before this process did may have a result already."""
        since = self._since if self._open and self._since is not None else self._backend.store.sequence()
        found, start = dict[str, str](), ['open']
        while True:
            keys = {'startkey': start, 'endkey': ['open', {}], 'limit': _OPEN_ROWS}
            rows = self._client.view(parcel.RECEIPTS, 'receipts', members(id=text), **keys)
            found |= {row['id']: row['value'] for row in rows if _OPEN(row)}
            self._bound([row['id'] for row in rows if not _OPEN(row)])
            if len(rows) < _OPEN_ROWS:
                break
            start = ['open', rows[-1]['id']]  # this row is read twice
        self._open.update(found)
        self._unread.update(found)
        self._since, self._is_loaded = since, True

    def _look_up(self) -> None:
        """Read the results of the receipts that the feed may not report."""
        unread, self._unread = self._unread, {}
        try:
            for part in chunks(list(unread), _BATCH_DOCS):
                self._write([self._backend.get_key_for_task(unread[doc_id]) for doc_id in part])
                for doc_id in part:
                    del unread[doc_id]
        finally:
            self._unread |= unread

    def _end_without_results(self) -> None:
        found = self._messages.ends(self._open)
        self._bound([doc_id for doc_id, end in found.items() if end is None])
        if ends := {doc_id: end for doc_id, end in found.items() if end is not None}:
            self._unread |= {doc_id: self._open[doc_id] for doc_id in ends}
            self._look_up()  # a result that was stored before the message ended comes first
            open_ids = self._open.keys() - self._unread.keys()
            self._close({doc_id: end for doc_id, end in ends.items() if doc_id in open_ids})

    def _bound(self, doc_ids: Sequence[str]) -> None:
        """Let receipts of unknown messages be deleted in time, whatever publishers have written into `kept_until`."""
        for part in chunks(doc_ids, _BATCH_DOCS):
            until = self._client.clock.now() + self._keep
            docs = [doc for doc in self._client.fetch(part) if doc and parcel.outlasts(doc, until)]
            write(self._client, [{**doc, 'kept_until': until} for doc in docs])
            self._sweep_at = min(self._sweep_at, until)

    def _pause(self) -> None:
        if self._backend is not None:
            self._results.pause()

    def _process_changes(self) -> None:
        changes = self._results.take()
        # Of what the feed does not report just now, nothing is missed: it goes on from the same sequence.
        if changes is not None and changes.last is not None:
            self._write([row['id'] for row in changes.rows if not row.get('deleted')])
            self._since = changes.last

    def _write(self, ids: Sequence[str]) -> None:
        """Write the results with these document ids into the open receipts of their parcels, if they are final."""
        # In a cluster the nodes that answer first may not have a result yet that the feed has reported.
        results = self._backend.store.read_many(ids, everywhere=True)
        self._close(
            {doc['parcel']: self._end(doc) for doc in results if doc and is_final(doc) and self._is_expected(doc)}
        )

    def _close(self, ended: Mapping[str, _End]) -> None:
        """Write how tasks have ended into the open receipts, by the ids of the parcels."""
        for part in chunks(list(ended), _BATCH_DOCS):
            names = set(part)
            for _ in range(_ATTEMPTS):
                names = self._write_some(sorted(names), ended)
                if not names:
                    break
            for doc_id in part:
                if doc_id not in names:
                    self._open.pop(doc_id, None)
                elif doc_id in self._open:
                    self._unread[doc_id] = self._open[doc_id]  # it changes all the time: the next step tries again

    def _write_some(self, names: Sequence[str], ended: Mapping[str, _End]) -> set[str]:
        """Write receipts, and return the ids of those that another process has changed meanwhile."""
        now = self._client.clock.now()
        changes = []
        for doc in self._client.fetch(names):
            # The publisher may have changed the receipt.
            if doc and parcel.is_open(doc) and doc.get('id') == self._open[doc['_id']]:
                state, result, error, date = ended[doc['_id']]
                changes.append(parcel.with_outcome(doc, state, result, error, date or now, now, self._keep))
        results = write(self._client, changes)
        for doc, written in zip(changes, results, strict=True):
            if written.is_stored:
                logger.debug('the receipt of parcel %s says: %s', doc['_id'], doc['state'])
                self._sweep_at = min(self._sweep_at, doc['kept_until'])
            elif written.is_refused:
                logger.warning('the receipt of parcel %s cannot be written: %s', doc['_id'], written.reason)
        return {doc['_id'] for doc, written in zip(changes, results, strict=True) if written.is_conflict}

    def _end(self, doc: Document) -> _End:
        """Return how the task of a final result has ended."""
        state = doc['status']
        try:
            found = self._backend.decode(unpack(doc))['result']
        except Exception as exc:  # any serializer may have written it, and anybody may have changed it
            return _End(state, error=f'the result cannot be decoded: {exc}')
        date = doc['date'] if isinstance(doc.get('date'), (int, float)) else None
        is_error = state in states.EXCEPTION_STATES
        return _End(state, error=error_text(found), date=date) if is_error else _End(state, found, date=date)

    def _is_expected(self, result: Document) -> bool:
        """Tell whether an open receipt waits for this result. Parcels of other regions may have the same ids."""
        task_id = self._open.get(result['parcel']) if isinstance(result.get('parcel'), str) else None
        return (
            task_id is not None
            and self._backend.get_key_for_task(task_id) == result['_id']
            and result.get('to') in (None, self._region)
        )

    def _sweep(self) -> None:
        """Delete receipts whose time is over, with all their leaf revisions: no other one may become a parcel again."""
        now = self._client.clock.now()
        if now < self._sweep_at:
            return
        while True:
            rows = self._client.view(
                parcel.RECEIPTS,
                'receipts',
                _KEPT,
                startkey=['kept'],
                endkey=['kept', {}],
                limit=_EXPIRED_DOCS,
            )
            over = [row for row in rows if row['key'][1] <= now]
            # The winning revision last: if this process is killed before, the document is still a receipt.
            delete_revisions(self._client, [(row['id'], rev) for row in over for rev in row['value'][1:]])
            deleted = delete_revisions(self._client, [(row['id'], row['value'][0]) for row in over])
            for row in over:
                self._open.pop(row['id'], None)
            if not deleted or len(over) < len(rows):
                break
        self._sweep_at = max(
            now + _SWEEP_SECONDS, min((row['key'][1] for row in rows[len(over) :]), default=float('inf'))
        )


class MessageEnds:
    """The messages of open receipts: one that expired, was deleted or became a dead letter has no result.

    Nobody stores a result for such a message. So the leader looks up the messages of open receipts in the broker's
    database by their ids: first after a minute, then after pauses that double up to ten minutes. The tombstone of a
    message that nobody has acknowledged says so (`workitem.dropped`). That of an acknowledged one says nothing about
    its task, which may still run, may have been sent again, or may ignore its result; it is not looked up again. If the
    broker's database has no trace of a message, a vacuum has purged its tombstone, or its publisher has forged the
    receipt.
    """

    def __init__(self, broker: Client) -> None:
        self._broker = broker
        #: By the ids of the parcels: when a message is looked up next, as a monotonic time, and the pause before that.
        self._checks: dict[str, tuple[float, float]] = {}
        self._next_at = -inf

    def ends(self, open_ids: Collection[str]) -> dict[str, _End | None]:
        """Return how those of these parcels have ended whose tasks store no result; no request in most calls.

        None is for a parcel of which the broker's database has no trace.
        """
        now = time.monotonic()
        if now < self._next_at:
            return {}
        self._next_at = now + _FIRST_SECONDS
        first = (now + _FIRST_SECONDS, _FIRST_SECONDS)
        self._checks = {doc_id: self._checks.get(doc_id, first) for doc_id in open_ids}
        found: dict[str, _End | None] = {}
        try:
            for part in chunks([doc_id for doc_id, (at, _) in self._checks.items() if at <= now], _BATCH_DOCS):
                found |= self._look_up(part, now)
        except CouchDBError as exc:  # the next call that is due looks them up
            logger.debug('the messages of receipts cannot be looked up just now: %s', exc)
        return found

    def _look_up(self, doc_ids: Sequence[str], now: float) -> dict[str, _End | None]:
        of = {parcel.moved_id(doc_id): doc_id for doc_id in doc_ids}
        docs = dict(zip(of, self._broker.find(list(of)), strict=True))
        gone = sorted(self._broker.known([name for name, doc in docs.items() if doc is None]))
        # In a cluster the node that answers first may have an unproven deletion: each copy that responds is read.
        everywhere = {'r': self._broker.replicas} if self._broker.replicas > 1 else {}
        found = self._broker.fetch_leaves(gone, **everywhere)
        # `_bulk_get` of the embedded server leaves out deleted documents.
        leaves = {name: of_one or self._broker.leaves(name) for name, of_one in zip(gone, found, strict=True)}
        ends: dict[str, _End | None] = {}
        for name, doc_id in of.items():
            pause = min(2 * self._checks[doc_id][1], _MAX_SECONDS)
            self._checks[doc_id] = now + pause, pause
            doc = docs[name]
            if doc is not None and workitem.is_dead(doc):
                ends[doc_id] = _End(
                    states.FAILURE, error=f'the message of the task is a dead letter: {doc.get("reason")}'
                )
            elif name in leaves and _is_dropped(leaves[name]):
                ends[doc_id] = _DROPPED
            elif doc is None and name not in leaves:
                ends[doc_id] = None
            elif (doc is not None and workitem.is_done(doc)) or (name in leaves and _is_deleted(leaves[name])):
                self._checks[doc_id] = inf, pause
        return ends


def _is_deleted(leaves: Sequence[Mapping[str, Any]]) -> bool:
    return all(leaf.get('_deleted') for leaf in leaves)


def _is_dropped(leaves: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a message was deleted and nobody has acknowledged it; `leaves` are all its leaf revisions."""
    decided = [leaf for leaf in leaves if not leaf.get('void')]  # the others are withdrawn claims
    return bool(decided) and all(leaf.get('_deleted') and leaf.get('dropped') for leaf in decided)


def write(client: Client, docs: Sequence[Document]) -> list[WriteResult]:
    """Write documents and return the result for each; those that are too large without what their publishers wrote.

    A publisher may write a parcel of exactly the size that CouchDB accepts. With a reason, or as a receipt, it is
    larger. If it could not be written, it would wait for ever, and the parcels behind it, too. *Raises* what
    `Client.bulk` raises.
    """
    results = client.bulk(docs)
    refused = [index for index, result in enumerate(results) if result.error in (DOCUMENT_TOO_LARGE, UNSTORABLE)]
    if refused:
        again = client.bulk([parcel.shortened(docs[index]) for index in refused])
        for index, result in zip(refused, again, strict=True):
            results[index] = result
    return results
