"""The design documents of a database of parcels, and the rows of its views."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..couchdb.client import Row
from ..design import load

#: The design document of a database of parcels. Publishers recognise such a database by it. The name must sort after
#: that of the broker's design document, see `queues.database`.
PARCELS = 'parcels-v1'

#: The design document for receipts in a database of parcels. Its index is updated when it is read: when a leader
#: starts, and when a receipt is to be deleted.
RECEIPTS = 'celery-receipts-v2'


def parcels() -> dict[str, Any]:
    """Return the design document of a database of parcels, without a revision."""
    return load(__package__, PARCELS, {'parcels': '_count'})


def receipts() -> dict[str, Any]:
    """Return the design document `RECEIPTS` of a database of parcels, without a revision."""
    return {**load(__package__, RECEIPTS, {'receipts': ''}), 'autoupdate': False}


class ParcelRow(NamedTuple):
    """`parcels`, and `traffic` of a database of regions: value `[revision, size]`.

    The key in `parcels` is `[0, published]`, or `[1, failed]` of a refused parcel. In `traffic` it has the names of two
    regions after the first number, that to which the parcel is sent and that from which.
    """

    id: str
    rev: str
    #: The length of the document in characters.
    size: int

    @classmethod
    def of(cls, row: Row) -> ParcelRow:
        """Read a row."""
        return cls(row['id'], *row['value'])
