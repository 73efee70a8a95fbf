"""Devices: publishers with a database of their own, which CouchDB replicates with the database of parcels.

A user of the database of parcels reads and writes the parcels of all others. A device's user has no right there, but a
database of its own. Two continuous replications connect the two databases, and only documents whose ids begin with the
user's name and a colon pass. So a device sees its own parcels and receipts only, and cannot write others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

from ..admin.setup import Step, Wanted, plan
from ..couchdb.address import Address
from ..couchdb.auth import user_and_password
from ..couchdb.client import Client, Document
from ..couchdb.shapes import DONE
from ..errors import ConfigurationError, DatabaseMissing
from . import replications

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
    replications work as the user of the app. *Raises* `AccessDenied` if the user of `parcels` may not do the steps, and
    `ConfigurationError` if the database is not this device's.
    """
    client = parcels.beside(database_of(own.database, name))
    app = user_and_password(own)
    steps = plan(Wanted(client, [], list(dict.fromkeys([*([app[0]] if app else []), name]))))
    steps += _replications(client, own, name)
    try:
        ids = [row['id'] for row in client.id_range('_design/')]
    except DatabaseMissing:
        ids = []
    if any(doc_id.startswith(('_design/celery-', '_design/parcels-')) for doc_id in ids):
        raise ConfigurationError(
            f'{client.address.url} is not the database of a device; choose another name than {name!r}'
        )
    return client.address.url, steps


def compact_devices(parcels: Client) -> list[str]:
    """Let CouchDB compact the databases of the devices of a database of parcels; return the names of the databases."""
    own = parcels.address.database
    prefix = _id_of(own, 'from', '')
    found = replications.read(replications.server_of(parcels), replications.beginning_with(prefix)) or {}
    names = [doc_id.removeprefix(prefix) for doc_id in found]
    databases = [
        database
        for name, doc in zip(names, found.values(), strict=True)
        if _NAME.match(name) and _ends(doc) == ((database := database_of(own, name)), own)
    ]
    compacted = []
    for database in databases:
        try:
            parcels.beside(database).request('POST', '/_compact', shape=DONE)
            compacted.append(database)
        except DatabaseMissing:
            pass  # only its replications are left
    return compacted


def _replications(client: Client, own: Address, name: str) -> Iterator[Step]:
    """Yield the steps after which both replications are there; *raises* `ConfigurationError`, see `device_plan`."""
    database, parcels, server = client.address.database, own.database, replications.server_of(client)
    # Where the name of the database of parcels ends, and that of the user begins, is not visible in the name.
    parts = database.split('-')
    rivals = {('-'.join(parts[:at]), '-'.join(parts[at:])) for at in range(1, len(parts))} - {(parcels, name)}
    from_ids = {_id_of(other, 'from', device): (other, device) for other, device in rivals}
    own_ids = [_id_of(parcels, direction, name) for direction in ('from', 'to')]
    found = replications.read(server, {'keys': json.dumps([*own_ids, *from_ids])})
    for doc_id, (other, device) in from_ids.items():
        if found and doc_id in found and _ends(found[doc_id]) == (database, other):
            raise ConfigurationError(
                f'{client.address.url} belongs to the device {device!r} of the database of parcels {other!r}; '
                f'choose another name than {name!r}'
            )
    yield replications.missing(server, found)
    ends = [replications.endpoint(replace(own, database=each)) for each in (database, parcels)]
    for doc_id, direction, (source, target) in zip(own_ids, ('from', 'to'), (ends, reversed(ends)), strict=True):
        old = (found or {}).get(doc_id)
        if old and set(_ends(old)) != {database, parcels}:
            raise ConfigurationError(
                f'{server.address.server}: the replication {doc_id} connects other databases; choose another name than '
                f'{name!r}, or delete this document in _replicator'
            )
        doc = replications.replication(doc_id, source, target, {'_id': {'$regex': f'^{name}:'}})
        yield replications.step(server, f'parcels of {name} are replicated {direction} this database', doc, old)


def _id_of(parcels: str, direction: str, name: str) -> str:
    """Return the id of a replication from or to the database of a device."""
    return f'celery-{parcels}-{direction}-{name}'


def _ends(doc: Document) -> tuple[str, str]:
    """Return the names of the databases from and to which a replication copies documents."""
    return replications.database_in(doc, 'source'), replications.database_in(doc, 'target')
