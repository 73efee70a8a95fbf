"""The design documents of regions: one in the database of regions, and one in the broker's database."""

from __future__ import annotations

from typing import Any

from ..design import load

#: The design document of a database of regions.
REGIONS = 'celery-regions-v1'

#: The design document of the broker's database with the view `lendable`, the messages that may be lent to other
#: regions. Its index is updated when it is read.
LENDING = 'celery-lending-v1'


def regions() -> dict[str, Any]:
    """Return the design document of a database of regions, without a revision."""
    return load(__package__, REGIONS, {'traffic': '_count', 'fallbacks': ''})


def lending() -> dict[str, Any]:
    """Return the design document `LENDING`, without a revision."""
    return {**load(__package__, LENDING, {'lendable': ''}), 'autoupdate': False}
