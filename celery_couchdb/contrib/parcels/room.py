"""The room of parcels: see `celery_couchdb.room`.

The worker that ends the task of a parcel writes into its receipt how it ended, in the request that stores the result or
one more. The header `x-parcel` says where the receipt is, see `Origin`. Other tasks inherit the header, because one of
them may end the first one: a retry, or what replaces it. A task with the first version of Celery's message protocol has
no headers and passes nothing on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from celery import states

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases.leader import Led
from kombu_couchdb.values import is_number

from ...results.documents import error_text, unpack
from ...room import Elsewhere, Room
from ...rooms import header_of

__all__ = ['PARCEL', 'Origin', 'ParcelsRoom']

#: Publishers cannot set this header: the mover sets or removes it.
PARCEL = 'x-parcel'

_IGNORED = {'left_out': 'the task has no result, or ignores it'}


def _part(name: str) -> Any:
    return import_module(f'{__package__}.{name}')


class Origin(NamedTuple):
    """The value of the header `PARCEL`: the parcel with a receipt from which a task came."""

    database: str
    doc_id: str
    task_id: str
    #: The revision of the parcel that was moved: another one is another parcel, or a receipt.
    rev: str
    #: When it was moved, and for how many seconds its receipt is kept after the end of the task.
    moved: float
    keep: float

    @classmethod
    def of(cls, request: Any, task_id: str) -> Origin | None:
        """Return the origin of the task with this id; None if it has none. `request` is its request or None."""
        found = header_of(request, PARCEL)
        if not isinstance(found, (list, tuple)) or len(found) != len(cls._fields):
            return None
        origin = cls(*found)
        is_valid = all(isinstance(part, str) for part in found[:4]) and all(map(is_number, found[4:]))
        return origin if is_valid and origin.task_id == task_id else None


def _outcome(backend: Any, doc: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = backend.decode(unpack(doc))['result']
    except Exception as exc:  # any serializer may have written it
        return parcel.error_outcome(f'the result cannot be decoded: {exc}')
    is_error = doc['status'] in states.EXCEPTION_STATES
    return parcel.error_outcome(error_text(found)) if is_error else parcel.result_outcome(found)


class ParcelsRoom(Room):
    """Moves parcels into the broker's database, and writes receipts."""

    headers, completed_type, command_name, has_page = (PARCEL,), 'Receipt', 'parcels', True

    def on_result(self, backend: Any, request: Any, task_id: str, doc: Any, *, is_result: bool) -> Elsewhere:
        """Return what a receipt says about the end of its task, beside the result."""
        origin, state = Origin.of(request, task_id), doc['status']
        if origin is None or state not in {*states.READY_STATES, states.IGNORED}:
            return [], True
        outcome = _outcome(backend, doc) if is_result or state in states.EXCEPTION_STATES else _IGNORED
        end = {'id': task_id, 'moved': origin.moved, **parcel.end_of(state, outcome, doc['date'], origin.keep)}
        head = {name: doc[name] for name in ('_id', 'task', 'status')}
        # Devices may give their documents the same ids.
        found = {
            '_id': f'{origin.database}/{origin.doc_id}',
            'type': 'Receipt',
            'parcel': origin.doc_id,
            'rev': origin.rev,
        }
        return [(origin.database, {**found, 'end': end, 'result': head})], True

    def complete(self, client: Client, docs: Sequence[dict[str, Any]]) -> None:
        """Write into receipts how their tasks have ended."""
        revs = {doc['parcel']: doc['rev'] for doc in docs}
        _part('receipts').complete(client, {doc['parcel']: doc['end'] for doc in docs}, revs)

    def prepare_worker(self, app: Any) -> None:
        """Let tasks of parcels that end without a result be told, if the app has the option `parcels`."""
        if (app.conf.broker_transport_options or {}).get('parcels'):
            _part('ends').connect()

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
