"""The commands `celery couchdb regions`: set up, watch and restart the replications between regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import click

from kombu_couchdb.admin.setup import Step, Wanted, plan
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.auth import user_and_password
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import CouchDBError, DatabaseMissing
from kombu_couchdb.parcels import replications
from kombu_couchdb.parcels.replications import Replicator, endpoint
from kombu_couchdb.parcels.stored_parcels import Parcels, moving
from kombu_couchdb.regions import region_status
from kombu_couchdb.regions.region import REGIONS, database, design_document
from kombu_couchdb.regions.region_status import RegionStatus, Remote

from ..cli.clients import admin_option, app_of, broker_of, options_of, result_of, results_of, start
from ..cli.resource_commands import print_list
from ..cli.setup import Admin, members_of, print_plan, wanted_results
from ..cli.tables import echo
from ..cli.vacuum import VacuumPart
from ..resources.columns import Cell, Column, Row, count_cell, format_duration
from ..resources.resource import Resource

#: Shown in place of a table of regions.
NO_REGIONS = 'There are no other regions.'

#: The longest wait for another region, in seconds: for one request, and for all together and its parcels.
_REQUEST_SECONDS, _REMOTE_SECONDS = 3.0, 7.0


@click.group('regions')
def command() -> None:
    """Set up, watch and restart the replications between regions."""


def regions_of(app: Any, admin: tuple[str, str] | None = None) -> Client:
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
    #: A client for its database of regions.
    client: Client
    #: The databases of regions of all regions, as other regions reach them.
    addresses: Mapping[str, Address]

    @classmethod
    def of(cls, app: Any, admin: Admin = None) -> OwnRegion:
        client, options = regions_of(app, admin), options_of(app)
        assert options.region, 'regions_of checks that'
        return cls(options.region, client, region_status.addresses(options, app.conf.broker_use_ssl))

    @property
    def others(self) -> list[str]:
        return sorted(self.addresses.keys() - {self.name})

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return the other regions with these names; all other ones without names."""
        for name in names:
            if name not in self.others:
                reason = 'is the region of this app' if name == self.name else 'is unknown'
                known = ', '.join(self.others) or 'none'
                raise click.UsageError(f'Region {name!r:.80} {reason}; other regions are: {known}.')
        return list(names) or self.others


@command.command('setup')
@click.option(
    '--member', 'members', multiple=True, metavar='NAME', help='Also make this user a member of the databases.'
)
@click.option(
    '--trusted-certificates',
    'trusted',
    metavar='PATH',
    help="A file with the certificates of CAs, on CouchDB's machines: with them CouchDB verifies other regions.",
)
@click.option('--dry-run', is_flag=True, help='Print what would be done, and change nothing.')
@admin_option
@click.pass_context
def setup(ctx: click.Context, members: tuple[str, ...], trusted: str | None, dry_run: bool, admin: Admin) -> None:
    """Create or update the database of regions, and the replications from all other regions.

    Run it in each region, as an administrator of its CouchDB, after "couchdb setup"; and again when the transport
    option "regions", a password or the user of another region has changed. Only what has changed is written. The
    replications of a region that is no longer in the option are removed.

    Passwords of other regions are stored in CouchDB's database _replicator, which only administrators can read.
    """
    app = app_of(ctx)
    own = OwnRegion.of(app, admin)
    app_user, (peer, _) = broker_of(app).user, user_and_password(own.addresses[own.name]) or (None, None)
    peers = (*members, *([peer] if peer and peer not in (app_user, admin and admin[0]) else []))
    results = wanted_results(app, peers, admin)
    server = Client(own.client.address.root)
    wanted = Wanted(own.client, [design_document()], members_of(app_user, peers, admin), not app_user)
    # Make all plans before the first change, so that an error leaves everything as it was.
    print_plan(
        [
            *((one.client.address.url, plan(one)) for one in (wanted, results) if one),
            (server.address.url, _server_plan(app, own, server, trusted)),
        ],
        dry_run,
    )


def _server_plan(app: Any, own: OwnRegion, server: Client, trusted: str | None) -> list[Step]:
    """Return the steps that change settings of the server and its replications."""
    replicator = Replicator(server)
    verify = any(own.addresses[name].tls and own.addresses[name].verify is not False for name in own.others)
    settings = list(replicator.plan(verify=verify, trusted=trusted))
    root, documents = replicator.own_url(), list[Document]()
    remarks: list[str | None] = []
    of_app = broker_of(app).beside(own.client.address.database).address
    stored_results, found = results_of(app), replications.stored(server, own.name) or {}
    for name in own.others:
        old = found.get(replications.id_of('regions', own.name, name), {})
        source = replications.chosen(own.addresses[name], replications.server_in(old.get('source')))
        documents.append(region_status.pulled_parcels(own.name, name, endpoint(source), endpoint(of_app, root)))
        remarks.append(region_status.unready(_remote_client(source), name))
        if stored_results:
            source = _remote_client(source).beside(stored_results.address.database).address
            # The backend may name the server differently, or be on another one.
            same = stored_results.address.server == of_app.server
            target = endpoint(stored_results.address, root if same else None)
            documents.append(region_status.pulled_results(own.name, name, endpoint(source), target))
    databases = {one.address.database for one in (own.client, stored_results) if one}
    steps = replications.plan(server, own.name, databases, documents, restart=any(step.do for step in settings))
    return [*settings, *steps, *(Step(text, notice=True) for text in remarks if text)]


@command.command('nudge')
@click.argument('names', metavar='[NAME…]', nargs=-1)
@admin_option
@click.pass_context
def nudge(ctx: click.Context, names: tuple[str, ...], admin: Admin) -> None:
    """Let CouchDB try the replications from these regions at once, by default from all.

    After a failure CouchDB waits before it tries a replication again. Use this command when a region that was cut off
    can be reached again, or when the node of a region from which CouchDB pulls is down: if its URL names several nodes,
    one is chosen that responds to this machine. It needs an administrator of CouchDB.
    """
    app = app_of(ctx)
    own = OwnRegion.of(app, admin)
    chosen = {name: own.addresses[name] for name in own.chosen(names)}
    found = replications.nudge(own.client, own.name, chosen)
    for doc_id, url in found.items():
        echo(f'{doc_id} starts again, and pulls from {url}')
    wanted = {replications.id_of(kind, own.name, name) for kind in _kinds(app) for name in chosen}
    if missing := ', '.join(sorted(wanted - found.keys())):
        raise click.ClickException(f'missing: {missing}; run "celery -A your_app couchdb regions setup"')


@command.command('status')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one line for each region. Durations are seconds.')
@click.option('--check', is_flag=True, help='End with exit status 1 if something is wrong, see below.')
@admin_option
@click.pass_context
def status(ctx: click.Context, as_json: bool, check: bool, admin: Admin) -> None:
    """Show the replications and the parcels between this region and each other one.

    PULLS is the state of the two replications from that region, of parcels and of results. LAG is the number of changes
    there that CouchDB has not looked at here. TO is the number of parcels that the region has not published yet, as far
    as is known here, FROM the same in the other direction; OLDEST is the age of the oldest. REFUSED parcels stay in the
    database of regions, with the reason. RESPONDS is how long a request to the other region takes.

    States of replications can only be read by an administrator of CouchDB. The command waits at most 7 seconds for a
    region that does not respond, and 2 seconds for parcels that are not here yet.

    With --check it ends with exit status 1 if a region does not respond, a replication is not running or has not
    reached that region since it was started, or a parcel is not here after 2 seconds. For others than administrators,
    --check does not include the replications.
    """
    app = app_of(ctx)
    own = OwnRegion.of(app, admin)
    found = _look(app, own)
    resource = Resource(described, _COLUMNS, summarize=list)
    print_list(resource, found, as_json, empty=NO_REGIONS)
    for line in () if as_json else remarks(found):
        echo(line)
    if not as_json and hides_states(found):
        echo('the states of replications can be read by administrators of CouchDB only: name one with --admin')
    bad = [one['name'] for one in found if _is_bad(one)]
    if check and bad:
        raise click.ClickException(f'not connected: {", ".join(bad)}')


class OtherRegion(TypedDict):
    """The state of another region."""

    name: str
    #: As the own server knows it.
    local: RegionStatus
    #: As the other region's server knows it; None if that does not respond, or was not asked.
    remote: Remote | None
    #: The reason for which it does not respond; None if it does, or was not asked.
    error: str | None
    #: True if the node from which CouchDB pulls responds; None if that is unknown, or the region has one URL.
    source_responds: bool | None


def look_here(app: Any, own: OwnRegion) -> list[OtherRegion]:
    """Return the other regions as the own server knows them; *raises* `DatabaseMissing` without the own database."""
    kinds, reached = _kinds(app), replications.reached(Client(own.client.address.root), own.name)
    return [
        {
            'name': name,
            'local': region_status.region(own.client, own.name, name, kinds, reached),
            'remote': None,
            'error': None,
            'source_responds': None,
        }
        for name in own.others
    ]


def _look(app: Any, own: OwnRegion) -> list[OtherRegion]:
    try:
        found = look_here(app, own)
    except DatabaseMissing as exc:
        raise click.ClickException(f'{exc}; run "celery -A your_app couchdb regions setup"') from exc
    calls, asked = {}, {}
    for one in found:
        name, region = one['name'], one['local']
        address = own.addresses[name]
        remote = partial(region_status.remote, _remote_client(address), own.client, own.name, name, region['through'])
        calls[name] = start(remote)
        if address.others and (node := replications.named(address, replications.server_in(_source_of(region)))):
            asked[name] = start(partial(replications.responds, node))
    for one in found:
        name = one['name']
        try:
            if name in asked:
                one['source_responds'] = result_of(asked[name], _REMOTE_SECONDS)
            one['remote'] = result_of(calls[name], _REMOTE_SECONDS)
        except CouchDBError as exc:
            one['error'] = str(exc)
    return found


def _kinds(app: Any) -> tuple[str, ...]:
    """Return the kinds of replications that an app needs."""
    return ('regions', 'results') if results_of(app) else ('regions',)


def _remote_client(address: Address) -> Client:
    return Client(address, _REQUEST_SECONDS, _REQUEST_SECONDS)


# -- the output of `status`


def _source_of(region: RegionStatus) -> str | None:
    """Return the URL of the database of regions from which CouchDB pulls, if it is known."""
    return region['replications']['regions']['source']


def _is_bad(one: OtherRegion) -> bool:
    """Tell whether a region or its node does not respond, a replication is not running, or a parcel is missing."""
    remote = one['remote']
    return remote is None or remote['missing'] > 0 or one['source_responds'] is False or _is_broken(one['local'])


def _is_broken(region: RegionStatus) -> bool:
    return any(one['state'] not in (None, 'running') for one in region['replications'].values())


def described(found: Sequence[OtherRegion]) -> list[Row]:
    """Return the states of regions without `through`, which is long and opaque."""
    return [{**one, 'local': {k: v for k, v in one['local'].items() if k != 'through'}} for one in found]


def _responds(remote: Remote | None) -> Cell:
    return Cell(f'{remote["response"] * 1000:.0f} ms') if remote else Cell('no', 'bad')


def _arriving(one: Row) -> Any:
    """Return the parcels from the region, as it knows them, or else as the own server does."""
    return one['remote']['leaving'] if one['remote'] else one['local']['arrived']


#: What the own server knows alone.
LOCAL_COLUMNS = [
    Column('REGION', 'name', min_width=6),
    Column('PULLS', 'local', lambda local: Cell(_pulls(local), 'bad' if _is_broken(local) else '')),
    Column('TO', 'local', lambda local: count_cell(local['leaving']['count']), right=True),
    Column('OLDEST', 'local', lambda local: format_duration(local['leaving']['oldest']), right=True),
    Column('FROM', None, lambda one: count_cell(_arriving(one)['count']), right=True),
    Column('OLDEST', None, lambda one: format_duration(_arriving(one)['oldest']), right=True),
    Column('REFUSED', 'local', lambda local: count_cell(local['refused']['count'], 'bad'), right=True),
]

_COLUMNS = [
    *LOCAL_COLUMNS[:2],
    Column('LAG', 'remote', lambda remote: count_cell(remote and remote['pending']), right=True),
    *LOCAL_COLUMNS[2:],
    Column('RESPONDS', 'remote', _responds, right=True),
]


def _pulls(region: RegionStatus) -> str:
    states = [one['state'] or 'unknown' for one in region['replications'].values()]
    return states[0] if len(set(states)) == 1 else ', '.join(states)


def remarks(found: Sequence[OtherRegion]) -> list[str]:
    """Return sentences about what is wrong."""
    lines = []
    for one in found:
        lines += [
            f'{one["name"]}: the replication of {"parcels" if kind == "regions" else kind} is {state["state"]} since '
            f'{state["since"]}: {state["error"]}'
            for kind, state in one['local']['replications'].items()
            if state['error']
        ]
        lines += [f'{one["name"]}: {one["error"]}'] if one['error'] else []
        if one['source_responds'] is not None:
            hint = ', which does not respond: "celery -A your_app couchdb regions nudge" chooses another node'
            used = f'{one["name"]}: CouchDB pulls from {_source_of(one["local"])}'
            lines.append(used if one['source_responds'] else used + hint)
        if one['remote'] and (missing := one['remote']['missing']):
            lines.append(f'{one["name"]}: {missing:,} parcels from there are not here')
    states = [state['state'] for one in found for state in one['local']['replications'].values()]
    if 'missing' in states:
        lines.append('a replication is missing: run "celery -A your_app couchdb regions setup"')
    return lines


def hides_states(found: Sequence[OtherRegion]) -> bool:
    """Tell whether CouchDB does not show the states of replications: only administrators see them."""
    return any(state['state'] is None for one in found for state in one['local']['replications'].values())


# -- other commands


def parcels_between_regions(app: Any) -> Parcels:
    """Return the parcels in the database of regions, for the command `parcels`."""
    return Parcels(regions_of(app), REGIONS, 'traffic')


def vacuum_part(app: Any, admin: Admin) -> VacuumPart | None:
    """Return what the command `vacuum` does for regions; None if the app has none. Their database is left out."""
    options = options_of(app)
    if not options.region or not options.regions:
        return None
    client = regions_of(app, admin)

    def finish() -> Iterator[str]:
        # Purges are not replicated. A region that has not received a deletion still has the parcel, and would send it
        # back to the one that has purged the tombstone.
        yield f'{client.address.database}: left out, because parcels could come back from other regions and run again'

    return VacuumPart(partial(moving, [Parcels(client, REGIONS, 'traffic')]), finish)
