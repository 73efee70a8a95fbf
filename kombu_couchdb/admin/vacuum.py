"""The vacuum: what is left of finished work is taken out of one database, while its workers go on.

CouchDB keeps a tombstone of each deleted document. Purging them has two traps (measured with CouchDB 3.5): a node that was
down brings the documents back to life, and an index that had not seen the deletions keeps their rows. Hence the order: all
nodes are up; the tombstones are old; every copy of every index is up to date; and only then are they purged, a few at a time.
It can be interrupted anywhere. What is purged is gone, and the next vacuum goes on with the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..couchdb.client import Client
from ..couchdb.shapes import DONE, flag, members, number
from ..documents.ids import CONSUMER
from ..errors import DatabaseMissing
from ..leases.janitor import Janitor
from .cluster import Cluster
from .indexes import Indexes
from .tombstones import Marks, Tombstone, Tombstones

__all__ = ['AGE', 'Progress', 'Report', 'longest_lease', 'vacuum']

#: Called with the step (`wait`, `index`, `purge`, `prove` or `compact`), how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]

#: How old a tombstone must be by default, in seconds: older than any lease, and than the longest recovery of a chord.
AGE = 300.0

#: The longest lease that a heartbeat is believed to have, in seconds.
_LONGEST_LEASE = 86_400.0

#: How long the indexes may take to take in what was purged, in seconds: so long a worker may wait for its next message.
_STALL = 0.1

#: The least and the most tombstones purged before the indexes take that in.
_LEAST, _MOST = 100, 2000

#: Documents of a kind that are tidied away in one go.
_TIDIED = 1000

#: How long nothing must have been compacted for that to be over, in seconds.
_SETTLED = 1.0

#: What CouchDB says of a database.
_INFO = members(compact_running=flag, sizes=members(file=number))


@dataclass
class Report:
    """What a vacuum did: counts, sizes in bytes, and seconds."""

    database: str
    tombstones_before: int
    data_before: int
    indexes_before: int
    tombstones_after: int = 0
    data_after: int = 0
    indexes_after: int = 0
    purged: int = 0
    #: Our tombstones that were left because they are not old enough.
    young: int = 0
    #: `bindings`, `broadcasts` and `consumers` that were deleted.
    tidied: dict[str, int] = field(default_factory=dict)
    #: Whether there was a point in history that is old enough; without one nothing is purged.
    marked: bool = True
    seconds: float = 0.0
    #: How long each step took, in seconds.
    steps: dict[str, float] = field(default_factory=dict)


def longest_lease(client: Client) -> float:
    """Return the longest lease of the consumers in a broker's database, in seconds; 0 without any, or without the database.

    One of more than a day is left out: a member who writes such a heartbeat would keep everything from being purged.
    """
    try:
        docs = [row['doc'] for row in client.id_range(CONSUMER, docs=True)]
    except DatabaseMissing:
        return 0.0
    now = client.clock.now()
    leases = [
        doc['expires'] - doc['date']
        for doc in docs
        if all(isinstance(doc.get(name), (int, float)) for name in ('date', 'expires')) and doc['expires'] > now
    ]
    return max((lease for lease in leases if lease <= _LONGEST_LEASE), default=0.0)


def vacuum(client: Client, progress: Progress, *, age: float = AGE, wait: bool = True) -> Report:
    """Take tombstones older than `age` seconds out of a database, tidy and compact it; say how far it is by `progress`.

    With `wait`, wait until what is there now is old enough, unless an earlier vacuum noted a point that is.
    `age` must be longer than any lease, see `longest_lease`.
    *Raises* `AccessDenied` for others than server administrators, and `Refused` where it cannot be done or is not safe.
    """
    return _Vacuum(client, progress, age, wait).run()


class _Vacuum:
    def __init__(self, client: Client, progress: Progress, age: float, wait: bool) -> None:
        self._client, self._progress, self._age, self._wait = client, progress, age, wait
        self._cluster = Cluster(client)
        self._marks, self._tidier = Marks(client), Janitor(client)
        self._tombstones = Tombstones(client, self._marks)

    def run(self) -> Report:
        began = time.monotonic()
        self._cluster.check()
        self._indexes = Indexes(self._cluster)
        self._report = Report(
            self._client.address.database, self._tombstones.count(), self._file(), self._indexes.size()
        )
        for step in (self._mark, self._purge, self._prove, self._compact):
            since = time.monotonic()
            step()
            self._report.steps[step.__name__.strip('_')] = time.monotonic() - since
        self._report.tombstones_after, self._report.young = self._tombstones.count(), self._tombstones.young
        self._report.data_after, self._report.indexes_after = self._file(), self._indexes.size()
        self._report.seconds = time.monotonic() - began
        return self._report

    def _mark(self) -> None:
        self._tombstones.revive()
        self._marks.take(self._age)
        self._tidy()
        if self._wait:
            self._pause('wait', lambda: self._marks.ready_in(self._age))

    def _purge(self) -> None:
        mark = self._marks.old(self._age)
        self._report.marked = mark is not None
        if mark is None:
            return
        self._cluster.synchronise(self._age)
        self._settle(build=False)
        size = _LEAST
        waiting: list[Tombstone] = []
        for page in self._tombstones.old(mark):
            waiting += page
            while len(waiting) >= size + _LEAST:
                now, waiting = waiting[:size], waiting[size:]
                size = self._purge_some(now, size)
        if waiting:
            # CouchDB keeps a note of each purge until all indexes have seen it, and one that was never built says so only
            # when it sees another purge: it is built now, from what little is left, and sees the last.
            self._settle(build=True)
            self._purge_some(waiting, size)
        self._marks.begin([])

    def _purge_some(self, tombstones: list[Tombstone], size: int) -> int:
        """Purge these, and return how many the indexes can take in at once without making workers wait."""
        self._cluster.nodes()
        self._tombstones.purge(tombstones)
        stall = self._indexes.digest()
        self._report.purged += len(tombstones)
        self._progress('purge', self._report.purged, max(self._report.purged, self._report.tombstones_before))
        return max(_LEAST, min(_MOST, int(size * min(2.0, _STALL / max(stall, 0.001)))))

    def _prove(self) -> None:
        """Wait until the bindings without a queue are proven to be orphans."""
        if self._wait:
            self._pause('prove', lambda: self._tidier.proven_in)
        self._tidy()

    def _tidy(self) -> None:
        while any((counts := self._tidier.clean_up(_TIDIED)).values()):
            for kind, count in counts.items():
                self._report.tidied[kind] = self._report.tidied.get(kind, 0) + count

    def _settle(self, *, build: bool) -> None:
        self._indexes.settle(lambda done, total: self._progress('index', done, total), build=build)

    def _compact(self) -> None:
        self._indexes.compact()
        self._client.request('POST', '/_compact', shape=DONE)
        ended = time.monotonic()
        while time.monotonic() - ended < _SETTLED:
            if self._compacting():
                ended = time.monotonic()
            self._progress('compact', max(0, self._report.data_before - self._file()), self._report.data_before)
            time.sleep(0.1)

    def _compacting(self) -> bool:
        # The first knows of some nodes only, the second not of all that belongs to a compaction.
        return bool(self._client.info(_INFO)['compact_running']) or self._cluster.busy(
            'database_compaction', 'view_compaction'
        )

    def _pause(self, step: str, left: Callable[[], float]) -> None:
        """Wait until no seconds are `left`."""
        total = left()
        while seconds := left():
            self._progress(step, int(total - seconds), int(total))
            time.sleep(min(0.5, seconds))

    def _file(self) -> int:
        return int(self._client.info(_INFO)['sizes']['file'])
