"""The design document of the result database: the `.js` files beside this one, one view each.

Its name carries the version of its views. The index is brought up to date when it is read, not with each write: results
are read by id, and only housekeeping and people read the views.
"""

from __future__ import annotations

from typing import Any

from kombu_couchdb.design import load

__all__ = ['NAME', 'document']

NAME = 'celery-results-v1'

_REDUCE = {'by_state': '_count', 'by_task': '_count', 'due': ''}


def document() -> dict[str, Any]:
    """Return the design document, without a revision."""
    return {**load(__name__, NAME, _REDUCE), 'autoupdate': False}
