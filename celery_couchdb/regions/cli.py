"""The commands `celery couchdb regions`: set up and watch regions, and the tasks that this region gave to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

import kombu_couchdb.regions.region as regions
from kombu_couchdb.admin.setup import Step, Wanted, plan
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.auth import user_and_password
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import AccessDenied, CouchDBError, DatabaseMissing
from kombu_couchdb.parcels.device_setup import used_otherwise
from kombu_couchdb.parcels.stored_parcels import moving
from kombu_couchdb.queues.databases import broadcasts_of
from kombu_couchdb.regions.records import Records
from kombu_couchdb.regions.region_status import Direction, RegionStatus, Tally, direction, look, unready

from ..cli.clients import admin_option, app_of, broker_of, options_of, result_of, results_of, start
from ..cli.resource_commands import change, print_list, yes_option
from ..cli.setup import Admin, members_of, print_plan
from ..cli.tables import echo
from ..cli.vacuum import VacuumPart
from ..parcels import parcel_resource
from ..parcels.cli import add_commands, databases_of_parcels, selected
from ..resources.columns import NO_VALUE, Cell, Column, Row, Tone, count_cell, format_ago, format_date, format_duration
from ..resources.resource import Resource, counted

#: Shown in place of a table of regions.
NO_REGIONS = 'There are no other regions.'

#: The longest wait for another region, in seconds: for one request, and for all together.
_REQUEST_SECONDS, _REMOTE_SECONDS = 3.0, 7.0

#: What waits longer for the workers of a region is a problem. Without an outage it takes less than a second.
_WAIT_SECONDS = 30.0


@click.group('regions')
def command() -> None:
    """Set up and watch regions, and list, cancel, replay or drop tasks that this region gave to others."""


def database_of(app: Any) -> str | None:
    """Return the name of the app's database of regions; None if it has no regions."""
    options = app.conf.broker_transport_options or {}
    own, urls = options.get('region'), options.get('regions')
    return regions.database(urls, own) if own and urls else None


@dataclass(frozen=True)
class OwnRegion:
    """The region of the app."""

    name: str
    #: Clients for its database of regions, and for that of its broker.
    client: Client
    broker: Client
    #: The databases of regions of all regions, as the workers of other regions reach them.
    addresses: Mapping[str, Address]

    @classmethod
    def of(cls, app: Any, admin: Admin = None) -> OwnRegion:
        """Return the region of an app; *raises* `click.ClickException` if it has none."""
        options, name = options_of(app), database_of(app)
        if not name or not options.region or not options.regions:
            raise click.ClickException(
                'this app has no regions: set the transport options region and regions (broker_transport_options)'
            )
        addresses = regions.addresses(options.regions, options.credentials, app.conf.broker_use_ssl)
        broker = broker_of(app, admin)
        return cls(options.region, broker.beside(name), broker, addresses)

    @property
    def others(self) -> list[str]:
        return sorted(self.addresses.keys() - {self.name})

    def client_of(self, name: str) -> Client:
        """Return a client for the database of another region, which waits for 3 seconds at most."""
        return Client(self.addresses[name], _REQUEST_SECONDS, _REQUEST_SECONDS)

    def look(self) -> list[RegionStatus]:
        """Return the other regions as the own databases show them; *raises* `DatabaseMissing`."""
        return look(self.client, self.broker, self.name, self.others)


@contextmanager
def _needs_setup() -> Iterator[None]:
    """Raise `click.ClickException` if the database of regions does not exist."""
    try:
        yield
    except DatabaseMissing as exc:
        raise click.ClickException(f'{exc}; run "celery -A your_app couchdb regions setup"') from exc


# -- setup


@command.command('setup')
@click.option('--member', 'members', multiple=True, metavar='NAME', help='Also make this user a member.')
@click.option('--dry-run', is_flag=True, help='Print what would be done, and change nothing.')
@admin_option
@click.pass_context
def setup(ctx: click.Context, members: tuple[str, ...], dry_run: bool, admin: Admin) -> None:
    """Create the database of regions, and set its rights.

    Run it in each region after "couchdb setup", and again when the user of another region has changed. Members are the
    user of the app, the user in the URL of this region, and those that --member names: the users with which the workers
    of other regions read the database. A note says which regions cannot be read from here yet.
    """
    app = app_of(ctx)
    own = OwnRegion.of(app, admin)
    if use := _other_use(app, own):
        raise click.ClickException(
            f'{own.client.address.url} {use}: name a database of its own for region {own.name!r} in the transport '
            'option regions'
        )
    app_user, (peer, _) = broker_of(app).user, user_and_password(own.addresses[own.name]) or (None, None)
    peers = (*members, *([peer] if peer and peer not in (app_user, admin and admin[0]) else []))
    steps = plan(Wanted(own.client, [], members_of(app_user, peers, admin), not app_user))
    calls = [start(partial(unready, own.client_of(name), name)) for name in own.others]
    notes = [Step(text, notice=True) for call in calls if (text := result_of(call, _REMOTE_SECONDS))]
    print_plan([(own.client.address.url, [*steps, *notes])], dry_run)


def _other_use(app: Any, own: OwnRegion) -> str | None:
    """Return in words what else the database of regions is used for; None if it is used for nothing else."""
    uses = {
        **{own.addresses[name].url: f'is the database of region {name!r}' for name in own.others},
        **{client.address.url: 'is the database of parcels' for client in databases_of_parcels(app)},
        own.broker.address.url: 'is the database of the broker',
        broadcasts_of(own.broker).address.url: 'is the database of broadcasts',
    }
    if results := results_of(app):
        uses[results.address.url] = 'is the database of results'
    design = None
    with suppress(DatabaseMissing, AccessDenied):  # the plan says so
        design = used_otherwise(own.client)
    known = uses.get(own.client.address.url) or uses.get(own.addresses[own.name].url)
    return known or (f'has the design document {design}, so it is used for something else' if design else None)


# -- status


@command.command('status')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one line for each region. Durations are seconds.')
@click.option('--check', is_flag=True, help='End with exit status 1 if something is wrong, see below.')
@click.pass_context
def status(ctx: click.Context, as_json: bool, check: bool) -> None:
    """Show the tasks and results between this region and each other one, and what is wrong.

    SENT is the number of tasks that this region gave to the other one and that have not ended there yet. After five
    seconds, a task that was taken and has not ended is counted in THERE. DELAYED tasks cannot be moved now, and REFUSED
    ones stay, see "regions tasks". BACK is the number of results that wait there for this region, FROM that of tasks.
    Each number has the age of the oldest. RESPONDS is how long a request to the other region takes. At most 10,000
    documents are counted for each region.

    The command waits at most 7 seconds for a region that does not respond.

    With --check it ends with exit status 1 if a region does not respond or refuses the user, no worker leads in this
    region, something waits for more than 30 seconds, a task is delayed or was refused, or one of the regions cannot
    read the other one.
    """
    own = OwnRegion.of(app_of(ctx))
    with _needs_setup():
        found = own.look()
    until = time.monotonic() + _REMOTE_SECONDS
    calls = {name: start(partial(direction, own.client_of(name), name, own.name)) for name in own.others}
    for row in (row for row in found if row['name'] in calls):
        try:
            row['incoming'] = result_of(calls[row['name']], round(max(0.0, until - time.monotonic()), 1))
        except CouchDBError as exc:
            row['unreadable'] = str(exc)
    print_list(Resource(list, COLUMNS), found, as_json, empty=NO_REGIONS)
    wrong = problems(own.name, found)
    if not as_json:
        for line in [*(f'leader: {row["leader"]}' for row in found[:1] if row['leader']), *wrong]:
            echo(line)
    if check and wrong:
        raise click.ClickException(f'{counted(len(wrong), "problem")} found' if not as_json else '; '.join(wrong))


def problems(own: str, found: Sequence[RegionStatus]) -> list[str]:
    """Return sentences about what is wrong between the region `own` and the other ones."""
    lines = [text for region in found for text in _problems(own, region)]
    if found and not found[0]['leader']:
        lines.insert(0, f'no worker leads in region {own}: start a worker whose app has the option region = {own!r}')
    return lines


def _problems(own: str, region: RegionStatus) -> Iterator[str]:
    name, out, into = region['name'], region['outgoing'], region['incoming']
    if region['unreadable']:
        yield f'{name} cannot be read from this machine: {region["unreadable"]}'
    if out['error'] not in (None, region['unreadable']):
        yield f'{name} cannot be read by the leader of this region: {out["error"]}'
    if into and (age := _late(out['given']['sent'])):
        yield (
            f'{name} has taken nothing for {age}: no worker runs there, or its workers have not been restarted since '
            f'region {own} was added'
        )
    yield from _delayed(out, f'for {name}')
    if count := out['given']['refused']['count']:
        yield f'{name} has refused {counted(count, "task")}: see "couchdb regions tasks --state refused"'
    if into is None:
        return
    if into['error']:
        yield f'{name} cannot read region {own}: {into["error"]}'
    if age := _late(into['results']):
        yield f'results wait in {name} for {age}: the leader of region {own} has not fetched them'
    if age := _late(into['given']['sent']):
        yield f'tasks from {name} wait for {age}: the leader of region {own} has not taken them'
    yield from _delayed(into, f'from {name}')


def _delayed(direction: Direction, where: str) -> Iterator[str]:
    if (tally := direction['given']['delayed'])['count']:
        yield f'{counted(tally["count"], "task")} {where} cannot be moved now: {tally["reason"]}'


def _late(tally: Tally) -> str:
    """Return the age of the oldest in words if it is too high, or else ''."""
    oldest = tally['oldest']
    return format_duration(oldest) if oldest is not None and oldest > _WAIT_SECONDS else ''


def _cell(tally: Tally, tone: Tone) -> Cell:
    cell = count_cell(tally['count'], tone)
    return cell if tally['oldest'] is None else Cell(f'{cell.text} ({format_duration(tally["oldest"])})', cell.tone)


def _column(title: str, way: str, tally: Callable[[Direction], Tally], tone: Tone = '') -> Column:
    return Column(title, way, lambda found: _cell(tally(found), tone) if found else Cell(NO_VALUE, 'dim'), right=True)


#: The columns of regions. The last three are about what the databases of the others say.
COLUMNS = [
    Column('REGION', 'name', min_width=6),
    _column('SENT', 'outgoing', lambda found: found['given']['sent']),
    _column('DELAYED', 'outgoing', lambda found: found['given']['delayed'], 'warning'),
    _column('THERE', 'outgoing', lambda found: found['given']['there']),
    _column('REFUSED', 'outgoing', lambda found: found['given']['refused'], 'bad'),
    _column('BACK', 'incoming', lambda found: found['results']),
    _column('FROM', 'incoming', lambda found: found['given']['sent']),
    Column(
        'RESPONDS',
        'incoming',
        lambda found: f'{found["response"] * 1000:.0f} ms' if found else Cell('no', 'bad'),
        right=True,
    ),
]


# -- tasks


def _opened(ctx: click.Context, region: str | None) -> Records:
    own = OwnRegion.of(app_of(ctx))
    with _needs_setup():
        own.client.info()
    return Records(own.client, region or '')


def record_resource(records: Records) -> Resource[Document]:
    """Return the resource of records."""
    note = partial(_note, now=records.client.clock.now())
    return parcel_resource.parcel_resource(records, [Column('REGION', 'region', min_width=6)], note)


def _note(doc: Document, state: str, now: float) -> str:
    """Return why a task was refused or is delayed, and what will happen to it."""
    parts = [parcel_resource.note(doc, state)]
    if doc.get('state') == 'withdrawn':
        parts.append(f'runs in {doc.get("run_in")}')
    if state == 'delayed':
        parts.append(str(doc['delayed']))
    if 'cancelled' in doc:
        parts.append(f'cancelled {format_ago(doc["cancelled"], now)} ago')
    if state in ('sent', 'delayed') and isinstance(at := doc.get('fallback_at'), (int, float)):
        parts.append(f'runs in {doc.get("fallback")} if it is not taken within {format_duration(at - now)}')
    return '; '.join(filter(None, parts))


add_commands(
    command,
    Records,
    _opened,
    record_resource,
    click.option('--region', 'part', metavar='NAME', help='Only tasks that were given to this region.'),
    {
        'list': 'List the tasks that this region gave to others, and that have not ended.\n\nA task is sent until the '
        'other region has said that it has taken it, then there. A delayed one cannot be moved now. A refused one '
        'stays, with the reason. A withdrawn one runs in another region. The last column has the reason, or says what '
        'will happen.',
        'show': 'Show the records of a task that this region gave to others.\n\nID is the id of the task, or its first '
        'characters.',
        'replay': 'Send tasks again that another region has refused. ID is the id of a task, or its first characters.',
        'drop': 'Forget tasks that were given to other regions, for example to one that never returns.\n\nA task that '
        'the other region has not taken does not run. One that it has taken runs all the same, and its result is '
        'stored. ID is the id of a task, or its first characters.',
    },
    listing='tasks',
)


@command.command('cancel')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--terminate', is_flag=True, help='End the task even if it is running.')
@yes_option
@click.pass_context
def cancel(ctx: click.Context, names: tuple[str, ...], terminate: bool, yes: bool) -> None:
    """Cancel tasks in other regions: the workers there remove or revoke them, and their results become REVOKED.

    ID is the id of a task, or its first characters.
    """
    records = _opened(ctx, None)
    act = partial(records.cancel, terminate=terminate)
    change(ctx, 'Cancel', selected(records, names), act, 'to be cancelled', yes=yes)


# -- other commands


def whereabouts(app: Any, broker: Client, start: str) -> list[Row]:
    """Return the tasks that were given to other regions and whose ids begin with `start`: where they are, in `text`.

    `broker` is a client for the broker's database, whose user reads the database of regions, too.
    """
    name = database_of(app)
    if not name:
        return []
    client = broker.beside(name)
    try:
        records = Records(client)
        rows = record_resource(records).summary(records.find(start))
    except (DatabaseMissing, AccessDenied):
        return []
    finally:
        client.close()
    return [{**row, 'text': _place(row, client.clock.now())} for row in rows]


def _place(row: Row, now: float) -> str:
    """Return where a task is, in words."""
    region, ago = row['region'], f'{format_ago(row["since"], now)} ago'
    place = {
        'there': f'in region {region} since {format_date(row["since"])} UTC ({ago})',
        'refused': f'refused by region {region} {ago}',
        'withdrawn': f'withdrawn from region {region}',
    }.get(row['state'], f'sent to region {region} {ago}')
    return f'{place}: {row["note"]}' if row['note'] else place


def vacuum_part(app: Any, admin: Admin) -> VacuumPart | None:
    """Return what the command `vacuum` does for regions; None if the app has none."""
    if not database_of(app):
        return None
    own = OwnRegion.of(app, admin)

    def ids() -> set[str]:
        found = moving(own.client, f'region {own.name}', regions.RECORD)  # those that are taken back
        for name in own.others:
            found |= moving(own.client_of(name), f'region {name}', regions.records_to(own.name))
        return found

    return VacuumPart(ids, lambda: iter(()), own.client)
