"""The optional rooms of the broker, and how the core finds them. To remove a room, delete its folder and its line here.

The core imports no room by name. Where a room may take part, the core asks `room` for its module, or all rooms for what
they have under a name (`offered`), and works without those that are not there. This is what the core uses:

* `limits`: the class `LimitsGate`, see `consumer.claims.Gate`.
* `parcels`: the name `PARCELS` of the design document that a database of parcels has, and the class `ParcelChannel`,
  the channel for such a database.
* `regions`: the class `OtherRegions`, which makes parcels of the messages of a connection for other regions and stores
  them, and the functions `check_name` and `check_regions`, which check the transport options `region` and `regions`.
  `ITEM_TYPES` has the types of the documents that its messages become, whose conflicts are resolved as those of
  WorkItems, and `documents` returns its design documents in the broker's database.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

#: By name: the module that the core uses.
ROOMS = {
    'limits': 'kombu_couchdb.limits.limits_gate',
    'parcels': 'kombu_couchdb.contrib.parcels.parcel_channel',
    'regions': 'kombu_couchdb.contrib.regions.other_regions',
}


@cache
def room(name: str) -> Any | None:
    """Return the module that the core uses of a room; None if this installation does not have the room."""
    return import_module(ROOMS[name]) if name in ROOMS else None


def offered(name: str) -> list[Any]:
    """Return what the rooms that are there have under this name in their modules."""
    return [getattr(module, name) for module in map(room, ROOMS) if hasattr(module, name)]
