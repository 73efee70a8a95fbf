"""Regions: tasks that run in another CouchDB, and their results on the way back.

`kombu_couchdb.contrib.regions.other_regions` stores a task for another region as a record, in the database of regions.
In each region one worker is the leader. For each other region it has a `link`, which reads that region's database: the
`taker` puts its tasks into queues here, and `home` stores results that return, and decides about tasks that were given
away.
`lending` moves messages to idle regions.

This module has the functions that `celery_couchdb.rooms` names, and `everywhere` and `where` for programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from uuid import uuid4

from celery import current_app
from celery.canvas import Signature, _chain, chord, chunks, group

from kombu_couchdb.contrib.parcels.parcel import FROM_REGION, GIVER
from kombu_couchdb.contrib.regions import records
from kombu_couchdb.contrib.regions.records import Whereabouts
from kombu_couchdb.contrib.regions.region import ANY, Giver, database, named, returned
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.types import Document
from kombu_couchdb.errors import ConfigurationError

from ..parcels import INHERITED, header_of

__all__ = ['everywhere', 'revoke', 'where']

INHERITED.extend((FROM_REGION, GIVER))


def everywhere(signature: Signature) -> group:
    """Return a group with a copy of a task for each region, this one included, in the order of their names.

    Each copy is acknowledged and retried on its own, and has a result of its own. Of a group, each task is copied. A
    chain begins in each region, and its next steps follow there. *Raises* `ConfigurationError` if the app has no
    transport option `regions`, or for a chord: its results are counted in one region.
    """
    regions = (signature.app.conf.broker_transport_options or {}).get('regions')
    if not regions:
        raise ConfigurationError('everywhere() needs the transport option regions')
    return group([copy for name in sorted(regions) for copy in _copies(signature, name)], app=signature.app)


def _copies(signature: Signature, region: str) -> list[Signature]:
    """Return a copy of a task or of a chain in a region, or of each task of a group."""
    if isinstance(signature, chunks):
        signature = signature.group()
    if isinstance(signature, group):
        tasks = [task.clone().set(**signature.options) for task in signature.tasks]
        return [copy for task in tasks for copy in _copies(task, region)]
    first = signature
    while isinstance(first, _chain) and first.tasks:
        first = first.tasks[0]
    if isinstance(first, (group, chord)):
        raise ConfigurationError(
            'everywhere() takes no chord: the header of a chord runs in the region where it is sent'
        )
    return [signature.clone().set(region=region)]


def results_elsewhere(request: Any, task_id: str, doc: Mapping[str, Any]) -> tuple[list[tuple[str, Document]], bool]:
    """Return how a result returns to other regions, and whether it is stored here, too; see `celery_couchdb.rooms`.

    It returns to the region where the first task was sent. The result of a task that was given away also returns to its
    giver, and is stored here only if the first task was sent here. Results of the tasks that it sends are stored here.
    """
    giver, sent_in = Giver.of({GIVER: header_of(request, GIVER)}), header_of(request, FROM_REGION)
    if giver is None:
        return [], True
    is_given = giver.task_id == task_id
    record_in: dict[str, str | None] = {sent_in: None} if isinstance(sent_in, str) and sent_in != giver.own else {}
    if is_given:
        record_in[giver.region] = giver.record
    docs = [returned(home, task_id, uuid4().hex, doc, record, doc['date']) for home, record in record_in.items()]
    return [(giver.database, document) for document in docs], not is_given or sent_in == giver.own


def where(task_id: str, app: Any = None) -> Whereabouts | None:
    """Return the region to which a task was given, its state there, and since when; a few requests.

    None for a task that was given to no other region, or has ended. `app` is by default the current one. *Raises* the
    errors of `kombu_couchdb.errors`, and `ConfigurationError` if the app has no regions.
    """
    with _database(app) as client:
        return records.where(client, task_id)


def revoke(task_id: str, app: Any = None, *, terminate: bool = False) -> bool:
    """Ask for the end of a task that was given to another region; return whether there is such a task.

    If no worker has begun it, it does not run; otherwise it goes on, unless `terminate` is true. Its result is
    `REVOKED` then. The other region learns of it when it can be reached. `app` and errors are those of `where`.
    """
    with _database(app) as client:
        return records.cancel(client, task_id, terminate=terminate)[0] > 0


@contextmanager
def _database(app: Any) -> Iterator[Client]:
    """Provide a client for the database of regions of an app."""
    app = app or current_app
    options = app.conf.broker_transport_options or {}
    if not options.get('region') or not options.get('regions'):
        raise ConfigurationError('the app has no regions: set the transport options region and regions')
    broker = import_module('celery_couchdb.connections').client_of(app)
    regions: Client = broker.beside(database(options['regions'], options['region']))
    try:
        yield regions
    finally:
        regions.close()
        broker.close()


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
    duties = import_module('celery_couchdb.contrib.parcels.mover').DUTIES
    duties['region'] = import_module('celery_couchdb.contrib.regions.link').duties
