"""The command `celery -A app couchdb setup`: create and update the app's databases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import click

import kombu_couchdb.design
from kombu_couchdb.admin.setup import Step, Wanted, plan
from kombu_couchdb.couchdb.address import TOKENS
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import NotOffered
from kombu_couchdb.log import printable
from kombu_couchdb.queues.databases import REVS_LIMIT, broadcasts_of
from kombu_couchdb.transport import Transport

from .. import design
from ..connections import transport_of
from ..rooms import rooms
from .clients import Login, admin_option, app_of, broker_of, results_of
from .tables import echo, echo_styled

#: The administrator that --admin names.
Admin = Login | None


@click.command('setup')
@click.option(
    '--member',
    'members',
    multiple=True,
    metavar='NAME',
    help='Also make this user a member of the databases. Can be given several times.',
)
@click.option(
    '--publisher',
    'publishers',
    multiple=True,
    metavar='NAME',
    help='Make this user a member of the database of parcels only. Can be given several times.',
)
@click.option(
    '--device',
    'devices',
    multiple=True,
    metavar='NAME',
    help='Give this user a database of its own for its parcels: for programs that are offline at times. '
    'Can be given several times.',
)
@click.option('--dry-run', is_flag=True, help='Print what would be done, and change nothing.')
@admin_option
@click.pass_context
def command(
    ctx: click.Context,
    members: tuple[str, ...],
    publishers: tuple[str, ...],
    devices: tuple[str, ...],
    dry_run: bool,
    admin: Admin,
) -> None:
    """Create or update the databases.

    They are those of the broker, of broadcasts, of results and of parcels. The database of parcels is set up if the
    transport option "parcels" names one. The command creates missing databases, updates design documents and sets the
    rights. With --admin, the app's user, from the URL or from the option "credentials", becomes a member of the
    databases. A member needs no other right. If the app has a user, databases that were open to everybody are closed.
    You can run the command again, and while workers run.
    """
    app = app_of(ctx)
    results = wanted_results(app, members, admin)
    broker = _broker(app, members, admin, needed=results is None)
    # Those who may use the broker may also broadcast.
    broadcasts = broker and replace(broker, client=broadcasts_of(broker.client), documents=[], users_of=broker.client)
    # Make all plans before the first change, so that an error leaves everything as it was.
    databases = [*_merged(broker, results), *([broadcasts] if broadcasts else [])]
    plans: list[tuple[str, Sequence[Step]]] = [(wanted.client.address.url, plan(wanted)) for wanted in databases]
    of_rooms = [
        found for room in rooms() if broker for found in room.setup_plans(app, members, publishers, devices, admin)
    ]
    if (publishers or devices) and not of_rooms:
        option = '--publisher' if publishers else '--device'
        raise click.UsageError(
            f'{option} needs the transport option parcels, with the name of the database of parcels.'
        )
    plans += of_rooms
    print_plan(plans, dry_run)


def print_plan(plans: Iterable[tuple[str, Sequence[Step]]], dry_run: bool) -> None:
    """Run the steps of each place, unless `dry_run` is true, and print what was done; a place is a URL.

    At the end, print once why steps were skipped.
    """
    not_offered = dict[str, None]()
    for url, steps in plans:
        echo_styled(click.style(printable(url), bold=True))
        for step in steps:
            tried = _tried(step, dry_run)
            echo_styled(_line(tried, dry_run))
            if tried.not_offered:
                not_offered[tried.not_offered] = None
    for reason in not_offered:
        echo(reason)
    if dry_run:
        echo('Nothing was changed: this was a dry run.')


def _tried(step: Step, dry_run: bool) -> Step:
    """Run a step, if there is something to do and `dry_run` is false, and return it, perhaps with what is missing."""
    try:
        if step.do and not dry_run:
            step.do()
    except NotOffered as exc:
        return replace(step, not_offered=str(exc))
    return step


def _line(step: Step, dry_run: bool) -> str:
    """Return the line to print about a step."""
    if step.notice:
        word, colour = 'note', 'yellow'
    elif step.not_offered:
        word, colour = 'skipped', 'yellow'
    elif step.do is None:
        word, colour = 'ok', 'bright_black'
    elif dry_run:
        word, colour = 'not yet', 'yellow'
    else:
        word, colour = 'done', 'green'
    return f'  {click.style(f"{word:7}", fg=colour)}  {printable(step.goal)}'


# -- the wanted databases


def _broker(app: Any, members: tuple[str, ...], admin: Admin, *, needed: bool) -> Wanted | None:
    if not needed and not issubclass(transport_of(app), Transport):
        return None  # the app uses CouchDB for results only
    return wanted_beside(broker_of(app, admin), broker_of(app), members, admin, kombu_couchdb.design.documents())


def wanted_results(app: Any, members: tuple[str, ...], admin: Admin) -> Wanted | None:
    """Return the wanted state of the database of results; None if it is not in CouchDB."""
    client, own = results_of(app, admin), results_of(app)
    documents = [kombu_couchdb.design.conflicted(), design.document()]
    return wanted_beside(client, own, members, admin, documents, None) if client and own else None


def wanted_beside(
    client: Client,
    own: Client,
    members: tuple[str, ...],
    admin: Admin,
    documents: Sequence[Document],
    revisions: int | None = REVS_LIMIT,
) -> Wanted:
    """Return the wanted state of a database; `own` is a client with the user of the app."""
    by_token = own.address.auth in TOKENS
    return Wanted(client, documents, members_of(own.user, members, admin), not own.user, revisions, by_token=by_token)


def members_of(user: str | None, members: tuple[str, ...], admin: Admin) -> list[str]:
    """Return the users to make members: `members`, and `user`, that of the app, unless that is the administrator."""
    return list(dict.fromkeys([*([user] if user and admin and user != admin.user else []), *members]))


def _merged(broker: Wanted | None, results: Wanted | None) -> list[Wanted]:
    """Return the wanted databases; if broker and results share one database, only one that combines both."""
    if not broker or not results or broker.client.address.url != results.client.address.url:
        return [wanted for wanted in (broker, results) if wanted]
    return [
        replace(
            broker,
            documents=[*broker.documents, *(doc for doc in results.documents if doc not in broker.documents)],
            members=list(dict.fromkeys([*broker.members, *results.members])),
            anonymous=broker.anonymous or results.anonymous,
        )
    ]
