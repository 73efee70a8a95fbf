"""The commands `celery couchdb regions`: set up and watch regions, and the tasks that this region gave to others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import click

from kombu_couchdb.admin.jobs import choose
from kombu_couchdb.admin.setup import Step, Wanted, plan
from kombu_couchdb.admin.vacuum import MARKS
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.auth import user_and_password
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import AccessDenied, CouchDBError, DatabaseMissing
from kombu_couchdb.queues.databases import broadcasts_of
from kombu_couchdb.regions import records, region_status
from kombu_couchdb.regions.region import RECORD, STATES, addresses, database, records_to
from kombu_couchdb.regions.region_status import GivenAway, RegionStatus, Tally

from ..cli.clients import admin_option, app_of, broker_of, options_of, result_of, results_of, start
from ..cli.resource_commands import (
    change,
    json_option,
    limit_option,
    print_details,
    print_list,
    selection_options,
    yes_option,
)
from ..cli.setup import Admin, members_of, print_plan
from ..cli.tables import echo
from ..cli.vacuum import VacuumPart
from ..parcels.cli import parcels_of
from ..resources.columns import NO_VALUE, Cell, Column, Row, Tone, count_cell, format_ago, format_date, format_duration
from ..resources.resource import Resource, Selection, counted

#: Shown in place of a table of regions, and of tasks.
NO_REGIONS, NO_TASKS = 'There are no other regions.', 'No task is on its way to another region, or there.'

#: The longest wait for another region, in seconds: for one request, and for all together.
_REQUEST_SECONDS, _REMOTE_SECONDS = 3.0, 7.0

#: What waits longer for the workers of a region is a problem. Without an outage it takes less than a second.
_WAIT_SECONDS = 30.0

_TONES: dict[str, Tone] = {'sent': 'warning', 'there': 'info', 'withdrawn': 'warning', 'refused': 'bad'}


@click.group('regions')
def command() -> None:
    """Set up and watch regions, and list, cancel, replay or drop tasks that this region gave to others."""


def regions_of(app: Any, admin: Admin = None) -> Client:
    """Return a client for the app's database of regions; *raises* `click.ClickException` if it has no regions."""
    options = options_of(app)
    if not options.region or not options.regions:
        raise click.ClickException(
            'this app has no regions: set the transport options region and regions (broker_transport_options)'
        )
    return broker_of(app, admin, database=database(options.regions, options.region))


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
        client, options = regions_of(app, admin), options_of(app)
        assert options.region, 'regions_of checks that'
        assert options.regions, 'regions_of checks that'
        found = addresses(options.regions, options.credentials, app.conf.broker_use_ssl)
        return cls(options.region, client, broker_of(app, admin), found)

    @property
    def others(self) -> list[str]:
        return sorted(self.addresses.keys() - {self.name})

    def client_of(self, name: str) -> Client:
        """Return a client for the database of another region, which waits for 3 seconds at most."""
        return Client(self.addresses[name], _REQUEST_SECONDS, _REQUEST_SECONDS)

    def look(self) -> list[RegionStatus]:
        """Return the other regions as the own databases show them; *raises* `DatabaseMissing`."""
        return region_status.look(self.client, self.broker, self.name, self.others)


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
    _check_database(app, own)
    app_user, (peer, _) = broker_of(app).user, user_and_password(own.addresses[own.name]) or (None, None)
    peers = (*members, *([peer] if peer and peer not in (app_user, admin and admin[0]) else []))
    steps = plan(Wanted(own.client, [], members_of(app_user, peers, admin), not app_user))
    calls = [start(partial(region_status.unready, own.client_of(name), name)) for name in own.others]
    notes = [Step(text, notice=True) for call in calls if (text := result_of(call, _REMOTE_SECONDS))]
    print_plan([(own.client.address.url, [*steps, *notes])], dry_run)


def _check_database(app: Any, own: OwnRegion) -> None:
    """*Raise* `click.ClickException` if the database of regions is another database of the app, or of other use."""
    url = own.client.address.url

    def refuse(reason: str) -> NoReturn:
        raise click.ClickException(
            f'{url} {reason}: name a database of its own for region {own.name!r} in the transport option regions'
        )

    taken = {
        'the broker': own.broker,
        'broadcasts': broadcasts_of(own.broker),
        'results': results_of(app),
        'parcels': parcels_of(app),
    }
    for use, client in taken.items():
        if client and client.address.url == url:
            refuse(f'is the database of {use}')
    for name in own.others:
        if own.addresses[name].url in (url, own.addresses[own.name].url):
            refuse(f'is the database of region {name!r}')
    with suppress(DatabaseMissing, AccessDenied):  # the plan says so
        for row in own.client.id_range('_design/'):
            if row['id'].startswith(('_design/celery-', '_design/parcels-')) and row['id'] != MARKS:
                refuse(f'has the design document {row["id"]}, so it is used for something else')


# -- status


@command.command('status')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one line for each region. Durations are seconds.')
@click.option('--check', is_flag=True, help='End with exit status 1 if something is wrong, see below.')
@admin_option
@click.pass_context
def status(ctx: click.Context, as_json: bool, check: bool, admin: Admin) -> None:
    """Show the tasks and results between this region and each other one, and what is wrong.

    SENT is the number of tasks that this region gave to the other one and that have not ended there yet; OLDEST is the
    age of the oldest. After five seconds, a task that was taken and has not ended is counted in THERE. BACK is the
    number of results that wait there for this region, FROM that of tasks, each with the age of the oldest. REFUSED
    tasks stay, with the reason, see "regions tasks". RESPONDS is how long a request to the other region takes. At most
    10,000 tasks are counted for each region.

    The command waits at most 7 seconds for a region that does not respond.

    With --check it ends with exit status 1 if a region does not respond or refuses the user, no worker leads in this
    region, something waits for more than 30 seconds, a task is delayed or was refused, or one of the regions cannot
    read the other one.
    """
    app = app_of(ctx)
    own = OwnRegion.of(app, admin)
    found = _look(own)
    print_list(Resource(list, _COLUMNS), found, as_json, empty=NO_REGIONS)
    wrong = problems(own.name, found)
    if not as_json:
        for line in [*([f'leader: {found[0]["leader"]}'] if found and found[0]['leader'] else []), *wrong]:
            echo(line)
    if check and wrong:
        raise click.ClickException(f'{counted(len(wrong), "problem")} found' if not as_json else '; '.join(wrong))


def _look(own: OwnRegion) -> list[RegionStatus]:
    """Return the other regions, which are all asked at the same time."""
    with needs_setup():
        found = own.look()
    until = time.monotonic() + _REMOTE_SECONDS
    calls = {name: start(partial(region_status.remote, own.client_of(name), own.name, name)) for name in own.others}
    for region in (region for region in found if region['name'] in calls):
        try:
            region['remote'] = result_of(calls[region['name']], round(max(0.0, until - time.monotonic()), 1))
        except CouchDBError as exc:
            region['unreadable'] = str(exc)
    return found


def problems(own: str, found: Sequence[RegionStatus]) -> list[str]:
    """Return sentences about what is wrong between the region `own` and the other ones."""
    lines = [text for region in found for text in _problems(own, region)]
    if found and not found[0]['leader']:
        lines.insert(0, f'no worker leads in region {own}: start a worker whose app has the option region = {own!r}')
    return lines


def _problems(own: str, region: RegionStatus) -> Iterator[str]:
    name, given, remote = region['name'], region['given'], region['remote']
    if region['unreadable']:
        yield f'{name} cannot be read from this machine: {region["unreadable"]}'
    if region['error'] not in (None, region['unreadable']):
        yield f'{name} cannot be read by the leader of this region: {region["error"]}'
    if remote and (age := _late(given['untaken'])):
        yield (
            f'{name} has taken nothing for {age}: no worker runs there, or its workers have not been restarted since '
            f'region {own} was added'
        )
    if given['delayed']:
        yield f'{counted(given["delayed"], "task")} for {name} cannot be moved now: {given["reason"]}'
    if count := given['refused']['count']:
        yield f'{name} has refused {counted(count, "task")}: see "couchdb regions tasks --state refused"'
    if remote:
        yield from _remote_problems(own, name, remote['given'], remote['back'], remote['error'])


def _remote_problems(own: str, name: str, given: GivenAway, back: Tally, error: str | None) -> Iterator[str]:
    if error:
        yield f'{name} cannot read region {own}: {error}'
    if age := _late(back['oldest']):
        yield f'results wait in {name} for {age}: the leader of region {own} has not fetched them'
    if age := _late(given['untaken']):
        yield f'tasks from {name} wait for {age}: the leader of region {own} has not taken them'
    if given['delayed']:
        yield f'{counted(given["delayed"], "task")} from {name} cannot be moved now: {given["reason"]}'


def _late(seconds: float | None) -> str:
    """Return a duration in words if it is too long, or else ''."""
    return format_duration(seconds) if seconds is not None and seconds > _WAIT_SECONDS else ''


def _tally(tally: Tally, tone: Tone = '') -> Cell:
    cell = count_cell(tally['count'], tone)
    return Cell(f'{cell.text}+', cell.tone) if tally['more'] and tally['count'] else cell


def _with_age(tally: Tally | None) -> Cell:
    if tally is None:
        return Cell(NO_VALUE, 'dim')
    cell = _tally(tally)
    return cell if tally['oldest'] is None else Cell(f'{cell.text} ({format_duration(tally["oldest"])})', cell.tone)


#: The columns that the own database fills.
LOCAL_COLUMNS = [
    Column('REGION', 'name', min_width=6),
    Column('SENT', 'given', lambda given: _tally(given['sent']), right=True),
    Column('OLDEST', 'given', lambda given: format_duration(given['sent']['oldest']), right=True),
    Column('THERE', 'given', lambda given: _tally(given['there']), right=True),
    Column('REFUSED', 'given', lambda given: _tally(given['refused'], 'bad'), right=True),
]

_COLUMNS = [
    *LOCAL_COLUMNS[:-1],
    Column('BACK', 'remote', lambda remote: _with_age(remote and remote['back']), right=True),
    Column('FROM', 'remote', lambda remote: _with_age(remote and remote['given']['sent']), right=True),
    LOCAL_COLUMNS[-1],
    Column(
        'RESPONDS',
        'remote',
        lambda remote: f'{remote["response"] * 1000:.0f} ms' if remote else Cell('no', 'bad'),
        right=True,
    ),
]


# -- tasks


@command.command('tasks')
@click.argument('name', metavar='[REGION]', default='')
@click.option('--state', '-s', 'states', multiple=True, type=click.Choice(STATES), help='List only these.')
@limit_option
@json_option
@click.pass_context
def tasks(ctx: click.Context, name: str, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List the tasks that this region gave to others, or to REGION, and that have not ended.

    A task is sent until the other region has said that it has taken it, then there. A refused one stays, with the
    reason. A withdrawn one runs in another region. The last column has the reason, or says what will happen.
    """
    client = regions_of(app_of(ctx))
    with needs_setup():
        found = records.listing(client, name, states or STATES)
        print_list(record_resource(client.clock.now()), found, as_json, limit=limit, empty=NO_TASKS)


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show the records of a task that this region gave to others. ID is the id of the task, or its first characters."""
    client = regions_of(app_of(ctx))
    with needs_setup():
        docs = _find(client, name)
    print_details(record_resource(client.clock.now(), whole=True), docs, as_json)


@command.command('cancel')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--terminate', is_flag=True, help='End the task even if it is running.')
@yes_option
@click.pass_context
def cancel(ctx: click.Context, names: tuple[str, ...], terminate: bool, yes: bool) -> None:
    """Cancel tasks in other regions: the workers there remove or revoke them, and their results become REVOKED.

    ID is the id of a task, or its first characters.
    """
    client = regions_of(app_of(ctx))
    act = partial(records.cancel_all, client, terminate=terminate)
    change(ctx, 'Cancel', _selected(client, names), act, 'to be cancelled', yes=yes)


@command.command('replay')
@selection_options('Select all refused tasks.')
@click.pass_context
def replay(ctx: click.Context, names: tuple[str, ...], every: bool, yes: bool) -> None:
    """Send tasks again that another region has refused. ID is the id of a task, or its first characters."""
    if bool(names) == every:
        raise click.UsageError('Name tasks by id, or give --all for all refused ones.')
    client = regions_of(app_of(ctx))
    change(ctx, 'Replay', _selected(client, names), partial(records.replay, client), 'replayed', yes=yes)


@command.command('drop')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@yes_option
@click.pass_context
def drop(ctx: click.Context, names: tuple[str, ...], yes: bool) -> None:
    """Forget tasks that were given to other regions, for example to one that never returns.

    A task that the other region has not taken does not run. One that it has taken runs all the same, and its result is
    stored. ID is the id of a task, or its first characters.
    """
    client = regions_of(app_of(ctx))
    change(ctx, 'Drop', _selected(client, names), lambda docs: (records.drop(client, docs), {}), 'dropped', yes=yes)


@contextmanager
def needs_setup() -> Iterator[None]:
    """Raise `click.ClickException` if the database of regions does not exist."""
    try:
        yield
    except DatabaseMissing as exc:
        raise click.ClickException(f'{exc}; run "celery -A your_app couchdb regions setup"') from exc


def _selected(client: Client, names: Sequence[str]) -> Selection[Document]:
    """Return the records of the tasks with these names; all refused ones without names."""
    with needs_setup():
        found = [doc for name in names for doc in _find(client, name)] or records.listing(client, states=('refused',))
        docs = list({doc['_id']: doc for doc in found}.values())
    ids = {records.task_id_of(doc) for doc in docs}
    return Selection(f'task {ids.pop()}' if len(ids) == 1 else counted(len(docs), 'task'), docs, len(docs))


def _find(client: Client, name: str) -> list[Document]:
    """Return the records of a task; *raises* `click.ClickException` if there are none, or those of several tasks."""
    by_task: dict[str, list[Document]] = {}
    for doc in records.find(client, name):
        by_task.setdefault(records.task_id_of(doc), []).append(doc)
    chosen = name if name in by_task else choose(name, lambda: by_task)
    if chosen is None:
        raise click.ClickException(f'no task {name!r} was given to another region, or it has ended')
    return by_task[chosen]


def record_resource(now: float, *, whole: bool = False) -> Resource[Document]:
    """Return the resource of records; `now` is in seconds since the epoch. With `whole`, the documents are shown."""
    columns = [
        Column('ID', 'id', min_width=12),
        Column('TASK', 'task', min_width=10),
        Column('REGION', 'region', min_width=6),
        Column('STATE', 'state', lambda state: Cell(state, _TONES[state])),
        Column('SINCE', 'since', lambda date: format_ago(date, now), right=True),
        Column('', 'note', min_width=20),
    ]

    def described(doc: Document) -> Row:
        return {
            'id': records.task_id_of(doc),
            'task': task if isinstance(task := doc.get('task'), str) else None,
            **records.whereabouts(doc),
            'note': _note(doc, now),
            'record': doc['_id'],
            **({'document': doc} if whole else {}),
        }

    return Resource(lambda docs: [described(doc) for doc in docs], columns, details=_details)


def _details(row: Row) -> Row:
    return {**{name: value for name, value in row.items() if name != 'document'}, **row['document']}


def _note(doc: Document, now: float) -> str:
    """Return why a task was refused or is delayed, and what will happen to it."""
    state, parts = records.whereabouts(doc)['state'], list[str]()
    if state == 'refused':
        parts.append(str(doc.get('reason')))
    if state == 'withdrawn':
        parts.append(f'runs in {doc.get("run_in")}')
    if state in ('sent', 'withdrawn') and 'delayed' in doc:
        parts.append(f'delayed: {doc["delayed"]}')
    if 'cancelled' in doc:
        parts.append(f'cancelled {format_ago(doc["cancelled"], now)} ago')
    if state == 'sent' and isinstance(at := doc.get('fallback_at'), (int, float)):
        parts.append(f'runs in {doc.get("fallback")} if it is not taken within {format_duration(at - now)}')
    return '; '.join(parts)


# -- other commands


def whereabouts(app: Any, broker: Client, start: str) -> list[Row]:
    """Return the tasks that were given to other regions and whose ids begin with `start`: where they are, in `text`.

    `broker` is a client for the broker's database, whose user reads the database of regions, too.
    """
    options = app.conf.broker_transport_options or {}
    if not options.get('region') or not options.get('regions'):
        return []
    client = broker.beside(database(options['regions'], options['region']))
    try:
        docs, now = records.find(client, start), client.clock.now()
    except (DatabaseMissing, AccessDenied):
        return []
    finally:
        client.close()
    resource = record_resource(now)
    return [{**row, 'text': _place(row, now)} for row in resource.describe(docs)]


def _place(row: Row, now: float) -> str:
    """Return where a task is, in words."""
    region, ago = row['region'], f'{format_ago(row["since"], now)} ago'
    place = {
        'sent': f'sent to region {region} {ago}',
        'there': f'in region {region} since {format_date(row["since"])} UTC ({ago})',
        'refused': f'refused by region {region} {ago}',
        'withdrawn': f'withdrawn from region {region}',
    }[row['state']]
    return f'{place}: {row["note"]}' if row['note'] else place


def vacuum_part(app: Any, admin: Admin) -> VacuumPart | None:
    """Return what the command `vacuum` does for regions; None if the app has none."""
    options = options_of(app)
    if not options.region or not options.regions:
        return None
    own = OwnRegion.of(app, admin)

    def moving() -> set[str]:
        found = region_status.moving(own.client, own.name, RECORD)  # those that are taken back
        for name in own.others:
            found |= region_status.moving(own.client_of(name), name, records_to(own.name))
        return found

    return VacuumPart(moving, lambda: iter(()), own.client)
