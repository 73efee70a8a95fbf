"""`celery -A app couchdb setup`: makes the app's databases ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

import kombu_couchdb.design
from kombu_couchdb.admin.setup import Step, Wanted, layouts, plan
from kombu_couchdb.queues.database import REVS_LIMIT
from kombu_couchdb.transport import Transport

from .. import design
from .databases import administrator, app_of, broker_of, parcels_of, results_of
from .tables import printable, say, show

__all__ = ['command']

Auth = tuple[str, str] | None


@click.command('setup')
@click.option(
    '--member',
    'members',
    multiple=True,
    metavar='NAME',
    help='Another user who shall work with the databases; may be given several times.',
)
@click.option(
    '--publisher',
    'publishers',
    multiple=True,
    metavar='NAME',
    help='A user who shall send tasks through the database of parcels, and have no right on the others.',
)
@click.option('--dry-run', is_flag=True, help='Say what would be done, and change nothing.')
@administrator
@click.pass_context
def command(
    ctx: click.Context, members: tuple[str, ...], publishers: tuple[str, ...], dry_run: bool, admin: Auth
) -> None:
    """Create or update the databases of broker and results, and of parcels if the transport option names one.

    Databases, design documents and rights are made what this version needs; what is so already stays. The user in the app's URL
    becomes a member of the databases, and needs no other right from then on. Workers may run meanwhile. Older design documents
    are removed once no worker uses them.
    """
    app = app_of(ctx)
    results = _results(app, members, admin)
    broker = _broker(app, members, admin, needed=results is None)
    living = layouts(broker.client) if broker else {}
    parcels = _parcels(app, (*members, *publishers), admin) if broker else None
    if publishers and not parcels:
        raise click.UsageError(
            '--publisher needs the transport option parcels, with the name of the database of parcels.'
        )
    # All is read before anything is changed: what cannot be done is said first.
    plans = [
        (wanted.client.address.url, plan(wanted, living))
        for wanted in [*_merged(broker, results), *([parcels] if parcels else [])]
    ]
    for url, steps in plans:
        show(click.style(printable(url), bold=True))
        for step in steps:
            show(_take(step, dry_run))
    if dry_run:
        say('Nothing was changed: this was a dry run.')


def _take(step: Step, dry_run: bool) -> str:
    """Take a step, if there is something to do, and return what to say about it."""
    if step.notice:
        word, colour = 'note', 'yellow'
    elif step.do is None:
        word, colour = 'ok', 'bright_black'
    elif dry_run:
        word, colour = 'not yet', 'yellow'
    else:
        step.do()
        word, colour = 'done', 'green'
    return f'  {click.style(f"{word:7}", fg=colour)}  {printable(step.goal)}'


# -- what is wanted


def _broker(app: Any, members: tuple[str, ...], admin: Auth, *, needed: bool) -> Wanted | None:
    with app.connection_for_write() as connection:
        if not needed and not issubclass(connection.get_transport_cls(), Transport):
            return None  # only the results are in CouchDB
    client, user = broker_of(app, admin), broker_of(app).user
    return Wanted(client, kombu_couchdb.design.documents(), _members(user, members, admin), not user, REVS_LIMIT)


def _results(app: Any, members: tuple[str, ...], admin: Auth) -> Wanted | None:
    client, own = results_of(app, admin), results_of(app)
    if client is None or own is None:
        return None
    return Wanted(
        client, [kombu_couchdb.design.conflicted(), design.document()], _members(own.user, members, admin), not own.user
    )


def _parcels(app: Any, publishers: tuple[str, ...], admin: Auth) -> Wanted | None:
    client, own = parcels_of(app, admin), parcels_of(app)
    if client is None or own is None:
        return None
    return Wanted(
        client, [kombu_couchdb.design.parcels()], _members(own.user, publishers, admin), not own.user, REVS_LIMIT
    )


def _members(user: str | None, members: tuple[str, ...], admin: Auth) -> list[str]:
    """Return who shall be members: those named, and the app's user, unless that is the administrator himself."""
    return list(dict.fromkeys([*([user] if user and admin and user != admin[0] else []), *members]))


def _merged(broker: Wanted | None, results: Wanted | None) -> list[Wanted]:
    """Return what is wanted, once for each database: broker and results may share one."""
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
