"""The design document of the database of results. Each `.js` file in this folder is the map function of one view.

Its name ends in a version, see `kombu_couchdb.design`. The index is updated only when it is read: workers and programs
read results by id, and only housekeeping reads the view.
"""

from __future__ import annotations

from typing import Any

from kombu_couchdb.design import load

__all__ = ['NAME', 'document']

NAME = 'celery-results-v3'


def document() -> dict[str, Any]:
    """Return the design document, without a revision."""
    return {**load(__name__, NAME, {'due': ''}), 'autoupdate': False}
