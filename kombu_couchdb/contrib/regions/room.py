"""The room of regions in the broker: messages that name a region, and messages that wait until they are lent."""

from __future__ import annotations

from typing import Any

from ...room import Publisher, Room
from .other_regions import OtherRegions
from .region import check_name, check_regions, lending_document

__all__ = ['RegionsRoom']


class RegionsRoom(Room):
    """Regions: see `other_regions` and `region`."""

    options = ('region', 'regions')
    item_types = ('LentItem',)

    def check(self, option: str, value: Any) -> Any:
        """Return the checked value of the option `region` or `regions`."""
        return (check_name if option == 'region' else check_regions)(option, value)

    def documents(self) -> list[dict[str, Any]]:
        """Return the design document of messages that may be lent."""
        return [lending_document()]

    def publisher(self, connection: Any) -> Publisher:
        """Return what publishes messages of a connection in other regions."""
        return OtherRegions(connection.options, connection.couchdb)
