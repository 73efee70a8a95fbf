"""Regions: tasks that run in another CouchDB, and their results on the way back.

`kombu_couchdb.contrib.regions.other_regions` stores a task for another region as a record, in the database of regions.
In each region one worker is the leader. For each other region it has a `link`, which reads that region's database: the
`taker` puts its tasks into queues here, and `home` stores results that return, and decides about tasks that were given
away. `lending` moves messages to idle regions.

This module has `everywhere`, `where` and `revoke` for programs; `room` is what the house calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from celery import current_app
from celery.canvas import Signature, _chain, chord, chunks, group

from kombu_couchdb.contrib.regions import records
from kombu_couchdb.contrib.regions.records import Whereabouts
from kombu_couchdb.contrib.regions.region import database
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError

__all__ = ['everywhere', 'revoke', 'where']


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
    copy = signature.clone().set(region=region)
    copy.options.pop('task_id', None)  # each copy has a result of its own
    return [copy]


def where(task_id: str, app: Any = None) -> Whereabouts | None:
    """Return the region to which a task was given, its state there, and since when; a few requests.

    None for a task that was given to no other region, or has ended. `app` is by default the current one. *Raises* the
    errors of `kombu_couchdb.errors`, and `ConfigurationError` if the app has no regions.
    """
    with _database(app) as client:
        return records.where(client, task_id)


def revoke(task_id: str, app: Any = None, *, region: str = '', terminate: bool = False) -> bool:
    """Ask for the end of a task that was given to another region; return whether there is such a task.

    If no worker has begun it, it does not run; otherwise it goes on, unless `terminate` is true. Its result is
    `REVOKED` then. The other region learns of it when it can be reached. A later step of a chain was not given away by
    this region: `region` names the one in which it runs or will run, and true is returned. `app` and errors are those
    of `where`; *raises* `ConfigurationError` for an unknown region, too. The workers there are told once, as by
    Celery's `revoke`: one that starts later, or a step that is sent hours later, does not know of it.
    """
    with _database(app) as client:
        if region and region not in (app or current_app).conf.broker_transport_options['regions']:
            raise ConfigurationError(f'region {region!r:.80} is not in the transport option regions')
        return records.cancel(client, task_id, to=region, terminate=terminate)[0] > 0


def database_of(app: Any) -> str | None:
    """Return the name of the app's database of regions; None if it has no regions."""
    options = app.conf.broker_transport_options or {}
    own, urls = options.get('region'), options.get('regions')
    return database(urls, own) if own and urls else None


@contextmanager
def _database(app: Any) -> Iterator[Client]:
    """Provide a client for the database of regions of an app."""
    if not (name := database_of(app or current_app)):
        raise ConfigurationError('the app has no regions: set the transport options region and regions')
    broker = import_module('celery_couchdb.connections').client_of(app or current_app)
    regions: Client = broker.beside(name)
    try:
        yield regions
    finally:
        regions.close()
        broker.close()
