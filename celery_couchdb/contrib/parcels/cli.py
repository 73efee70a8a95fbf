"""The commands `celery couchdb parcels`: parcels that wait or were refused, and receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import click

from kombu_couchdb.admin.setup import Step, plan
from kombu_couchdb.contrib.parcels.device_setup import device_plan
from kombu_couchdb.contrib.parcels.devices import devices_of
from kombu_couchdb.contrib.parcels.parcel import design_documents
from kombu_couchdb.contrib.parcels.stored_parcels import Parcels, moving
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.shapes import DONE
from kombu_couchdb.errors import CouchDBError, DatabaseMissing, NotOffered
from kombu_couchdb.values import enumerated

from ...cli.clients import app_of, broker_of
from ...cli.resource_commands import change, json_option, limit_option, print_details, print_list, selection_options
from ...cli.setup import Admin, wanted_beside
from ...cli.vacuum import VacuumPart
from ...resources.columns import Cell, Column, Row, Tone, count_cell, format_ago
from ...resources.resource import Resource, Selection, counted

#: The maximum length of a note in a table, in characters.
_MAX_NOTE_CHARACTERS = 200

#: The tones of states.
_TONES: dict[str, Tone] = {
    **dict.fromkeys(('waiting', 'sent', 'delayed', 'withdrawn'), 'warning'),
    **dict.fromkeys(('moved', 'there'), 'info'),
    'refused': 'bad',
    'done': 'good',
}


@click.group('parcels')
def command() -> None:
    """List, show, replay or drop parcels.

    Publishers without rights on the broker write parcels into the database of parcels, and devices into databases of
    their own.
    """


# -- the resource and the commands of stored parcels


def parcel_resource(stored: Parcels) -> Resource[Document]:
    """Return the resource of stored parcels."""
    columns = [
        Column('ID', 'id', min_width=9),
        Column('TASK', 'task', min_width=10),
        *(Column(name.upper(), name, min_width=6) for name in stored.columns),
        Column('STATE', 'state', lambda state: Cell(state, _TONES[state])),
        Column('SINCE', 'since', partial(format_ago, now=stored.client.clock.now()), right=True),
        Column('', 'note', lambda text: text[:_MAX_NOTE_CHARACTERS], min_width=20),
    ]
    return Resource(
        lambda docs: [{**stored.describe(doc), 'document': doc} for doc in docs],
        columns,
        details=lambda row: {f'state of the {stored.noun}': row['state'], **row['document']},
    )


def add_commands(
    group: click.Group,
    kind: type[Parcels],
    opened: Callable[[click.Context, str | None], Parcels],
    part: str,
    listing: str = 'list',
) -> None:
    """Add the commands `listing`, `show`, `replay` and `drop` to a group.

    `part` is the name of the option with which `opened` returns a part of all that is stored.
    """
    part_option = click.option(f'--{part}', 'part', metavar='NAME', help=f'Only those of this {part}.')
    selecting = selection_options(f'Select all refused {kind.noun}s.', part_option)
    states = click.Choice([*kind.states])
    id_text = 'ID is an id, or its first characters.'

    @group.command(listing, help=f'List {kind.plural} by state. It says since when, why, and what came of them.')
    @click.option('--state', '-s', 'states', multiple=True, type=states, help='Only these. Can be given several times.')
    @part_option
    @limit_option
    @json_option
    @click.pass_context
    def list_(ctx: click.Context, part: str | None, states: tuple[str, ...], limit: int, as_json: bool) -> None:
        stored, empty = opened(ctx, part), f'There are no {kind.noun}s.'
        print_list(parcel_resource(stored), stored.listing(*states), as_json, limit=limit, empty=empty)

    @group.command('show', help=f'Show all about {kind.plural}. {id_text}')
    @click.argument('name', metavar='ID')
    @part_option
    @json_option
    @click.pass_context
    def show(ctx: click.Context, name: str, part: str | None, as_json: bool) -> None:
        stored = opened(ctx, part)
        print_details(parcel_resource(stored), _find(stored, name), as_json)

    def add_change(name: str, done: str, help_text: str) -> None:
        @group.command(name, help=f'{help_text} {id_text}')
        @selecting
        @click.pass_context
        def act(ctx: click.Context, part: str | None, names: tuple[str, ...], every: bool, yes: bool) -> None:
            stored = opened(ctx, part)
            change(ctx, name.capitalize(), selected(stored, names, every), getattr(stored, name), done, yes=yes)

    add_change('replay', 'replayed', f'Let refused {kind.noun}s be checked and taken again.')
    add_change('drop', 'dropped', f'Delete {kind.plural}. What was taken runs all the same.')


def selected(stored: Parcels, names: Sequence[str], every: bool = False) -> Selection[Document]:
    """Return documents by name, or every refused one; *raises* `UsageError` unless either is given."""
    if bool(names) == every:
        raise click.UsageError(f'Name {stored.noun}s by id, or give --all for all refused ones.')
    found = stored.listing('refused') if every else (doc for name in names for doc in _find(stored, name))
    docs = list({doc['_id']: doc for doc in found}.values())
    named = {stored.name_of(doc) for doc in docs}
    which = f'{stored.noun} {named.pop()}' if len(named) == 1 else counted(len(docs), stored.noun)
    return Selection(which, docs, len(docs))


def _find(stored: Parcels, name: str) -> list[Document]:
    """Return the documents with a name, or with the only name that begins so; *raises* `click.ClickException`."""
    found = stored.find(name)
    found = [doc for doc in found if stored.name_of(doc) == name] or found
    names = sorted({stored.name_of(doc) for doc in found})
    if not names:
        raise click.ClickException(stored.missing.format(name))
    if len(names) > 1:
        raise click.ClickException(f'several ids begin with {name!r}: {enumerated(names)}')
    return found


def _opened(ctx: click.Context, device: str | None) -> Parcels:
    broker, databases = _databases(ctx)
    if device and device not in databases:
        raise click.ClickException(f'there is no device {device!r}')
    return Parcels(broker.beside(databases[device or '']))


add_commands(command, Parcels, _opened, 'device')


# -- devices


@command.command('devices')
@json_option
@click.pass_context
def devices(ctx: click.Context, as_json: bool) -> None:
    """List the devices with the numbers of their parcels.

    Counted are those that wait, were refused, or were moved and are not done. If a device is well, no parcel waits for
    longer than a moment, and none was refused.
    """
    broker, databases = _databases(ctx)
    found = (_device(broker, name, database) for name, database in databases.items() if name)
    print_list(Resource(list, _DEVICE_COLUMNS), found, as_json, empty='There are no devices.')


def _device(broker: Client, name: str, database: str) -> Row:
    stored = Parcels(broker.beside(database))
    try:
        return {'device': name, 'database': database, **{state: stored.count(state) for state in _DEVICE_STATES}}
    except CouchDBError as exc:
        return {'device': name, 'database': database, 'error': str(exc)}


#: What the list of devices counts.
_DEVICE_STATES = ('waiting', 'refused', 'moved')

_DEVICE_COLUMNS = [
    Column('DEVICE', 'device', min_width=8),
    Column('DATABASE', 'database', min_width=12),
    *(Column(state.upper(), state, partial(count_cell, tone=_TONES[state]), right=True) for state in _DEVICE_STATES),
    Column('', 'error', lambda error: error or '', min_width=20),
]


# -- databases


def database_of(app: Any) -> str | None:
    """Return the name of the app's database of parcels; None if it has none."""
    name: str | None = (app.conf.broker_transport_options or {}).get('parcels')
    return name


def databases_of(app: Any, broker: Client) -> dict[str, str]:
    """Return the database of parcels, by '', and those of devices, by their names; none if the app has none.

    `broker` is a client for the database of the broker. *Raises* the errors of `Client`.
    """
    name = database_of(app)
    return {'': name, **devices_of(broker, name)} if name else {}


def _databases(ctx: click.Context) -> tuple[Client, dict[str, str]]:
    app = app_of(ctx)
    if not database_of(app):
        raise click.ClickException('the app has no database of parcels: set the transport option parcels to its name')
    broker = broker_of(app)
    return broker, databases_of(app, broker)


def setup_plans(
    app: Any, members: tuple[str, ...], publishers: tuple[str, ...], devices: tuple[str, ...], admin: Admin
) -> list[tuple[str, list[Step]]]:
    """Return what the command `setup` does for the database of parcels and those of devices, by URL."""
    name = database_of(app)
    if not name:
        return []
    own, broker = broker_of(app, database=name), broker_of(app, admin)
    wanted = wanted_beside(broker.beside(name), own, (*members, *publishers), admin, design_documents())
    return [
        (wanted.client.address.url, plan(wanted)),
        *(device_plan(broker, name, own.user, device, by_token=wanted.by_token) for device in devices),
    ]


def vacuum_part(app: Any, admin: Admin) -> VacuumPart | None:
    """Return what the command `vacuum` does for the database of parcels; None if the app has none."""
    name, broker = database_of(app), broker_of(app, admin)
    if not name:
        return None

    def ids() -> set[str]:
        found = set[str]()
        for database in databases_of(app, broker).values():
            with suppress(DatabaseMissing):
                found |= moving(broker.beside(database), database)
        return found

    def finish() -> Iterator[str]:
        for database in devices_of(broker, name).values():
            # Nothing is purged there: a device that was offline could bring parcels back.
            with suppress(DatabaseMissing, NotOffered):  # the vacuum of the broker's database has told it
                broker.beside(database).request('POST', '/_compact', shape=DONE)
                yield f'{database}: the database of a device is being compacted'

    return VacuumPart(ids, finish, broker_of(app, admin, database=name))
