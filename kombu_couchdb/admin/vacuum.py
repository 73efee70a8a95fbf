"""The vacuum: purges the tombstones of one database, deletes leftovers and compacts, while workers run.

CouchDB keeps a tombstone for each deleted document. Purging them has two dangers (measured with CouchDB 3.5): a node
that was down during the purge brings the documents back, and an index that has not processed the deletions keeps their
rows. So the vacuum purges only if all nodes are up, the tombstones are old, and every copy of every index is up to
date; and it purges few tombstones at a time.

The vacuum can be interrupted at any point. The purged tombstones stay purged, and the next vacuum continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..couchdb.client import Client
from ..couchdb.shapes import DONE, flag, members, number
from ..documents.ids import CONSUMER
from ..errors import DatabaseMissing
from ..leases.housekeeping import Janitor
from ..leases.lease import ends_at
from .cluster import Cluster, Indexes
from .tombstones import DeletedDocument, Marks, Tombstones, is_replicated

#: Called with the name of the step (`wait`, `index`, `purge`, `prove` or `compact`), how much is done, and the total.
Progress = Callable[[str, int, int], None]

#: The default minimum age of a purged tombstone, in seconds: longer than the default lease and the recovery of a chord.
AGE = 300.0

#: Longer leases in heartbeats are ignored.
_MAX_LEASE_SECONDS = 86_400.0

#: How long the indexes may need to process the purged tombstones: a worker may wait so long for its next message.
_MAX_INDEX_SECONDS = 0.1

#: The minimum and maximum number of tombstones that are purged before the indexes process them.
_MIN_PURGE_DOCS, _MAX_PURGE_DOCS = 100, 2000

#: The number of leftovers of each kind that are deleted in one go.
_CLEAN_UP_DOCS = 1000

#: Compaction has ended if no compaction runs for this time.
_IDLE_SECONDS = 1.0

#: The shape of CouchDB's response about a database.
_INFO = members(compact_running=flag, sizes=members(file=number))


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
    #: The number of deleted `bindings`, `broadcasts`, `consumers` and `rates`.
    tidied: dict[str, int] = field(default_factory=dict)
    #: Whether there was a mark in the database's history that is old enough. Without one nothing is purged.
    marked: bool = True
    #: Whether nothing was purged because the database is replicated.
    replicated: bool = False
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
    moving: Callable[[], Collection[str]] = frozenset,
) -> Report:
    """Purge tombstones older than `age` seconds, delete leftovers and compact the database. Report by `progress`.

    `age` must be longer than any lease, see `longest_lease`. With `wait`, wait until the oldest mark is `age` seconds
    old, and purge what was deleted before it. Without an earlier mark this is everything deleted until now. Without
    `wait`, purge only what was deleted before a mark of an earlier vacuum that is old enough.

    If the database `may_be_replicated` and is, purge nothing: the replicas could bring the documents back. `moving`
    returns the ids of messages whose tombstones are kept, because their parcels still wait: see
    `kombu_couchdb.parcels.stored_parcels.moving`.

    *Raises* `AccessDenied` if the user is not a server administrator, and `Refused` if a purge is not possible or not
    safe.
    """
    return _Vacuum(client, progress, age, wait, may_be_replicated, moving).run()


@dataclass
class _Vacuum:
    _client: Client
    _progress: Progress
    _age: float
    _wait: bool
    _may_be_replicated: bool
    _moving: Callable[[], Collection[str]]

    def __post_init__(self) -> None:
        self._cluster = Cluster(self._client)
        self._marks, self._janitor = Marks(self._client), Janitor(self._client)
        self._tombstones = Tombstones(self._client, self._marks)

    def run(self) -> Report:
        began = time.monotonic()
        self._cluster.check()
        self._indexes = Indexes(self._cluster)
        self._report = Report(
            self._client.address.database, self._tombstones.count(), self._file(), self._indexes.size()
        )
        self._report.replicated = self._may_be_replicated and is_replicated(self._client)
        self._mark()
        self._purge()
        self._prove()
        self._compact()
        self._report.tombstones_after, self._report.young = self._tombstones.count(), self._tombstones.young
        self._report.data_after, self._report.indexes_after = self._file(), self._indexes.size()
        self._report.without_views = self._indexes.without_views()
        self._report.seconds = time.monotonic() - began
        return self._report

    def _mark(self) -> None:
        self._tombstones.finish_earlier_purge()
        self._marks.add(self._age)
        self._clean_up()
        if self._wait and not self._report.replicated:
            self._pause('wait', lambda: self._marks.ready_in(self._age))

    def _purge(self) -> None:
        mark = self._marks.latest(self._age)
        self._report.marked = mark is not None
        if mark is None or self._report.replicated:
            return
        self._cluster.synchronise(self._age)
        self._update_indexes(build=False)
        size = _MIN_PURGE_DOCS
        waiting: list[DeletedDocument] = []
        # A parcel whose message was deleted before the mark was there before the mark, too: none is missing here.
        for page in self._tombstones.before(mark, self._moving()):
            waiting += page
            while len(waiting) >= size + _MIN_PURGE_DOCS:
                batch, waiting = waiting[:size], waiting[size:]
                size = self._purge_batch(batch, size)
        if waiting:
            # CouchDB keeps a note of each purge until all indexes have confirmed it. A never-built index confirms no
            # purge, so CouchDB would keep these notes. Build such indexes before the last batch; that purge makes them
            # confirm all.
            self._update_indexes(build=True)
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

    def _prove(self) -> None:
        """Delete bindings without a queue, and consumers that stayed silent.

        With `wait`, look at the bindings again after 60 seconds, and delete those that still have no queue.
        """
        if self._wait:
            self._pause('prove', lambda: self._janitor.proven_in)
        self._clean_up()

    def _clean_up(self) -> None:
        while any((counts := self._janitor.clean_up(_CLEAN_UP_DOCS)).values()):
            for kind, count in counts.items():
                self._report.tidied[kind] = self._report.tidied.get(kind, 0) + count

    def _update_indexes(self, *, build: bool) -> None:
        self._indexes.bring_up_to_date(lambda done, total: self._progress('index', done, total), build=build)

    def _compact(self) -> None:
        self._indexes.compact()
        self._client.request('POST', '/_compact', shape=DONE)
        ended = time.monotonic()
        while time.monotonic() - ended < _IDLE_SECONDS:
            if self._compacting():
                ended = time.monotonic()
            self._progress('compact', max(0, self._report.data_before - self._file()), self._report.data_before)
            time.sleep(0.1)

    def _compacting(self) -> bool:
        # Both are needed: `compact_running` covers some nodes only, `_active_tasks` not all parts of a compaction.
        return bool(self._client.info(_INFO)['compact_running']) or self._cluster.busy(
            'database_compaction', 'view_compaction'
        )

    def _pause(self, step: str, seconds_left: Callable[[], float]) -> None:
        """Wait until `seconds_left()` is 0."""
        total = seconds_left()
        while seconds := seconds_left():
            self._progress(step, int(total - seconds), int(total))
            time.sleep(min(0.5, seconds))

    def _file(self) -> int:
        return int(self._client.info(_INFO)['sizes']['file'])
