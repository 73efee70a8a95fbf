"""The optional rooms of the broker: a list of classes, see `kombu_couchdb.room`.

To remove a room, delete its folder and its line here. The core imports no room by name.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from .room import Room

__all__ = ['rooms']

#: The module of each room, and its class.
ROOMS = (
    ('kombu_couchdb.contrib.parcels.room', 'ParcelsRoom'),
    ('kombu_couchdb.contrib.regions.room', 'RegionsRoom'),
)


@cache
def rooms() -> tuple[Room, ...]:
    """Return the rooms of this installation."""
    return tuple(getattr(import_module(module), name)() for module, name in ROOMS)
