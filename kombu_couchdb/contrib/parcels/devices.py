"""Devices: publishers with a database of their own, beside the database of parcels, from which a worker moves parcels.

A user of the database of parcels reads and writes the parcels of all others. A device's user has no right there, but a
database of its own. So a device sees its own parcels and receipts only, and cannot write others. Workers find the
databases by a document for each device in the broker's database, which only workers and administrators can write::

    {"_id": "broker:device:<name>", "type": "Device",
     "name": …, "database": "<parcels>-<name>",
     "date": 1763709000.5}                          when it was set up
"""

from __future__ import annotations

import re
from typing import Literal

from ...couchdb.client import Client
from ...documents.ids import BROKER
from ...documents.types import Stored
from ...errors import ConfigurationError

#: The beginning of the ids of the documents of devices.
DEVICE = BROKER + 'device:'

#: A user of a device: its name is part of the name of a database.
_NAME = re.compile(r'[a-z][a-z0-9_-]{0,59}\Z')


class Device(Stored):
    """What workers know of a device."""

    _id: str
    type: Literal['Device']
    name: str
    database: str
    date: float


def database_of(parcels: str, name: str) -> str:
    """Return the name of a device's database; *raises* `ConfigurationError` if the user's name is not suitable."""
    if not _NAME.match(name):
        raise ConfigurationError(
            f'the user of a device must be named with a lower-case letter, then up to 59 lower-case letters, digits, '
            f'hyphens and underscores, not {name!r:.80}'
        )
    return f'{parcels}-{name}'


def devices_of(broker: Client, parcels: str) -> dict[str, str]:
    """Return the databases of the devices beside the database `parcels`, by name of the device.

    Malformed documents are ignored. *Raises* the errors of `kombu_couchdb.errors`.
    """
    docs = {row['id'].removeprefix(DEVICE): row['doc'] for row in broker.id_range(DEVICE, docs=True)}
    return {
        name: f'{parcels}-{name}'
        for name, doc in docs.items()
        if doc.get('type') == 'Device' and _NAME.match(name) and doc.get('database') == f'{parcels}-{name}'
    }
