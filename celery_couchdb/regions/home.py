"""The region in which a task was first sent: its result returns there.

The header `x-from-region` of a message names the region, and the tasks that a task sends inherit it. A result that has
to return gets the member `to`, by which CouchDB replicates it.
"""

from __future__ import annotations

from typing import Any

from kombu_couchdb.documents.region import FROM_REGION, origin

from ..parcels.inherited import header_of

__all__ = ['destination']


def destination(app: Any, request: Any) -> str | None:
    """Return the region to which the result of a task is returned, or None if the task was sent in this region."""
    own = (app.conf.broker_transport_options or {}).get('region')
    return origin({FROM_REGION: header_of(request, FROM_REGION)}, own) if own else None
