"""The command `celery -A app couchdb vacuum`: purge tombstones and compact the databases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import click

from kombu_couchdb.admin.vacuum import AGE, Report, longest_lease, mark, vacuum
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import CouchDBError, DatabaseMissing
from kombu_couchdb.queues.databases import broadcasts_of

from ..resources.columns import Column, format_duration, format_size
from ..rooms import rooms
from .clients import (
    Login,
    admin_option,
    app_of,
    broker_of,
    options_of,
    results_of,
)
from .resource_commands import yes_option
from .tables import Duration, confirm, echo, echo_styled, format_table

#: Seconds added to the longest lease. By default, tombstones must be older than this sum and older than `AGE`.
_MARGIN_SECONDS = 60.0

#: The labels of the progress bars.
_STEPS = {
    'wait': 'Waiting until the tombstones are old enough',
    'index': 'Bringing the indexes up to date',
    'purge': 'Purging tombstones',
    'compact': 'Compacting',
}


class VacuumPart(NamedTuple):
    """The part of an optional room in a vacuum."""

    #: Returns the ids of messages whose tombstones are kept, because they could be published again. If it raises a
    #: `CouchDBError`, those of all messages that were parcels are kept.
    moving: Callable[[], Collection[str]]
    #: Does what is left to do at the end, and yields a line for each.
    finish: Callable[[], Iterator[str]]
    #: Another database to vacuum. It may be replicated.
    client: Client | None = None


@click.command('vacuum')
@click.option(
    '--age',
    'given',
    metavar='SECONDS',
    type=Duration(),
    help='Purge only documents that were deleted longer ago than this. It must be longer than the visibility timeout '
    f'of all workers.  [default: {AGE:g}, or that timeout plus {_MARGIN_SECONDS:g} if this is more]',
)
@click.option('--no-wait', is_flag=True, help='Do not wait: purge only what was deleted before an earlier vacuum.')
@yes_option
@admin_option
@click.pass_context
def command(ctx: click.Context, given: float | None, no_wait: bool, yes: bool, admin: Login | None) -> None:
    """Purge tombstones and compact the databases.

    Workers can run meanwhile. The command needs a server administrator, and all nodes of a cluster must be up. You can
    stop it with Ctrl-C at any time; the next run continues.
    """
    app = app_of(ctx)
    broker = broker_of(app, admin)
    parts: list[VacuumPart] = [part for room in rooms() if (part := room.vacuum_part(app, admin))]
    replicated = [part.client for part in parts if part.client]
    clients = _distinct(broker, broadcasts_of(broker), results_of(app, admin), *replicated)
    options = options_of(app)
    min_age = _min_age(given, max(options.visibility_timeout, longest_lease(broker)))
    if not yes:
        names = ' and '.join(client.address.url for client in clients)
        confirm(f'Purge and compact {names}?')
    for client in clients:
        with suppress(CouchDBError):  # its vacuum raises it again
            mark(client, min_age)
    reports, unread = list[Report](), list[str]()
    for client in clients:
        echo(client.address.url, err=True)
        with _Bars() as bars:
            try:
                reports.append(
                    vacuum(
                        client,
                        bars.show,
                        age=min_age,
                        wait=not no_wait,
                        may_be_replicated=client.address.url in {each.address.url for each in replicated},
                        moving=partial(_moving, parts, unread) if client is broker else frozenset,
                    )
                )
            except DatabaseMissing:
                echo('does not exist yet: there is nothing to purge', err=True)
            except KeyboardInterrupt as exc:
                bars.close()
                raise click.ClickException(
                    'stopped; the purged tombstones stay purged, and another run continues'
                ) from exc
    if reports:
        echo_styled(format_table(_SUMMARY, map(vars, reports)))
    for report in reports:
        for line in _remarks(report, min_age):
            echo(f'{report.database}: {line}')
    for line in dict.fromkeys(line for report in reports for line in report.not_offered):
        echo(line)
    for error in unread:
        echo(f'{broker.address.database}: tombstones of messages that were parcels were left for another run: {error}')
    for part in parts:
        for line in part.finish():
            echo(line)


def _moving(parts: Iterable[VacuumPart], unread: list[str]) -> set[str] | None:
    """Return the ids of messages whose tombstones are kept; if they cannot be read, add the error to `unread`."""
    try:
        return {doc_id for part in parts for doc_id in part.moving()}
    except CouchDBError as exc:
        unread.append(str(exc))
        return None


def _min_age(given: float | None, lease: float) -> float:
    """Return the minimum age of tombstones in seconds, where `lease` is the longest lease.

    *Raises* `BadParameter` if `given` is not longer than the lease.
    """
    if given is None:
        return max(AGE, lease + _MARGIN_SECONDS)
    if given <= lease:
        raise click.BadParameter(
            f'{given:g} is not longer than the visibility timeout of the workers, {lease:g} s.', param_hint="'--age'"
        )
    return given


def _distinct(*clients: Client | None) -> list[Client]:
    """Return one client for each database: broker and results may share one."""
    return list({client.address.url: client for client in clients if client}.values())


#: The columns of the summary, which show values before and after the vacuum.
_SUMMARY = [
    Column('DATABASE', 'database', min_width=10),
    Column('TOMBSTONES', None, lambda row: f'{row["tombstones_before"]:,} → {row["tombstones_after"]:,}', right=True),
    Column('DATA', None, lambda row: _sizes(row['data_before'], row['data_after']), right=True),
    Column('INDEXES', None, lambda row: _sizes(row['indexes_before'], row['indexes_after']), right=True),
    Column('TIME', 'seconds', format_duration, right=True),
]


def _sizes(before: int, after: int) -> str:
    return f'{format_size(before)} → {format_size(after)}'


def _remarks(report: Report, min_age: float) -> Iterator[str]:
    """Yield, in sentences, what the summary of a database does not say."""
    if report.replicated:
        yield (
            'devices or servers replicate this database, so no tombstones were purged: a replica could bring parcels '
            'back that were moved'
        )
    elif not report.marked:
        yield (
            f'no earlier vacuum is {format_duration(min_age)} old, so no tombstones were purged: '
            f'run it again later, or without --no-wait'
        )
    elif report.young:
        yield f'tombstones that are too young were left for another run: {report.young:,}'
    if report.purged and report.without_views:
        yield (
            f'CouchDB keeps a note of each purge because of design documents without a view; give each of them a view: '
            f'{", ".join(report.without_views)}'
        )


class _Bars(ExitStack):
    """Progress bars on stderr: one for each step."""

    _step = ''

    def show(self, step: str, done: int, total: int) -> None:
        """Show that `done` of `total` is done in a step. The bar of the previous step stays as it ended."""
        if step != self._step:
            self.close()
            self._step = step
            self._bar: Any = self.enter_context(
                click.progressbar(length=max(total, 1), label=_STEPS[step], file=sys.stderr)
            )
        self._bar.update(max(0, done - self._bar.pos))
