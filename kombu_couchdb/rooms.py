"""The optional rooms of the broker: a list of classes, see `kombu_couchdb.room`.

To remove a room, delete its folder and its line here. The core imports no room by name.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from .room import Room

__all__ = ['room', 'rooms']

#: By name: the module of a room and its class.
ROOMS = {
    'parcels': ('kombu_couchdb.contrib.parcels.room', 'ParcelsRoom'),
    'regions': ('kombu_couchdb.contrib.regions.room', 'RegionsRoom'),
}


@cache
def room(name: str) -> Room | None:
    """Return a room; None if this installation does not have it."""
    if name not in ROOMS:
        return None
    module, cls = ROOMS[name]
    made: Room = getattr(import_module(module), cls)()
    return made


def rooms() -> list[Room]:
    """Return the rooms of this installation."""
    return [found for found in map(room, ROOMS) if found]
