"""The vacuum: purges the tombstones of one database and compacts it, while workers run.

CouchDB keeps a tombstone for each deleted document. Purging them has two dangers (measured with CouchDB 3.5): a node
that was down during the purge brings the documents back, and an index that has not processed the deletions keeps their
rows. So the vacuum purges only if all nodes are up, the tombstones are old, and every copy of every index is up to
date; and it purges few tombstones at a time.

A tombstone tells nodes, replicas and indexes that the document is deleted, and publishers of idempotent messages that
it existed. So only old tombstones may be purged. CouchDB does not store when a document was deleted. But every change
after a point in `_changes` is later than that point. So the vacuum notes points with their times, the *marks*, and a
tombstone before a mark is at least as old as the mark. With forged marks, tombstones that are seconds old would be
purged. So the marks are in a design document, which members cannot write.

If a document is created anew at the moment when its tombstone is purged, the document stays, but indexes lose its rows
(measured with CouchDB 3.5). So such documents are written once more, unchanged. If the vacuum is killed before
that, the next vacuum does it.

A managed service may not offer some of this. Without all that makes a purge safe, nothing is purged; the rest is done,
and the report says what is missing.

The vacuum can be interrupted at any point. The purged tombstones stay purged, and the next vacuum continues.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from ..couchdb.client import Client, Document, Row, chunks
from ..couchdb.shapes import DONE, flag, items, maybe, members, number, revision, sequence, text
from ..design import WITHOUT_ROWS
from ..documents.ids import CONSUMER
from ..errors import DatabaseMissing, NotFound, NotOffered
from ..leases.lease import ends_at
from .cluster import Cluster, Indexes

__all__ = ['AGE', 'Progress', 'Report', 'longest_lease', 'mark', 'vacuum']

#: Called with the name of the step (`wait`, `index`, `purge` or `compact`), how much is done, and the total.
Progress = Callable[[str, int, int], None]

#: Returns the ids of messages whose parcels are still there; None if they are unknown.
Moving = Callable[[], Collection[str] | None]

#: The default minimum age of a purged tombstone, in seconds: longer than the default lease and the recovery of a chord.
AGE = 300.0

#: Longer leases in heartbeats are ignored.
_MAX_LEASE_SECONDS = 86_400.0

#: How long the indexes may need to process the purged tombstones: a worker may wait so long for its next message.
_MAX_INDEX_SECONDS = 0.1

#: The minimum and maximum number of tombstones that are purged before the indexes process them.
_MIN_PURGE_DOCS, _MAX_PURGE_DOCS = 100, 2000

#: Compaction has ended if no compaction runs for this time.
_IDLE_SECONDS = 1.0

#: The shape of CouchDB's response about a database.
_INFO = members(compact_running=flag, doc_del_count=number, sizes=members(file=number))

#: The document with the marks. Only administrators of the server or of the database can write design documents.
MARKS = '_design/celery-marks'

#: The document with the ids that are being purged. It is not replicated and not in `_changes`. Members can write it; a
#: forged one only causes some of our documents to be written once more, unchanged.
_PURGING = '_local/celery-vacuum'

#: The ids of messages, of the broker's other documents, of parcels, of what passes between regions, and of results with
#: any prefix.
_OURS = re.compile(
    r'(p:)?[0-9a-f]{30}(-[0-9a-f]+)?\Z|once:|parcel:|job:|broker:|[pr]:[a-z][a-z0-9-]*:|'
    r'.*(celery-task-meta-|celery-taskset-meta-|chord-unlock-)',
    re.DOTALL,
)

#: The beginning of the ids of messages that were parcels.
_MOVED = 'parcel:'

#: The ids of other messages alone.
_MESSAGE = re.compile(r'[0-9a-f]{30}(-[0-9a-f]+)?\Z')

#: The maximum number of documents and of revisions in one `_purge` request, by CouchDB's default settings.
_MAX_REQUEST_DOCS, _MAX_REQUEST_REVISIONS = 100, 1000

#: The number of changes that are read in one request.
_PAGE_CHANGES = 5000

#: The shapes of CouchDB's responses, and of the lists in the documents of `Marks`.
_CHANGES = members(results=items(members(id=text, changes=items(members(rev=revision)))), last_seq=sequence)
_LOCAL = members(rows=items(members(doc=maybe(members()))))
_MARK_LIST, _IDS = items(members(seq=sequence, date=number)), items(text)


@dataclass
class Report:
    """The results of a vacuum: counts, sizes in bytes, and durations in seconds."""

    database: str
    tombstones_before: int
    data_before: int
    indexes_before: int
    tombstones_after: int = 0
    data_after: int = 0
    indexes_after: int = 0
    purged: int = 0
    #: The number of our tombstones that were not purged because they are too young.
    young: int = 0
    #: Whether there was a mark in the database's history that is old enough. Without one nothing is purged.
    marked: bool = True
    #: Whether nothing was purged because the database is replicated.
    replicated: bool = False
    #: What the service does not offer, in sentences.
    not_offered: list[str] = field(default_factory=list)
    #: The names of design documents without a view. They make CouchDB keep a note of each purge.
    without_views: list[str] = field(default_factory=list)
    seconds: float = 0.0


def longest_lease(client: Client) -> float:
    """Return the longest current lease of the consumers in a broker's database, in seconds; 0 if there is none.

    Leases of more than a day are ignored: a member could prevent all purges by writing such a heartbeat.
    """
    try:
        docs = [row['doc'] for row in client.id_range(CONSUMER, docs=True)]
    except DatabaseMissing:
        return 0.0
    now = client.clock.now()
    leases = [
        doc['expires'] - doc['date']
        for doc in docs
        if all(isinstance(doc.get(name), (int, float)) for name in ('date', 'expires')) and ends_at(doc) > now
    ]
    return max((lease for lease in leases if lease <= _MAX_LEASE_SECONDS), default=0.0)


def mark(client: Client, age: float) -> None:
    """Mark the present in a database's history, so that a later `vacuum` with this `age` waits less, or not at all.

    Mark several databases before you vacuum the first one. *Raises* the same errors as `vacuum`.
    """
    Cluster(client).check()
    Marks(client).add(age)


def vacuum(
    client: Client,
    progress: Progress,
    *,
    age: float = AGE,
    wait: bool = True,
    may_be_replicated: bool = False,
    moving: Moving = frozenset,
) -> Report:
    """Purge tombstones older than `age` seconds and compact the database. Report by `progress`.

    `age` must be longer than any lease, see `longest_lease`. With `wait`, wait until the oldest mark is `age` seconds
    old, and purge what was deleted before it. Without an earlier mark this is everything deleted until now. Without
    `wait`, purge only what was deleted before a mark of an earlier vacuum that is old enough.

    If the database `may_be_replicated` and is, purge nothing: the replicas could bring the documents back. `moving`
    returns the ids of messages whose tombstones are kept, because their parcels or receipts are still there; if these
    are unknown, those of all messages that were parcels are kept.

    *Raises* `AccessDenied` if the user is not a server administrator, and `Refused` if a purge is not possible or not
    safe.
    """
    return _Vacuum(client, progress, age, moving).run(wait, may_be_replicated)


class _Vacuum:
    def __init__(self, client: Client, progress: Progress, age: float, moving: Moving) -> None:
        self._client, self._progress, self._age, self._moving = client, progress, age, moving
        self._cluster, self._marks = Cluster(client), Marks(client)
        self._tombstones = Tombstones(self._cluster, self._marks)
        self._not_offered: list[str] = []

    def run(self, wait: bool, may_be_replicated: bool) -> Report:
        began = time.monotonic()
        with self._noting():
            self._cluster.check()
        can_purge = not self._not_offered
        self._indexes = Indexes(self._cluster)
        self._report = report = Report(
            self._client.address.database, self._tombstones.count(), self._file(), self._indexes.size()
        )
        if can_purge:
            with self._noting():
                self._purge(wait, may_be_replicated)
        self._compact()
        report.not_offered = self._not_offered
        report.tombstones_after, report.young = self._tombstones.count(), self._tombstones.young
        report.data_after, report.indexes_after = self._file(), self._indexes.size()
        report.without_views = self._indexes.without_views()
        report.seconds = time.monotonic() - began
        return report

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what the service does not offer, and go on."""
        try:
            yield
        except NotOffered as exc:
            self._not_offered.append(str(exc))

    def _purge(self, wait: bool, may_be_replicated: bool) -> None:
        self._tombstones.finish_earlier_purge()
        self._marks.add(self._age)
        if may_be_replicated and is_replicated(self._client):
            self._report.replicated = True
            return
        if wait:
            self._wait()
        mark = self._marks.latest(self._age)
        self._report.marked = mark is not None
        if mark is not None:
            self._purge_before(mark)

    def _wait(self) -> None:
        """Wait until the oldest mark is old enough."""
        total = self._marks.ready_in(self._age)
        while seconds := self._marks.ready_in(self._age):
            self._progress('wait', int(total - seconds), int(total))
            time.sleep(min(0.5, seconds))

    def _purge_before(self, mark: Any) -> None:
        self._cluster.synchronise(self._age)
        self._progress('index', 0, 1)
        self._indexes.bring_up_to_date()
        self._progress('index', 1, 1)
        size = _MIN_PURGE_DOCS
        waiting: list[DeletedDocument] = []
        # A parcel whose message was deleted before the mark was there before the mark, too: none is missing here.
        for page in self._tombstones.before(mark, self._moving()):
            waiting += page
            while len(waiting) >= size:
                batch, waiting = waiting[:size], waiting[size:]
                size = self._purge_batch(batch, size)
        if waiting:
            self._purge_batch(waiting, size)
        self._marks.set_purging([])

    def _purge_batch(self, tombstones: list[DeletedDocument], size: int) -> int:
        """Purge tombstones, and return the size of the next batch: workers should not have to wait for the indexes."""
        self._cluster.nodes()
        self._tombstones.purge(tombstones)
        seconds = self._indexes.process_latest()
        self._report.purged += len(tombstones)
        self._progress('purge', self._report.purged, max(self._report.purged, self._report.tombstones_before))
        factor = min(2.0, _MAX_INDEX_SECONDS / max(seconds, 0.001))
        return max(_MIN_PURGE_DOCS, min(_MAX_PURGE_DOCS, int(size * factor)))

    def _compact(self) -> None:
        with self._noting():
            self._indexes.clean_up()
        with self._noting():
            self._client.request('POST', '/_compact', shape=DONE)
            self._indexes.compact()
            self._wait_for_compaction()

    def _wait_for_compaction(self) -> None:
        ended = time.monotonic()
        while time.monotonic() - ended < _IDLE_SECONDS:
            if self._compacting():
                ended = time.monotonic()
            self._progress('compact', max(0, self._report.data_before - self._file()), self._report.data_before)
            time.sleep(0.1)

    def _compacting(self) -> bool:
        # Both are needed: `compact_running` covers some nodes only, `_active_tasks` not all parts of a compaction.
        if self._client.info(_INFO)['compact_running']:
            return True
        with suppress(NotOffered):
            return self._cluster.busy('database_compaction', 'view_compaction')
        return False

    def _file(self) -> int:
        return int(self._client.info(_INFO)['sizes']['file'])


# -- tombstones


def is_ours(doc_id: str) -> bool:
    """Tell by its id whether a document belongs to a broker, to parcels or to results."""
    return bool(_OURS.match(doc_id))


def is_replicated(client: Client) -> bool:
    """Tell whether a device or a server replicates the database: whether a replication has left a checkpoint there.

    A replica may have a document whose deletion it has not seen. While the tombstone is there, CouchDB ignores the
    document when the replica sends it; after a purge it is a new document.
    """
    rows = client.request('GET', '/_local_docs', {'include_docs': 'true'}, repeat=True, shape=_LOCAL)['rows']
    return any({'session_id', 'history'} <= (row.get('doc') or {}).keys() for row in rows)


@dataclass(frozen=True)
class DeletedDocument:
    """A deleted document: its id and its leaf revisions, all of which are deleted."""

    id: str
    revs: tuple[str, ...]


class Marks:
    """The marks of one database, the oldest first, and the ids of documents that are being purged."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def add(self, age: float) -> None:
        """Add a mark for now. Of the marks that are at least `age` seconds old, only the latest is kept."""
        seq = self._client.sequence()
        now = self._client.clock.now()
        marks = [*self._marks(), {'seq': seq, 'date': now}]
        usable = [mark for mark in marks if mark['date'] <= now - age]
        self._write(MARKS, marks=[*usable[-1:], *marks[len(usable) :]], **WITHOUT_ROWS)

    def latest(self, age: float) -> Any | None:
        """Return the latest mark that is at least `age` seconds old, as a sequence of `_changes`; None without one."""
        now = self._client.clock.now()
        return next((mark['seq'] for mark in reversed(self._marks()) if mark['date'] <= now - age), None)

    def ready_in(self, age: float) -> float:
        """Return after how many seconds the oldest mark will be `age` seconds old."""
        now = self._client.clock.now()
        return max(0.0, min((mark['date'] + age - now for mark in self._marks()), default=age))

    def purging(self) -> list[str]:
        """Return the ids that `set_purging` stored."""
        found = self._read(_PURGING).get('purging')
        return [doc_id for doc_id in cast('list[str]', found) if is_ours(doc_id)] if _IDS(found) else []

    def set_purging(self, ids: list[str]) -> None:
        """Store the ids that will be purged next, so that a later vacuum can finish; an empty list after the purge."""
        if ids != self.purging():
            self._write(_PURGING, purging=ids)

    def _marks(self) -> list[Document]:
        found = self._read(MARKS).get('marks')
        return cast('list[Document]', found) if _MARK_LIST(found) else []

    def _read(self, doc_id: str) -> Document:
        try:
            return self._client.get(doc_id)
        except NotFound:
            return {'_id': doc_id}

    def _write(self, doc_id: str, **members: Any) -> None:
        self._client.put({**self._read(doc_id), **members})


class Tombstones:
    """The tombstones of one database."""

    def __init__(self, cluster: Cluster, marks: Marks) -> None:
        self._client, self._cluster, self._marks = cluster.client, cluster, marks
        #: The number of our tombstones that were too young to be purged.
        self.young = 0
        self._changed = set[str]()  # the ids of documents that have changed since the mark
        self._read_until: Any = None  # the sequence up to which `_changed` is complete

    def count(self) -> int:
        """Return the number of tombstones in the database, including those of other applications."""
        return int(self._client.info(_INFO)['doc_del_count'])

    def before(self, mark: Any, moving: Collection[str] | None = ()) -> Iterator[list[DeletedDocument]]:
        """Yield our tombstones that are older than the sequence `mark`, in pages.

        Leave out those of messages in `moving`: their parcels are still there, and would be moved a second time. None
        leaves out all that were parcels.
        """

        def is_kept(doc_id: str) -> bool:
            # A message that is copied into several queues has an id with a suffix for each.
            return doc_id.startswith(_MOVED) if moving is None else doc_id.partition('-')[0] in moving

        self._read_until = mark
        for rows, _ in self._pages(0):
            # Read the changes after the page: they include everything that happened to its documents before.
            self._read_changes()
            ours = [
                DeletedDocument(row['id'], tuple(change['rev'] for change in row['changes']))
                for row in rows
                if row.get('deleted') and is_ours(row['id'])
            ]
            old = [tombstone for tombstone in ours if tombstone.id not in self._changed]
            self.young += len(ours) - len(old)
            yield [tombstone for tombstone in old if not is_kept(tombstone.id)]

    def purge(self, tombstones: list[DeletedDocument]) -> None:
        """Purge tombstones. A document that was created anew meanwhile is kept."""
        # The other ids can be used again. Ids of messages never are, so these need no note.
        self._marks.set_purging([tombstone.id for tombstone in tombstones if not _MESSAGE.match(tombstone.id)])
        for batch in batches(tombstones):
            self._cluster.purge(batch)
        self._read_changes()
        self._rewrite([tombstone.id for tombstone in tombstones if tombstone.id in self._changed])

    def finish_earlier_purge(self) -> None:
        """Write the documents that an earlier vacuum, which was killed, could not write any more."""
        self._rewrite(self._marks.purging())
        self._marks.set_purging([])

    def _rewrite(self, ids: list[str]) -> None:
        """Write existing documents once more, unchanged, because indexes may have lost their rows."""
        for part in chunks(ids, _MAX_REQUEST_DOCS):
            docs = [doc for doc in self._client.fetch(part) if doc]
            if docs:
                self._client.bulk(docs)  # a conflict means that somebody else has written it, which restores the rows

    def _read_changes(self) -> None:
        """Add the documents that have changed since the last call to `_changed`."""
        if self._read_until is not None:
            for rows, last in self._pages(self._read_until):
                self._read_until = last
                self._changed.update(row['id'] for row in rows)

    def _pages(self, since: Any) -> Iterator[tuple[list[Row], Any]]:
        """Yield the changes after the sequence `since` until now, in pages, each with its last sequence."""
        rows: list[Row] | None = None
        while rows is None or len(rows) == _PAGE_CHANGES:
            params = {'since': since, 'limit': _PAGE_CHANGES, 'style': 'all_docs'}
            page = self._client.request('GET', '/_changes', params, repeat=True, shape=_CHANGES)
            rows, since = cast('list[Row]', page['results']), page['last_seq']
            yield rows, since


def batches(tombstones: list[DeletedDocument]) -> Iterator[dict[str, list[str]]]:
    """Yield the bodies of `_purge` requests for tombstones, each within CouchDB's limits."""
    batch: dict[str, list[str]] = {}
    count = 0
    for tombstone in tombstones:
        for start in range(0, len(tombstone.revs), _MAX_REQUEST_REVISIONS):
            revs = list(tombstone.revs[start : start + _MAX_REQUEST_REVISIONS])
            if batch and (len(batch) == _MAX_REQUEST_DOCS or count + len(revs) > _MAX_REQUEST_REVISIONS):
                yield batch
                batch, count = {}, 0
            batch[tombstone.id] = revs
            count += len(revs)
    if batch:
        yield batch
