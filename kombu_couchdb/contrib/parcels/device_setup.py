"""Setup of a device: its database, the rights in it, and the document by which workers find it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from ...admin.setup import Step, Wanted, plan, user_exists
from ...admin.vacuum import MARKS
from ...couchdb.client import Client
from ...errors import ConfigurationError, DatabaseMissing, NotOffered
from .devices import DEVICE, Device, database_of


def device_plan(
    broker: Client, parcels: str, app_user: str | None, name: str, *, by_token: bool = False
) -> tuple[str, list[Step]]:
    """Return the URL of a device's database, and the steps that set it up for the user `name`. It changes nothing.

    `broker` is an administrator's client for the broker's database, and `parcels` the name of the database of parcels.
    With `by_token` users send tokens, and need no document in `_users`.
    *Raises* `AccessDenied` if the user of `broker` may not do the steps, and `ConfigurationError` if there is no such
    user, or if the database is not this device's.
    """
    database = database_of(parcels, name)
    client = broker.beside(database)
    with suppress(NotOffered):  # the plan below says so
        if not by_token and user_exists(client, name) is False:
            raise ConfigurationError(f'there is no user {name!r} yet: create it in CouchDB, as a document in _users')
    members = list(dict.fromkeys([*([app_user] if app_user else []), name]))
    try:
        known = broker.find([DEVICE + name])[0] or {}
    except DatabaseMissing:
        known = {}  # the setup creates the broker's database first
    if known.get('database', database) != database:
        raise ConfigurationError(f'the device {name!r} has the database {known["database"]!r}: choose another name')
    if use := _other_use(client, None if known else members):
        raise ConfigurationError(
            f'{client.address.url}, which {use}, is not the database of this device; choose another name than {name!r}'
        )
    now = broker.clock.now()
    doc: Device = {'_id': DEVICE + name, 'type': 'Device', 'name': name, 'database': database, 'date': now}
    register = None if known.get('database') else partial(broker.put, {**known, **doc})
    return client.address.url, [
        *plan(Wanted(client, [], members)),
        Step(f'the workers move the parcels of {name}', register),
    ]


def _other_use(client: Client, members: Sequence[str] | None) -> str | None:
    """Return who else uses a database, as words; None if nobody does. `members` are those that may, None for all."""
    try:
        is_ours = used_otherwise(client) is not None
        names = (client.request('GET', '/_security', repeat=True).get('members') or {}).get('names') or ()
    except DatabaseMissing:
        return None
    except NotOffered:
        names = ()
    others = [user for user in names if members is not None and user not in members]
    return f'{others[0]!r} uses' if others else 'the app uses otherwise' if is_ours else None


def used_otherwise(client: Client) -> str | None:
    """Return the id of a design document by which a database is used for something else; None without one."""
    ids = (row['id'] for row in client.id_range('_design/') if row['id'] != MARKS)
    return next((doc_id for doc_id in ids if doc_id.startswith(('_design/celery-', '_design/parcels-'))), None)
