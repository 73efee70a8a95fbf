"""The optional rooms of the broker, and how the core finds them. To remove a room, delete its folder and its line here.

The core imports no room by name. Where a room may take part, the core asks `room` for it, and works without it if it is
not there.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

#: By name: the module that the core uses.
ROOMS = {'limits': 'kombu_couchdb.limits.limits_gate'}


@cache
def room(name: str) -> Any | None:
    """Return the module that the core uses of a room; None if this installation does not have the room."""
    return import_module(ROOMS[name]) if name in ROOMS else None
