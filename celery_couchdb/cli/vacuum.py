"""`celery -A app couchdb vacuum`: takes what finished work left behind out of the databases."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from kombu_couchdb.admin.vacuum import AGE, Report, longest_lease, vacuum
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import DatabaseMissing

from .databases import administrator, app_of, broker_of, lease_of, parcels_of, results_of
from .tables import Column, age, asked, say, show, size, table, width

__all__ = ['command']

#: How much longer than the longest lease it is by default, in seconds.
_MARGIN = 60.0

_STEPS = {
    'wait': 'Waiting until what was deleted is old enough',
    'index': 'Bringing the indexes up to date',
    'purge': 'Taking tombstones away',
    'prove': 'Making sure that bindings have no queue',
    'compact': 'Compacting',
}


@click.command('vacuum')
@click.option(
    '--age',
    'given',
    metavar='SECONDS',
    type=click.FloatRange(min=0),
    help='Take away only what was deleted longer ago than this. It must be longer than the visibility timeout of all '
    f'workers.  [default: {AGE:g}, or that timeout and a minute if this is more]',
)
@click.option('--no-wait', is_flag=True, help='Do not wait: take away only what was deleted before an earlier vacuum.')
@click.option('--yes', '-y', is_flag=True, help='Do not ask.')
@administrator
@click.pass_context
def command(ctx: click.Context, given: float | None, no_wait: bool, yes: bool, admin: tuple[str, str] | None) -> None:
    """Take tombstones, orphaned bindings, finished consumers and old broadcasts away, and compact.

    Workers may go on meanwhile. It needs a server administrator, and all nodes of a cluster. It can be stopped with Ctrl-C
    at any time; another run goes on with the rest.
    """
    app = app_of(ctx)
    broker = broker_of(app, admin)
    clients = _distinct(broker, results_of(app, admin), parcels_of(app, admin))
    oldest = _oldest(given, max(lease_of(app), longest_lease(broker)))
    if not yes:
        names = ' and '.join(client.address.url for client in clients)
        asked(f'Take what is left of finished work out of {names}?')
    reports = []
    for client in clients:
        say(client.address.url, err=True)
        with _Bars() as bars:
            try:
                reports.append(vacuum(client, bars.show, age=oldest, wait=not no_wait))
            except DatabaseMissing:
                say('does not exist yet: there is nothing to take away', err=True)
            except KeyboardInterrupt as exc:
                bars.close()
                raise click.ClickException(
                    'stopped; what was taken away is gone, and another run goes on with the rest'
                ) from exc
    if reports:
        show(_summary(reports))
    for report in reports:
        for line in _remarks(report, oldest):
            say(f'{report.database}: {line}')


def _oldest(given: float | None, lease: float) -> float:
    """Return how old a tombstone must be; *raises* `BadParameter` if what is given is within the longest lease, in seconds."""
    if given is None:
        return max(AGE, lease + _MARGIN)
    if given <= lease:
        raise click.BadParameter(
            f'{given:g} is not longer than the visibility timeout of the workers, {lease:g} s.', param_hint="'--age'"
        )
    return given


def _distinct(*clients: Client | None) -> list[Client]:
    """Return the clients of different databases: broker and results may share one."""
    return list({client.address.url: client for client in clients if client}.values())


def _summary(reports: list[Report]) -> str:
    columns = [
        Column('DATABASE', least=10),
        Column('TOMBSTONES', right=True),
        Column('DATA', right=True),
        Column('INDEXES', right=True),
        Column('TIME', right=True),
    ]
    return table(
        columns,
        [
            [
                report.database,
                f'{report.tombstones_before:,} → {report.tombstones_after:,}',
                f'{size(report.data_before)} → {size(report.data_after)}',
                f'{size(report.indexes_before)} → {size(report.indexes_after)}',
                age(report.seconds),
            ]
            for report in reports
        ],
        width(),
    )


def _remarks(report: Report, oldest: float) -> Iterator[str]:
    """Yield what else there is to say of a database, in sentences."""
    if tidied := ', '.join(f'{kind} {count:,}' for kind, count in report.tidied.items() if count):
        yield f'what nobody needs any more was deleted: {tidied}'
    if not report.marked:
        yield (
            f'no earlier vacuum is {age(oldest)} old, so no tombstones were taken away: '
            f'run it again later, or without --no-wait'
        )
    elif report.young:
        yield f'tombstones that are too young were left for another run: {report.young:,}'


class _Bars:
    """A progress bar for each step that takes longer than a second; that of the step before stays where it ended."""

    def __init__(self) -> None:
        self._step, self._began, self._done = '', 0.0, 0
        self._bar: Any = None

    def show(self, step: str, done: int, total: int) -> None:
        """Show how far a step is."""
        if step != self._step:
            self.close()
            self._step, self._began, self._done = step, time.monotonic(), 0
        if self._bar is None:
            if time.monotonic() - self._began < 1 or not total:
                return
            self._bar = click.progressbar(length=total, label=_STEPS[step], file=sys.stderr)
            self._bar.__enter__()
        self._bar.update(max(0, done - self._done))
        self._done = max(self._done, done)

    def close(self) -> None:
        """End the bar, wherever it is."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
        self._bar = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
