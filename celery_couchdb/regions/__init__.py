"""Regions: tasks that run in another CouchDB, and their results on the way back.

`kombu_couchdb.regions.other_regions` stores a task for another region as a record, in the database of regions. In each
region one worker is the leader. For each other region it has a `link`, which reads that region's database: the `taker`
puts its tasks into queues here, and `home` stores results that return, and decides about tasks that were given away.
`lending` moves messages to idle regions.

This module has the functions that `celery_couchdb.rooms` names, and `everywhere` and `where` for programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from celery import current_app, group
from celery.canvas import Signature

from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.parcels.parcel import FROM_REGION
from kombu_couchdb.regions import records
from kombu_couchdb.regions.records import Whereabouts
from kombu_couchdb.regions.region import ANY, database, named

from ..parcels import INHERITED

__all__ = ['everywhere', 'where']

INHERITED.append(FROM_REGION)


def everywhere(signature: Signature) -> group:
    """Return a group with a copy of a task for each region, this one included, in the order of their names.

    Each copy is acknowledged and retried on its own, and has a result of its own. *Raises* `ConfigurationError` if the
    app has no transport option `regions`.
    """
    regions = (signature.app.conf.broker_transport_options or {}).get('regions')
    if not regions:
        raise ConfigurationError('everywhere() needs the transport option regions')
    return group([signature.clone().set(region=name) for name in sorted(regions)], app=signature.app)


def where(task_id: str, app: Any = None) -> Whereabouts | None:
    """Return the region to which a task was given, its state there, and since when; a few requests.

    None for a task that was given to no other region, or has ended. `app` is by default the current one. *Raises* the
    errors of `kombu_couchdb.errors`, and `ConfigurationError` if the app has no regions.
    """
    app = app or current_app
    options = app.conf.broker_transport_options or {}
    if not options.get('region') or not options.get('regions'):
        raise ConfigurationError('where() needs the transport options region and regions')
    client = import_module('celery_couchdb.connections').client_of(app)
    regions = client.beside(database(options['regions'], options['region']))
    try:
        return records.where(regions, task_id)
    finally:
        regions.close()
        client.close()


def check_header(app: Any, tasks: Iterable[Signature], options: Mapping[str, Any]) -> None:
    """Check the tasks of a chord's header; `options` override those of the tasks.

    The results of a header are counted in one region: nobody would count a task that ends in another one, and the body
    would never run. *Raises* `ConfigurationError` if one would run in another region. (One that may run in any region
    runs at home.)
    """
    if own := (app.conf.broker_transport_options or {}).get('region'):
        for step in tasks:
            route = app.amqp.router.route({**step.options, **options}, step.task, step.args, step.kwargs)
            region = named(route, route.get('headers'))
            if region not in (None, own, ANY):
                raise ConfigurationError(
                    f'task {step.task!r:.200} of the header of a chord names region {region!r:.80}: the header of a '
                    f'chord runs in the region where the chord is sent'
                )


def prepare_worker() -> None:
    """Let the leader of the region start in each worker that is ready, beside the mover of parcels."""
    duties = import_module('celery_couchdb.parcels.mover').DUTIES
    duties['region'] = import_module('celery_couchdb.regions.link').duties
