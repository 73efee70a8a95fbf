"""Devices: publishers with a database of their own, which CouchDB replicates with the database of parcels.

A user of the database of parcels reads and writes the parcels of all others. A device's user has no right there, but a
database of its own. Two continuous replications connect the two databases, and only documents whose ids begin with the
user's name and a colon pass. So a device sees its own parcels and receipts only, and cannot write others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from urllib.parse import quote

from ..couchdb.address import Address
from ..couchdb.client import Client, Document
from ..couchdb.credentials import user_and_password
from ..couchdb.shapes import members
from ..errors import AccessDenied, ConfigurationError, Conflict, DatabaseMissing, NotFound, describe_user
from .setup import Step, Wanted, plan

__all__ = ['database_of', 'device_plan']

#: A user of a device: its name is part of the name of a database, of ids, and of a regular expression.
_NAME = re.compile(r'[a-z][a-z0-9_-]{0,59}\Z')


def database_of(parcels: str, name: str) -> str:
    """Return the name of a device's database; *raises* `ConfigurationError` if the user's name is not suitable."""
    if not _NAME.match(name):
        raise ConfigurationError(
            f'the user of a device must be named with a lower-case letter, then up to 59 lower-case letters, digits, '
            f'hyphens and underscores, not {name!r:.80}'
        )
    return f'{parcels}-{name}'


def device_plan(parcels: Client, own: Address, name: str) -> tuple[str, list[Step]]:
    """Return the URL of a device's database, and the steps that set it up for the user `name`. It changes nothing.

    `parcels` is an administrator's client for the database of parcels, and `own` the app's address of it: the
    replications work as the user of the app. *Raises* `AccessDenied` if the user of `parcels` may not do the steps.
    """
    client = parcels.beside(database_of(own.database, name))
    app = user_and_password(own)
    steps = plan(Wanted(client, [], list(dict.fromkeys([*([app[0]] if app else []), name]))), {})
    return client.address.url, [*steps, *_replications(client, own, app, name)]


def _replications(client: Client, own: Address, app: tuple[str, str] | None, name: str) -> Iterator[Step]:
    """Yield the steps after which both replications are there."""
    server = Client(client.address.root, *reversed(client.timeouts))
    auth = {'auth': {'basic': {'username': app[0], 'password': app[1]}}} if app else {}
    device, parcels = (
        {'url': f'{own.server}/{quote(database, safe="")}', **auth}
        for database in (client.address.database, own.database)
    )
    for direction, source, target in (('from', device, parcels), ('to', parcels, device)):
        doc_id = f'celery-{own.database}-{direction}-{name}'
        doc = {
            '_id': doc_id,
            'source': source,
            'target': target,
            'continuous': True,
            'selector': {'_id': {'$regex': f'^{name}:'}},
        }
        stored = _stored(server, doc_id)
        is_same = all(stored.get(member) == value for member, value in doc.items())
        yield Step(
            f'parcels of {name} are replicated {direction} this database',
            None if is_same and stored.get('_replication_state') != 'failed' else partial(_put, server, doc, stored),
        )


def _stored(server: Client, doc_id: str) -> Document:
    """Return a stored replication; an empty document if there is none."""
    try:
        found: Document = server.request('GET', _path(doc_id), repeat=True, shape=members())
        return found
    except (NotFound, DatabaseMissing):
        return {}
    except AccessDenied as exc:
        raise AccessDenied(
            f'{server.address.server}: {describe_user(server.user)} may not set up replications; name a server '
            f'administrator of CouchDB with --admin'
        ) from exc


def _put(server: Client, doc: Document, stored: Document) -> None:
    try:
        server.request('PUT', '/_replicator')
    except Conflict:
        pass  # the database exists
    server.request('PUT', _path(doc['_id']), body={**doc, '_rev': stored['_rev']} if stored else doc)


def _path(doc_id: str) -> str:
    return f'/_replicator/{quote(doc_id, safe="")}'
