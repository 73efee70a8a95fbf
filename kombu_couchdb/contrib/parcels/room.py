"""The room of parcels in the broker: the channel of a database of parcels."""

from __future__ import annotations

from typing import Any

from ...room import Room
from .parcel import PARCELS
from .parcel_channel import ParcelChannel

__all__ = ['ParcelsRoom']


class ParcelsRoom(Room):
    """Databases of parcels, which a connection recognizes by their design document."""

    database = PARCELS

    def channel(self) -> type[Any]:
        """Return the class of channels that publish parcels."""
        return ParcelChannel
