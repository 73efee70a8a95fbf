"""Setup of a device: its database, the rights in it, and the document by which workers find it."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..admin.setup import Step, Wanted, plan, user_exists
from ..admin.vacuum import MARKS
from ..couchdb.client import Client
from ..errors import ConfigurationError, DatabaseMissing
from .devices import DEVICE, Device, database_of


def device_plan(broker: Client, parcels: str, app_user: str | None, name: str) -> tuple[str, list[Step]]:
    """Return the URL of a device's database, and the steps that set it up for the user `name`. It changes nothing.

    `broker` is an administrator's client for the broker's database, and `parcels` the name of the database of parcels.
    *Raises* `AccessDenied` if the user of `broker` may not do the steps, and `ConfigurationError` if there is no such
    user, or if the database is not this device's.
    """
    database = database_of(parcels, name)
    client = broker.beside(database)
    if user_exists(client, name) is False:
        raise ConfigurationError(f'there is no user {name!r} yet: create it in CouchDB, as a document in _users')
    members = list(dict.fromkeys([*([app_user] if app_user else []), name]))
    try:
        known = (broker.find([DEVICE + name])[0] or {}).get('database')
    except DatabaseMissing:
        known = None  # the setup creates the broker's database first
    _check(client, known, name, members)
    register = partial(_register, broker, name, database)
    return client.address.url, [
        *plan(Wanted(client, [], members)),
        Step(f'the workers move the parcels of {name}', None if known == database else register),
    ]


def _check(client: Client, known: Any, name: str, members: list[str]) -> None:
    """Raise `ConfigurationError` if the device has another database, or the database other users or another purpose."""
    database = client.address.database
    if known and known != database:
        raise ConfigurationError(f'the device {name!r} has the database {known!r}: choose another name')
    try:
        design = used_otherwise(client)
        names = (client.request('GET', '/_security', repeat=True).get('members') or {}).get('names') or ()
    except DatabaseMissing:
        return
    others = [] if known else [user for user in names if user not in members]
    if others or design:
        used = f'which {others[0]!r} uses' if others else 'which the app uses otherwise'
        raise ConfigurationError(
            f'{client.address.url}, {used}, is not the database of this device; choose another name than {name!r}'
        )


def used_otherwise(client: Client) -> str | None:
    """Return the id of a design document by which a database is used for something else; None without one."""
    ids = (row['id'] for row in client.id_range('_design/') if row['id'] != MARKS)
    return next((doc_id for doc_id in ids if doc_id.startswith(('_design/celery-', '_design/parcels-'))), None)


def _register(broker: Client, name: str, database: str) -> None:
    doc_id = DEVICE + name
    found = broker.find([doc_id])[0] or {}
    doc: Device = {'_id': doc_id, 'type': 'Device', 'name': name, 'database': database, 'date': broker.clock.now()}
    broker.put({**doc, **({'_rev': found['_rev']} if found else {})})
