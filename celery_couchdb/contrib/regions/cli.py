"""The commands `celery couchdb regions`: set up and watch regions, and the tasks that this region gave to others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from celery import states

import kombu_couchdb.contrib.regions.region as regions
from kombu_couchdb.admin.setup import Step, plan
from kombu_couchdb.admin.status import leaders
from kombu_couchdb.contrib.parcels.device_setup import used_otherwise
from kombu_couchdb.contrib.parcels.stored_parcels import moving
from kombu_couchdb.contrib.regions.records import Direction, Records, Tally, direction, outgoing, unreadable
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.server import Server
from kombu_couchdb.errors import AccessDenied, Conflict, CouchDBError, DatabaseMissing
from kombu_couchdb.queues.databases import broadcasts_of

from ...backend import CouchDBBackend
from ...cli.clients import admin_option, app_of, broker_of, options_of, result_of, results_of, start
from ...cli.resource_commands import change, print_list, yes_option
from ...cli.setup import Admin, print_plan, wanted_beside
from ...cli.tables import echo
from ...cli.vacuum import VacuumPart
from ...resources.columns import NO_VALUE, Cell, Column, Row, Tone, count_cell, format_ago, format_duration
from ...resources.resource import Resource, Selection, counted
from ..parcels.cli import add_commands, databases_of, selected
from . import database_of

#: Shown in place of a table of regions.
NO_REGIONS = 'There are no other regions.'

#: The longest wait for another region, in seconds: for one request, and for all together.
_HTTP, _REMOTE_SECONDS = HTTPOptions(3.0, 3.0), 7.0

#: What waits longer for the workers of a region is a problem. Without an outage it takes less than a second.
_WAIT_SECONDS = 30.0


@click.group('regions')
def command() -> None:
    """Set up and watch regions, and tasks given to others."""


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
        addresses = regions.addresses(options, app.conf.broker_use_ssl)
        broker = broker_of(app, admin)
        return cls(options.region, broker.beside(name), broker, addresses)

    @property
    def others(self) -> list[str]:
        return sorted(self.addresses.keys() - {self.name})

    def incoming(self) -> Iterator[Direction]:
        """Yield what the databases of the other regions have for this one. All are read at the same time."""
        clients = {name: Client(self.addresses[name], _HTTP) for name in self.others}
        calls = {name: start(partial(direction, client, name, self.name)) for name, client in clients.items()}
        until = time.monotonic() + _REMOTE_SECONDS
        for name, client in clients.items():
            try:
                yield result_of(calls[name], round(max(0.0, until - time.monotonic()), 1))
            except CouchDBError as exc:
                yield {'source': name, 'target': self.name, 'unreadable': unreadable(name, client, exc)}


def _set_up(app: Any) -> OwnRegion:
    """Return the region of an app; *raises* `click.ClickException` if its database of regions does not exist."""
    own = OwnRegion.of(app)
    try:
        own.client.info()
    except DatabaseMissing as exc:
        raise click.ClickException(f'{exc}; run "celery -A your_app couchdb regions setup"') from exc
    return own


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
    broker, peer = broker_of(app), Server.of(own.addresses[own.name]).node.auth.user
    peers = (*members, *([peer] if peer and peer not in (broker.user, admin and admin.user) else []))
    steps = plan(wanted_beside(own.client, broker, peers, admin, [], None))
    notes = [Step(way['unreadable'], notice=True) for way in own.incoming() if 'unreadable' in way]
    print_plan([(own.client.address.url, [*steps, *notes])], dry_run)


def _other_use(app: Any, own: OwnRegion) -> str | None:
    """Return in words what else the database of regions is used for; None if it is used for nothing else."""
    uses = {own.addresses[name].url: f'region {name!r}' for name in own.others}
    parcels = databases_of(app, own.broker)
    uses |= {
        own.broker.beside(parcels[name]).address.url: f'device {name!r}' if name else 'parcels' for name in parcels
    }
    uses |= {broadcasts_of(own.broker).address.url: 'broadcasts', own.broker.address.url: 'the broker'}
    if results := results_of(app):
        uses[results.address.url] = 'results'
    for url in (own.client.address.url, own.addresses[own.name].url):
        if url in uses:
            return f'is the database of {uses[url]}'
    with suppress(DatabaseMissing, AccessDenied):  # the plan says so
        if design := used_otherwise(own.client):
            return f'has the design document {design}, so it is used for something else'
    return None


# -- status


@command.command('status')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, a line for each direction. Durations are seconds.')
@click.option('--check', is_flag=True, help='End with exit status 1 if something is wrong, see below.')
@click.pass_context
def status(ctx: click.Context, as_json: bool, check: bool) -> None:
    """Show the tasks and results between regions.

    Each line is about one direction, and says what is wrong with it. SENT is the number of tasks that were given away
    and have not ended yet. After 15 seconds, a task that was taken and has not ended is counted in THERE. DELAYED tasks
    cannot be moved now, and REFUSED ones stay, see "regions tasks". RESULTS is the number of results that return. Each
    number has the age of the oldest. RESPONDS is how long a request takes to the region in the column FROM. At most
    10,000 documents are counted for each number.

    The command waits at most 7 seconds for a region that does not respond.

    With --check it ends with exit status 1 if a region does not respond or refuses the user, no worker leads in this
    region, something waits for more than 30 seconds, a task is delayed or was refused, or one of the regions cannot
    read the other one.
    """
    own = _set_up(app_of(ctx))
    found = [*outgoing(own.client, own.name, own.others), *own.incoming()]
    print_list(Resource(list, COLUMNS), found, as_json, empty=NO_REGIONS)
    leader = leader_of(own.broker, own.name)
    wrong = list(problems(own.name, leader, found))
    for line in [] if as_json else [*([f'leader: {leader}'] if leader else []), *wrong]:
        echo(line)
    if check and wrong:
        raise click.ClickException(f'{counted(len(wrong), "problem")} found' if not as_json else '; '.join(wrong))


def leader_of(broker: Client, name: str) -> str | None:
    """Return the worker that leads in a region; `broker` is for the database of its broker."""
    return next((lead['name'] for lead in leaders(broker) if lead['alive'] and lead['duty'] == f'region:{name}'), None)


def problems(own: str, leader: str | None, found: Sequence[Direction]) -> Iterator[str]:
    """Yield sentences about what is wrong between the region `own`, with its leader, and the other ones."""
    if found and not leader:
        yield f'no worker leads in region {own}: start a worker whose app has the option region = {own!r}'
    unread = {(way['target'], way['source']) for way in found if way.get('error') or 'unreadable' in way}
    for way in found:
        is_read = (way['source'], way['target']) not in unread
        yield from [way['unreadable']] if 'unreadable' in way else _problems(way, is_read=is_read)


def _problems(way: Direction, *, is_read: bool) -> Iterator[str]:
    """Yield what is wrong in one direction. With `is_read` false another sentence says why the target takes nothing."""
    source, target = way['source'], way['target']
    sent, delayed, refused, results = (way['numbers'][name] for name in ('sent', 'delayed', 'refused', 'results'))
    if way['error']:
        yield f'the leader of region {source} cannot read region {target}: {way["error"]}'
    if is_read and (age := _late(sent)):
        yield (
            f'{target} has taken nothing for {age} from {source}: no worker leads there, or its workers have not been '
            f'restarted since region {source} was added'
        )
    if count := delayed['count']:
        yield f'{counted(count, "task")} from {source} for {target} cannot be moved now: {delayed["reason"]}'
    if count := refused['count']:
        yield f'{target} has refused {counted(count, "task")}: see "couchdb regions tasks --state refused" in {source}'
    if is_read and (age := _late(results)):
        yield f'results wait in {source} for {age}: the leader of region {target} has not fetched them'


def _late(tally: Tally) -> str:
    """Return the age of the oldest in words if it is too high, or else ''."""
    oldest = tally['oldest']
    return format_duration(oldest) if oldest is not None and oldest > _WAIT_SECONDS else ''


def _number(state: str, numbers: Mapping[str, Tally] | None) -> Cell:
    if not numbers:
        return Cell(NO_VALUE, 'dim')
    cell, oldest = count_cell(numbers[state]['count'], _TONES.get(state, '')), numbers[state]['oldest']
    return cell if oldest is None else Cell(f'{cell.text} ({format_duration(oldest)})', cell.tone)


_TONES: dict[str, Tone] = {'delayed': 'warning', 'refused': 'bad'}

#: The columns of what a region has for another one.
COLUMNS = [
    Column('FROM', 'source', min_width=6),
    Column('TO', 'target', min_width=6),
    *(
        Column(state.upper(), 'numbers', partial(_number, state), right=True)
        for state in ('sent', 'delayed', 'there', 'refused', 'results')
    ),
    Column('RESPONDS', 'response', lambda found: f'{found * 1000:.0f} ms' if found else Cell('no', 'bad'), right=True),
]


# -- tasks


def _opened(ctx: click.Context, region: str | None) -> Records:
    return Records(_set_up(app_of(ctx)).client, region or '')


add_commands(command, Records, _opened, 'region', listing='tasks')


@command.command('cancel')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--region', metavar='NAME', help='Cancel later steps of chains in this region; give their whole ids.')
@click.option('--terminate', is_flag=True, help='End the task even if it is running.')
@yes_option
@click.pass_context
def cancel(ctx: click.Context, names: tuple[str, ...], region: str | None, terminate: bool, yes: bool) -> None:
    """Cancel tasks in other regions.

    The workers there remove or revoke them, and their results become REVOKED. ID is the id of a task, or its first
    characters.
    """
    own = _set_up(app_of(ctx))
    records = Records(own.client)
    if region and region not in own.others:
        raise click.ClickException(f'region {region!r} is not another one in the transport option regions')
    now, steps = own.client.clock.now(), counted(len(names), 'step')
    docs = [regions.order(region, name, 'cancel', now) for name in names] if region else []
    selection = Selection(steps, docs, len(docs)) if region else selected(records, names)
    change(ctx, 'Cancel', selection, partial(records.cancel, terminate=terminate), 'to be cancelled', yes=yes)


# -- other commands


def whereabouts(jobs: Any, start: str) -> list[Row]:
    """Return the tasks that were given to other regions and whose ids begin with `start`: where they are, in `text`.

    If there is none, return the task `start` if its result says that it has ended in another region. The user of
    `jobs` reads the database of regions, too.
    """
    if not (name := database_of(jobs.app)):
        return []
    with suppress(DatabaseMissing, AccessDenied), closing(Records(jobs.client.beside(name))) as records:
        rows, now = map(records.describe, records.find(start)), records.client.clock.now()
        return [{**row, 'text': _place(row, now)} for row in rows] or _ended(jobs, start)
    return []


def _ended(jobs: Any, task_id: str) -> list[Row]:
    result = _result_from_elsewhere(jobs, task_id)
    if not result:
        return []
    region, has_failed = result['region'], result.get('status') == states.FAILURE
    text = f'it {"failed" if has_failed else "ended"} in region {region}'
    if region not in jobs.app.conf.broker_transport_options['regions']:
        text, has_failed = f'{text}, which is not in the transport option regions', False
    elif has_failed:
        text += ', which keeps it: see "couchdb failures" there'
    return [{'id': task_id, 'task': result.get('task'), 'text': text, 'has_failed': has_failed}]


def _result_from_elsewhere(jobs: Any, task_id: str) -> Mapping[str, Any] | None:
    if not isinstance(jobs.backend, CouchDBBackend):
        return None
    [result] = jobs.backend.store.read_many([jobs.backend.get_key_for_task(task_id)])
    return result if result and result.get('region') else None


def retry(jobs: Any, task_id: str) -> None:
    """Ask the region in which a task has failed to retry it."""
    if result := _result_from_elsewhere(jobs, task_id):
        with closing(jobs.client.beside(database_of(jobs.app))) as client, suppress(Conflict):  # it is asked already
            client.put(regions.order(result['region'], task_id, 'retry', client.clock.now()))


def _place(row: Row, now: float) -> str:
    """Return where a task is, in words."""
    words = {'there': 'taken by', 'refused': 'refused by', 'withdrawn': 'withdrawn from'}.get(row['state'], 'sent to')
    ago = f' {format_ago(row["since"], now)} ago' if row['since'] else ''
    return ': '.join(filter(None, (f'{words} region {row["region"]}{ago}', row['note'])))


def vacuum_part(app: Any, admin: Admin) -> VacuumPart | None:
    """Return what the command `vacuum` does for regions; None if the app has none."""
    if not database_of(app):
        return None
    own = OwnRegion.of(app, admin)

    def ids() -> set[str]:
        found = moving(own.client, regions.SOURCE, regions.RECORD)  # those that are taken back
        for name in own.others:
            found |= moving(Client(own.addresses[name]), regions.SOURCE, regions.records_to(own.name))
        return found

    return VacuumPart(ids, lambda: iter(()), own.client)
