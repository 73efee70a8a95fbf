"""Receipts: the process that moves parcels writes into them how the tasks ended.

A result names the parcel from which its task came, by the header `x-parcel`. While receipts are open, the changes feed
of the database of results reports such results. A new leader reads all documents (see `inbox`), and looks up the
results of the open receipts among them: none is missed if a leader is killed. A result is written only into the receipt
of the parcel that it names. Messages that end without a result are looked up now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from celery import states

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client, Document, chunks
from kombu_couchdb.couchdb.conflicts import delete_leaves
from kombu_couchdb.couchdb.write_result import DOCUMENT_TOO_LARGE, UNSTORABLE, WriteResult
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger
from kombu_couchdb.values import is_number

from ...backend import couchdb_backend_of
from ...results.documents import error_text, is_final, unpack
from .look_ups import End, LookUps, ends_of_messages

logger = get_logger(__name__)

#: Results and messages that are looked up, and receipts that are read, in one request.
_BATCH_DOCS = 200

#: Receipts that are deleted together.
_EXPIRED_DOCS = 100

#: How often a receipt is written if it changes at the same time.
_ATTEMPTS = 5

#: The changes of the database of results that end tasks of parcels.
_SELECTOR = {
    'type': 'Result',
    'parcel': {'$exists': True},
    'status': {'$in': sorted(states.READY_STATES)},
}

#: The end of a task whose id another task has.
_NOT_STORED = End(states.FAILURE, error='its end is not known: another task with the same id has succeeded')


class Key(NamedTuple):
    """A receipt: its database, and its id there."""

    database: str
    doc_id: str


class Receipts:
    """The receipts in databases of parcels. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(
        self, app: Any, transport: Any, client_of: Callable[[str], Client | None], wake: Callable[[], None]
    ) -> None:
        """Use the connected `transport` of the broker. Another thread calls `wake()` when tasks have ended.

        `client_of(database)` returns a client for a database of parcels; None if it is not used any more.
        """
        self._client_of, self._keep, self._broker = client_of, transport.options.receipts_retention, transport.couchdb
        self._backend: Any = couchdb_backend_of(app)
        if self._backend is None:
            logger.info('receipts do not tell how tasks end: the result backend is not CouchDB')
        else:
            self._results = Follower(self._backend.store.client, 'celery-couchdb-receipts-feed', wake)
        self.reset()

    def reset(self) -> None:
        """Forget which receipts there are, and stop waiting for results: all documents will be read again."""
        self._pause()
        #: The task of each open receipt.
        self._open: dict[Key, str] = {}
        #: The open receipts whose results may have been stored before the feed reported any.
        self._unread: dict[Key, str] = {}
        self._look_ups = LookUps[Key]()
        #: When receipts are deleted, the next one first.
        self._kept: list[tuple[float, Key]] = []
        self._since: Any = None

    def start_again(self) -> None:
        """Look up the results of all open receipts: after an error, it is unknown which were written."""
        self._pause()
        self._since = None
        self._unread.update(self._open)

    def close(self) -> None:
        """End the thread of the changes feed."""
        if self._backend is not None:
            self._results.close()

    def prepare(self) -> None:
        """Note where the feed of results is. Call this before messages are published."""
        if self._backend is None or self._since is not None:
            return
        try:
            self._since = self._backend.store.sequence()
        except CouchDBError as exc:  # parcels are moved all the same
            logger.debug('the results of parcels are looked up later: %s', exc)

    def add(self, database: str, doc: Document) -> None:
        """Wait for the result of a new receipt."""
        key = Key(database, doc['_id'])
        self._keep_until(key, doc)
        if self._backend is not None:
            # A leader that was killed may have published its message long ago: the result may be stored.
            self._open[key] = self._unread[key] = doc['id']

    def note(self, database: str, doc: Document) -> None:
        """Note a receipt that was read."""
        key = Key(database, doc['_id'])
        self._keep_until(key, doc)
        is_new = key not in self._open and parcel.is_open(doc) and isinstance(doc.get('id'), str)
        if is_new and self._backend is not None:
            self._open[key] = self._unread[key] = doc['id']

    def step(self) -> None:
        """Write the ends of tasks into receipts, and delete receipts whose time is over. Call it after `wake()`."""
        self._delete_old()
        if self._backend is None:
            return
        if self._open and self._since is None:
            self._since = self._backend.store.sequence()
            self._unread.update(self._open)
        self._process_changes()
        self._look_up()
        self._end_without_results()
        if not self._open:
            self._pause()
            self._since = None
        elif not self._results.is_following:
            self._results.follow(self._since, _SELECTOR)

    def _look_up(self) -> None:
        """Read the results of the receipts that the feed may not report."""
        unread, self._unread = self._unread, {}
        try:
            for part in chunks(list(unread), _BATCH_DOCS):
                self._write([self._backend.get_key_for_task(unread[key]) for key in part])
                for key in part:
                    del unread[key]
        finally:
            self._unread |= unread

    def _end_without_results(self) -> None:
        keys = self._look_ups.take(self._open)
        found = ends_of_messages(self._broker, keys)
        found |= self._not_stored([key for key in keys if key not in found])
        self._bound([key for key, end in found.items() if end is None])
        if ends := {key: end for key, end in found.items() if end is not None}:
            self._unread |= {key: self._open[key] for key in ends}
            self._look_up()  # a result that was stored before the message ended comes first
            open_keys = self._open.keys() - self._unread.keys()
            self._close({key: end for key, end in ends.items() if key in open_keys})

    def _not_stored(self, keys: Sequence[Key]) -> dict[Key, End]:
        """Return the ends of tasks whose ids other tasks have: a success stays, so nothing else is stored."""
        ids = [self._backend.get_key_for_task(self._open[key]) for key in keys]
        results = zip(keys, self._backend.store.read_many(ids), strict=True)
        return {
            key: _NOT_STORED
            for key, doc in results
            if doc and doc['status'] == states.SUCCESS and doc.get('parcel') != [*key]
        }

    def _bound(self, keys: Sequence[Key]) -> None:
        """Let receipts of unknown messages be deleted in time, whatever publishers have written into `kept_until`."""
        until = self._broker.clock.now() + self._keep
        for database, docs in self._fetch(keys).items():
            late = [{**doc, 'kept_until': until} for doc in docs if parcel.outlasts(doc, until)]
            for doc in late:
                self._keep_until(Key(database, doc['_id']), doc)
            if client := self._client_of(database):
                write(client, late)

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
        self._close({key: self._end(doc) for doc in results if doc and is_final(doc) and (key := self._expecting(doc))})

    def _close(self, ended: Mapping[Key, End]) -> None:
        """Write how tasks have ended into the open receipts."""
        for part in chunks(list(ended), _BATCH_DOCS):
            keys = set(part)
            for _ in range(_ATTEMPTS):
                keys = self._write_some(sorted(keys), ended)
                if not keys:
                    break
            for key in part:
                if key not in keys:
                    self._open.pop(key, None)
                elif key in self._open:
                    self._unread[key] = self._open[key]  # it changes all the time: the next step tries again

    def _write_some(self, keys: Sequence[Key], ended: Mapping[Key, End]) -> set[Key]:
        """Write receipts, and return those that another process has changed meanwhile."""
        now, changed = self._broker.clock.now(), set[Key]()
        for database, docs in self._fetch(keys).items():
            changes = []
            for doc in docs:
                key = Key(database, doc['_id'])
                # The publisher may have changed the receipt.
                if parcel.is_open(doc) and doc.get('id') == self._open.get(key):
                    state, result, error, date = ended[key]
                    changes.append(parcel.with_outcome(doc, state, result, error, date or now, now, self._keep))
            client = self._client_of(database)
            for doc, written in zip(changes, write(client, changes) if client else (), strict=client is not None):
                if written.is_stored:
                    logger.debug('the receipt of parcel %s says: %s', doc['_id'], doc['state'])
                    self._keep_until(Key(database, doc['_id']), doc)
                elif written.is_refused:
                    logger.warning('the receipt of parcel %s cannot be written: %s', doc['_id'], written.reason)
                elif written.is_conflict:
                    changed.add(Key(database, doc['_id']))
        return changed

    def _fetch(self, keys: Sequence[Key]) -> dict[str, list[Document]]:
        """Return the documents of receipts, by database; those of databases that are not used any more are left out."""
        found = dict[str, list[Document]]()
        for database in {key.database for key in keys}:
            if client := self._client_of(database):
                ids = [key.doc_id for key in keys if key.database == database]
                found[database] = [doc for doc in client.fetch(ids) if doc]
        return found

    def _end(self, doc: Document) -> End:
        """Return how the task of a final result has ended."""
        state = doc['status']
        try:
            found = self._backend.decode(unpack(doc))['result']
        except Exception as exc:  # any serializer may have written it, and anybody may have changed it
            return End(state, error=f'the result cannot be decoded: {exc}')
        date = doc['date'] if isinstance(doc.get('date'), (int, float)) else None
        is_error = state in states.EXCEPTION_STATES
        return End(state, error=error_text(found), date=date) if is_error else End(state, found, date=date)

    def _expecting(self, result: Document) -> Key | None:
        """Return the open receipt that waits for this result, if there is one."""
        named = result.get('parcel')
        if not isinstance(named, list) or len(named) != len(Key._fields) or not all(isinstance(n, str) for n in named):
            return None
        key = Key(*named)
        task_id = self._open.get(key)
        return key if task_id is not None and self._backend.get_key_for_task(task_id) == result['_id'] else None

    def _keep_until(self, key: Key, doc: Document) -> None:
        if is_number(doc.get('kept_until')):
            heappush(self._kept, (doc['kept_until'], key))

    def _delete_old(self) -> None:
        """Delete receipts whose time is over, with all their leaf revisions: no other one may become a parcel again."""
        now = self._broker.clock.now()
        while self._kept and self._kept[0][0] <= now:
            keys = list[Key]()
            while self._kept and self._kept[0][0] <= now and len(keys) < _EXPIRED_DOCS:
                keys.append(heappop(self._kept)[1])
            try:
                self._delete_some(keys, now)
            except CouchDBError:
                for key in keys:
                    heappush(self._kept, (now, key))
                raise

    def _delete_some(self, keys: Sequence[Key], now: float) -> None:
        for database, docs in self._fetch(keys).items():
            over = [doc for doc in docs if doc.get('type') == 'Receipt' and _is_over(doc, now)]
            if (client := self._client_of(database)) and over:
                delete_leaves(client, over)
            for doc in over:
                self._open.pop(Key(database, doc['_id']), None)


def _is_over(receipt: Mapping[str, Any], now: float) -> bool:
    return is_number(receipt.get('kept_until')) and receipt['kept_until'] <= now


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
