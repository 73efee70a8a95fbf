"""The room of parcels: see `celery_couchdb.room`.

A result finds its receipt by the header `x-parcel`: it has the database and the document id of a parcel with a receipt,
and the id of its task. The result of this task names the parcel. Other tasks inherit the header, because one of them
may store the result under the id of the first: a retry, or what replaces it. A task with the first version of Celery's
message protocol has no headers and passes nothing on.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kombu_couchdb.leases.leader import Led

from ...room import Elsewhere, Room
from ...rooms import header_of

__all__ = ['PARCEL', 'ParcelsRoom', 'parcel_of']

#: Publishers cannot set this header: the mover sets or removes it.
PARCEL = 'x-parcel'


def _part(name: str) -> Any:
    return import_module(f'{__package__}.{name}')


def parcel_of(request: Any, task_id: str) -> list[str] | None:
    """Return database and document id of the parcel whose task has this id; None if no parcel with a receipt has it.

    `request` is the task's request or None.
    """
    found = header_of(request, PARCEL)
    is_valid = isinstance(found, (list, tuple)) and len(found) == 3 and all(isinstance(part, str) for part in found)
    return [*found[:2]] if is_valid and found[2] == task_id else None


class ParcelsRoom(Room):
    """Moves parcels into the broker's database, and writes receipts."""

    headers, command_name, has_page = (PARCEL,), 'parcels', True

    def on_result(self, request: Any, task_id: str, doc: Any) -> Elsewhere:
        """Add the member `parcel` to the result of a parcel with a receipt."""
        if parcel := parcel_of(request, task_id):
            doc['parcel'] = parcel
        return [], True

    def services(self, app: Any, concurrency: int) -> Mapping[str, Led]:
        """Return the loop that moves parcels, if the app has the option `parcels`."""
        if not (app.conf.broker_transport_options or {}).get('parcels'):
            return {}
        return {'celery-couchdb-parcels': _part('mover').loop(app)}

    def command(self) -> Any:
        """Return the command `parcels`."""
        return _part('cli').command

    def page(self) -> Any:
        """Return the page of parcels."""
        return _part('page').page

    def setup_plans(
        self, app: Any, members: tuple[str, ...], publishers: tuple[str, ...], devices: tuple[str, ...], admin: Any
    ) -> list[tuple[str, list[Any]]]:
        """Return what the command `setup` does for the database of parcels and those of devices."""
        found: list[tuple[str, list[Any]]] = _part('cli').setup_plans(app, members, publishers, devices, admin)
        return found

    def vacuum_part(self, app: Any, admin: Any) -> Any:
        """Return what the command `vacuum` does for the database of parcels; None if the app has none."""
        return _part('cli').vacuum_part(app, admin)
