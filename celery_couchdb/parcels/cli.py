"""The commands `celery couchdb parcels`: parcels that wait or were refused, and receipts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import click

from kombu_couchdb.admin.setup import Step, plan
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.shapes import DONE
from kombu_couchdb.errors import CouchDBError, DatabaseMissing
from kombu_couchdb.parcels import parcel
from kombu_couchdb.parcels.device_setup import device_plan
from kombu_couchdb.parcels.devices import devices_of
from kombu_couchdb.parcels.stored_parcels import STATES, Parcels, moving, state_of

from ..cli.clients import app_of, broker_of
from ..cli.resource_commands import (
    change,
    json_option,
    limit_option,
    print_details,
    print_list,
    selection_options,
)
from ..cli.setup import Admin, wanted_beside
from ..cli.vacuum import VacuumPart
from ..resources.columns import NO_VALUE, Cell, Column, Row, Tone, count_cell, format_ago, json_line
from ..resources.resource import Resource, Selection, counted

#: The maximum length of a result in a table, in characters.
_MAX_DETAIL_CHARACTERS = 200

#: The member with the date of a document, and its tone, by state.
_DATES = {'waiting': 'published', 'refused': 'failed', 'moved': 'moved', 'done': 'done'}
_TONES: dict[str, Tone] = {'waiting': 'warning', 'refused': 'bad', 'moved': 'info', 'done': 'good'}


@click.group('parcels')
def command() -> None:
    """List, show, replay or drop parcels.

    Publishers without rights on the broker write parcels into the database of parcels, and devices into databases of
    their own.
    """


#: The option with the name of a device.
_device_option = click.option(
    '--device', metavar='NAME', help='Use the database of this device instead of the database of parcels.'
)


@command.command('list')
@click.option(
    '--state',
    '-s',
    'states',
    multiple=True,
    type=click.Choice(STATES),
    help='List only these: waiting to be moved, refused, moved and not yet done, or done. Can be given several times.',
)
@_device_option
@limit_option
@json_option
@click.pass_context
def list_(ctx: click.Context, states: tuple[str, ...], device: str | None, limit: int, as_json: bool) -> None:
    """List parcels that wait, refused ones with the reason, and receipts with what the tasks returned."""
    parcels = _parcels(ctx, device)
    print_list(
        parcel_resource(parcels.client.clock.now()),
        parcels.listing(*(states or STATES)),
        as_json,
        limit=limit,
        empty='There are no parcels.',
    )


@command.command('show')
@click.argument('name', metavar='ID')
@_device_option
@json_option
@click.pass_context
def show(ctx: click.Context, name: str, device: str | None, as_json: bool) -> None:
    """Show the document of a parcel or of a receipt.

    ID is the id of the document, or its first characters.
    """
    parcels = _parcels(ctx, device)
    print_details(parcel_resource(parcels.client.clock.now()), [_find(parcels, name)], as_json)


#: The options that select parcels.
_selection_options = selection_options('Select all refused parcels.', _device_option)


@command.command('replay')
@_selection_options
@click.pass_context
def replay(ctx: click.Context, names: tuple[str, ...], every: bool, device: str | None, yes: bool) -> None:
    """Let refused parcels wait again, for example after parcels_accept was extended and workers were restarted.

    ID is the id of a document, or its first characters. A parcel that was moved before is not run again.
    """
    parcels = _parcels(ctx, device)
    change(ctx, 'Replay', _selected(parcels, names, every), parcels.replay, 'replayed', yes=yes)


@command.command('drop')
@_selection_options
@click.pass_context
def drop(ctx: click.Context, names: tuple[str, ...], every: bool, device: str | None, yes: bool) -> None:
    """Delete parcels or receipts. The task of a parcel that waits does not run; that of a moved one does.

    ID is the id of a document, or its first characters. Replicas of the database see the deletion, too.
    """
    parcels = _parcels(ctx, device)
    selected = _selected(parcels, names, every)
    change(ctx, 'Drop', selected, lambda docs: (parcels.drop(docs), {}), 'dropped', yes=yes)


@command.command('devices')
@json_option
@click.pass_context
def devices(ctx: click.Context, as_json: bool) -> None:
    """List the devices, each with the number of its parcels that wait, were refused, or were moved and are not done.

    If a device is well, no parcel waits for longer than a moment, and none was refused.
    """
    app = app_of(ctx)
    broker = broker_of(app)
    found = _described(broker, devices_of(broker, _database_of(app)))
    print_list(Resource(list, _DEVICE_COLUMNS), found, as_json, empty='There are no devices.')


def _described(broker: Client, databases: dict[str, str]) -> Iterator[Row]:
    for name, database in databases.items():
        row: Row = {'device': name, 'database': database}
        parcels = Parcels(broker.beside(database))
        try:
            yield {**row, **{state: parcels.count(state) for state in _DEVICE_STATES}}
        except CouchDBError as exc:
            yield {**row, 'error': str(exc)}


#: What the list of devices counts.
_DEVICE_STATES = STATES[:3]

_DEVICE_COLUMNS = [
    Column('DEVICE', 'device', min_width=8),
    Column('DATABASE', 'database', min_width=12),
    *(Column(state.upper(), state, partial(count_cell, tone=_TONES[state]), right=True) for state in _DEVICE_STATES),
    Column('', 'error', lambda error: error or '', min_width=20),
]


def database_of(app: Any) -> str | None:
    """Return the name of the app's database of parcels; None if it has none."""
    name: str | None = (app.conf.broker_transport_options or {}).get('parcels')
    return name


def parcels_of(app: Any, admin: tuple[str, str] | None = None) -> Client | None:
    """Return a client for the database of parcels; None if the app has none. Its broker must be CouchDB."""
    name = database_of(app)
    return broker_of(app, admin, database=name) if name else None


def _parcels(ctx: click.Context, device: str | None) -> Parcels:
    app = app_of(ctx)
    name = _database_of(app)
    if device is not None:
        databases = devices_of(broker_of(app), name)
        if device not in databases:
            raise click.ClickException(f'there is no device {device!r}')
        name = databases[device]
    return Parcels(broker_of(app, database=name))


def _database_of(app: Any) -> str:
    if name := database_of(app):
        return name
    raise click.ClickException('the app has no database of parcels: set the transport option parcels to its name')


def _selected(parcels: Parcels, names: Sequence[str], every: bool) -> Selection[Document]:
    """Return documents; *raises* `UsageError` unless either names or all are given."""
    if bool(names) == every:
        raise click.UsageError('Name parcels by id, or give --all for all refused ones.')
    found = [_find(parcels, name) for name in names] if names else parcels.listing('refused')
    docs = list({doc['_id']: doc for doc in found}.values())
    which = f'parcel {docs[0]["_id"]}' if len(docs) == 1 else counted(len(docs), 'parcel')
    return Selection(which, docs, len(docs))


def _find(parcels: Parcels, name: str) -> Document:
    found = parcels.find(name)
    if not found:
        raise click.ClickException(f'there is no parcel {name!r}')
    if len(found) > 1:
        raise click.ClickException(f'several ids begin with {name!r}: {", ".join(doc["_id"] for doc in found)}')
    return found[0]


def parcel_resource(now: float) -> Resource[Document]:
    """Return the resource of parcels and receipts; `now` is in seconds since the epoch."""
    columns = [
        Column('ID', 'document', lambda doc: doc['_id'], min_width=12),
        Column('TASK', 'document', _task, min_width=10),
        Column('STATE', 'state', lambda state: Cell(state, _TONES[state])),
        Column('SINCE', None, partial(_since, now=now), right=True),
        Column('', None, _detail, min_width=20),
    ]
    return Resource(
        lambda docs: [{'state': state_of(doc), 'document': doc} for doc in docs],
        columns,
        details=lambda row: {'state of the parcel': row['state'], **row['document']},
    )


def _task(doc: Document) -> str:
    return task if isinstance(task := doc.get('task'), str) else NO_VALUE


def _since(row: Row, now: float) -> str:
    return format_ago(row['document'].get(_DATES[row['state']]), now)


def _detail(row: Row) -> str:
    """Return why a parcel was refused, or how its task ended."""
    state, doc = row['state'], row['document']
    if state == 'done':
        result = json_line(doc['result']) if 'result' in doc else doc.get('error') or doc.get('left_out') or ''
        return f'{doc.get("state")}: {result}'[:_MAX_DETAIL_CHARACTERS]
    return str(doc.get('reason', ''))[:_MAX_DETAIL_CHARACTERS] if state == 'refused' else ''


# -- other commands


def setup_plans(
    app: Any, members: tuple[str, ...], publishers: tuple[str, ...], devices: tuple[str, ...], admin: Admin
) -> list[tuple[str, list[Step]]]:
    """Return what the command `setup` does for the database of parcels and those of devices, by URL."""
    own, parcels = parcels_of(app), parcels_of(app, admin)
    if own is None or parcels is None:
        return []
    documents = parcel.design_documents()
    wanted = wanted_beside(parcels, own, (*members, *publishers), admin, documents)
    broker, database = broker_of(app, admin), parcels.address.database
    return [(parcels.address.url, plan(wanted)), *(device_plan(broker, database, own.user, name) for name in devices)]


def vacuum_part(app: Any, admin: Admin) -> VacuumPart | None:
    """Return what the command `vacuum` does for the database of parcels; None if the app has none."""
    parcels, broker = parcels_of(app, admin), broker_of(app, admin)
    if parcels is None:
        return None

    def of_devices() -> list[Client]:
        return [broker.beside(database) for database in devices_of(broker, parcels.address.database).values()]

    def finish() -> Iterator[str]:
        for client in of_devices():
            try:
                client.request('POST', '/_compact', shape=DONE)
            except DatabaseMissing:
                continue
            # Nothing is purged there: a device that was offline could bring parcels back.
            yield f'{client.address.database}: the database of a device is being compacted'

    return VacuumPart(lambda: moving([parcels, *of_devices()]), finish, parcels)
