"""Rows of the views, as named tuples. Each class reads the rows of one view, or of its reduction, with `from_row`.

The `.js` files beside this module emit the rows. A queue name is encoded in keys, see `key_of`; it is None in these
classes if it is not text. Rows are read after their shape was checked (`couchdb.shapes`). The rows of the views
`by_task` (key: the id of a task), `history` (key: the name of a task, and a date), `dead` (key: queue and date; value:
the reason) and `conflicted` (key: a type; value: the revisions of all leaves) need no class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import PLANNED, queue_of

#: The date of an item in the view `waiting` if its own is malformed. So the item is the first in its queue, the
#: consumer that claims it makes a dead letter of it, and no limit of the queue drops it.
MALFORMED_DATE = 0

Row = Mapping[str, Any]


class WaitingRow(NamedTuple):
    """`waiting`: key `[queue, rank, published]`, `[queue, PLANNED, date]` or `[queue, PARKED, date]`.

    The value is `[rank, revision]`.
    """

    id: str
    #: HIGHEST - priority.
    rank: int
    #: When the item was published, or is due if it is `planned`.
    date: float
    rev: str
    planned: bool

    @classmethod
    def from_row(cls, row: Row) -> WaitingRow:
        """Read a row."""
        _, place, date = row['key']
        rank, rev = row['value']
        return cls(row['id'], int(rank), float(date), rev, place == PLANNED)

    @property
    def is_malformed(self) -> bool:
        """Whether the item has no valid date: the consumer that claims it makes a dead letter of it."""
        return not self.planned and self.date == MALFORMED_DATE


class QueueCount(NamedTuple):
    """`waiting` or `dead`, reduced to the queue (`group_level=1`), or to queue and rank (2); value: the count."""

    queue: str | None
    #: HIGHEST - priority, `PLANNED` or `PARKED`; -1 in rows by queue alone.
    rank: int
    total: int

    @classmethod
    def from_row(cls, row: Row) -> QueueCount:
        """Read a row."""
        queue, *rank = row['key']
        return cls(queue_of(queue), rank[0] if rank else -1, row['value'])


class LeaseRow(NamedTuple):
    """`leases`, reduced to kind and name (`group_level=2`); value: CouchDB's `_stats` of seconds.

    ============  ==================  ===================================================
    Kind          Name                Seconds
    ============  ==================  ===================================================
    ``consumer``  id of a Consumer    `expires` of its heartbeat
    ``claim``     id of a Consumer    dates of its claims; unreduced keys also have the queue
    ``slot``      id of a Consumer    dates of the slots of concurrency keys that it holds
    ``failed``    None                dates of failed tasks whose messages are kept; the third part of a key is the date
    ``parked``    None                dates of messages that wait for a slot; the third part of a key is encoded
    ``expiry``    None                `expires` of messages that no consumer has claimed, and of those that are kept
    ``queue``     name of a queue     `expires` of the queue
    ``limit``     name of a queue     0: the queue has a message TTL or a length limit
    ============  ==================  ===================================================
    """

    kind: str
    #: None of the kinds `expiry`, `failed` and `parked`.
    name: Any
    stats: dict[str, float]

    @classmethod
    def from_row(cls, row: Row) -> LeaseRow:
        """Read a row."""
        kind, name = row['key']
        return cls(kind, str(queue_of(name)) if kind in ('queue', 'limit') else name, row['value'])


class ClaimCount(NamedTuple):
    """`leases` of the kind `claim`, reduced to consumer and queue (`group_level=3`)."""

    consumer: str
    queue: str | None
    total: int

    @classmethod
    def from_row(cls, row: Row) -> ClaimCount:
        """Read a row."""
        _, consumer, queue = row['key']
        return cls(consumer, queue_of(queue), row['value']['count'])


def revision_in(row: Row) -> str:
    """Return the revision in a row of `waiting` or `expiring` (key: `expires`; value: the revision)."""
    value = row['value']
    return str(value if isinstance(value, str) else value[1])
