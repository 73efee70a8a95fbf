"""Room: the base class of the optional parts of the broker, such as parcels and regions, with empty methods.

The rest of the package knows an optional part by this class alone. `kombu_couchdb.rooms` lists the subclasses, and
`celery_couchdb.room` is the same for results, workers and commands. A room that an app does not use costs its messages
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ['Publisher', 'Room']


class Publisher:
    """Stores some messages of a connection in another place than their queues."""

    #: It is asked for messages that have one of these headers or properties.
    members: frozenset[str] = frozenset()
    #: The types of the documents that it makes.
    types: frozenset[str] = frozenset()

    def documents(
        self, message: Mapping[str, Any], exchange: str, routing_key: str
    ) -> tuple[dict[str, Any], Sequence[Any]]:
        """Return a message as it is published, and the documents that take its place; none if it is published here.

        *Raises* `ConfigurationError`.
        """
        raise NotImplementedError

    def store(self, docs: Sequence[Any]) -> None:
        """Store documents that `documents` returned; *raises* what `Store.publish` raises."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the idle connections."""


class Room:
    """An optional room. A room overrides what it needs; a process has one instance of each."""

    #: The transport options that the room checks.
    options: tuple[str, ...] = ()
    #: The types of the room's documents in the broker's database that are messages, and become WorkItems again.
    item_types: tuple[str, ...] = ()
    #: The design document by which a connection recognizes a database of the room. Its name sorts after `design.NAME`.
    database: str | None = None

    def check(self, option: str, value: Any) -> Any:
        """Return the value of one of the room's transport options; *raises* `ConfigurationError` if it is wrong."""
        return value

    def documents(self) -> list[dict[str, Any]]:
        """Return the room's design documents in the broker's database, without revisions."""
        return []

    def channel(self) -> type[Any]:
        """Return the class of channels for a database of the room, see `database`."""
        raise NotImplementedError

    def publisher(self, connection: Any) -> Publisher | None:
        """Return what stores messages of a connection, a `Transport`, in another place; None if nothing does."""
        return None
