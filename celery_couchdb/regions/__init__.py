"""Regions: tasks that run in another CouchDB, and their results on the way back.

`kombu_couchdb.regions.other_regions` publishes a task for another region as a parcel, which CouchDB replicates.
`region_mover` publishes the parcels that arrive, and `parcels.origin_headers` says to which region a result returns.
"""

from __future__ import annotations

from celery import group
from celery.canvas import Signature

from kombu_couchdb.errors import ConfigurationError

__all__ = ['everywhere']


def everywhere(signature: Signature) -> group:
    """Return a group with a copy of a task for each region, this one included, in the order of their names.

    Each copy is acknowledged and retried on its own, and has a result of its own. *Raises* `ConfigurationError` if the
    app has no transport option `regions`.
    """
    regions = (signature.app.conf.broker_transport_options or {}).get('regions')
    if not regions:
        raise ConfigurationError('everywhere() needs the transport option regions')
    return group([signature.clone().set(region=name) for name in sorted(regions)], app=signature.app)
