"""What a connection asks before it stores a message: whether it is published elsewhere; see the room `regions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..couchdb.client import Client
from ..options import Options
from ..rooms import room


class AtHome:
    """Publishes every message in the broker's database. The room `regions` has a subclass."""

    def parcels_of(self, message: Mapping[str, Any], exchange: str, routing_key: str) -> tuple[Any, Sequence[Any]]:
        """Return a message as it is published, and the documents to store instead of its WorkItems, if there are any.

        *Raises* `ConfigurationError` if the message cannot be published.
        """
        return message, ()

    def store(self, docs: Sequence[Any], *, again: bool = False) -> Sequence[Any]:
        """Store those of the documents that do not belong in the broker's database, and return the others.

        *Raises* what `Store.publish` raises. `again` says that they may be stored already.
        """
        return docs

    def close(self) -> None:
        """Close the idle connections."""


def regions_of(options: Options, couchdb: Client) -> AtHome:
    """Return what publishes the messages of a connection elsewhere."""
    regions = room('regions')
    found: AtHome = regions.OtherRegions(options, couchdb) if regions else AtHome()
    return found
