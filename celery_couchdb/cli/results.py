"""The commands `celery couchdb results`: list stored results, and send failed tasks again."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from typing import Any

import click
from celery import states

from kombu_couchdb.values import SECONDS_OF_UNIT

from ..stored_results import NotSent, StoredResult, StoredResults
from .databases import app_of, results_of
from .tables import (
    NO_VALUE,
    Cell,
    Column,
    confirm,
    echo,
    json_line,
    print_list,
)

__all__ = ['command']

#: A progress bar is shown for more results than this.
_PROGRESS_BAR_FROM = 200


@click.group('results')
def command() -> None:
    """List stored results, or send failed tasks again."""


def _date(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Return a duration before now, or a date, in seconds since the epoch; *raises* `BadParameter`."""
    if text is None:
        return None
    if found := re.fullmatch(r'(\d+(?:\.\d+)?)([smhd])', text):
        return time.time() - float(found[1]) * SECONDS_OF_UNIT[found[2]]
    try:
        date = datetime.fromisoformat(text)
    except ValueError as exc:
        raise click.BadParameter(f'{text!r} is neither a duration (90s, 30m, 2h, 1d) nor a date (2026-11-22).') from exc
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def _selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options that select results."""
    for decorator in (
        click.option(
            '--since',
            metavar='TIME',
            callback=_date,
            help='Only results stored since then: a duration before now (90s, 30m, 2h, 1d) or a date (2026-11-22, or '
            '2026-11-22T14:30; UTC).',
        ),
        click.option('--task', metavar='NAME', help='Only results of this task.'),
    ):
        function = decorator(function)
    return function


@command.command('list')
@_selection_options
@click.option(
    '--state',
    '-s',
    default=states.FAILURE,
    show_default=True,
    help='Only results in this state, a custom one for example.',
)
@click.option('--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The maximum to list.')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON with the tracebacks, one object per line.')
@click.pass_context
def list_(ctx: click.Context, since: float | None, task: str | None, state: str, limit: int, as_json: bool) -> None:
    """List the stored results in one state, the newest first: by default what failed, with the error."""
    results = _results(ctx)
    print_list(
        results.listing(state, task=task, since=since),
        limit,
        (lambda part: (result.described() for result in part)) if as_json else None,
        [
            Column('ID', min_width=36),
            Column('TASK', min_width=8),
            Column('DATE (UTC)'),
            Column('ERROR' if state in states.EXCEPTION_STATES else 'RESULT', min_width=10),
        ],
        lambda part: [_row(result) for result in part],
        empty=f'There are no results in the state {state}.',
        more=lambda: f'These are the newest {limit} of {results.count(state, task=task, since=since):,} (--limit).',
    )


@command.command('retry')
@click.argument('names', metavar='[ID…]', nargs=-1)
@click.option('--all', 'every', is_flag=True, help='Select all failed tasks, or those that --task and --since select.')
@_selection_options
@click.option('--queue', '-Q', metavar='NAME', help='Send the tasks to this queue. Default: the one they were sent to.')
@click.option('--yes', '-y', is_flag=True, help='Do not ask for confirmation.')
@click.pass_context
def retry(
    ctx: click.Context,
    names: tuple[str, ...],
    every: bool,
    since: float | None,
    task: str | None,
    queue: str | None,
    yes: bool,
) -> None:
    """Send failed tasks again, with their ids and their arguments.

    ID is the full id of a task. The workers must store the arguments: set result_extended = True. Only the tasks
    themselves are sent, and not what was to follow them in a chain or a chord.
    """
    if bool(names) == every or (names and (task or since)):
        raise click.UsageError('Name tasks by id, or give --all, with --task and --since if you like.')
    results = _results(ctx)
    # The newest come first, so a task that fails again while this runs is not selected again.
    selected = iter([_find(results, name) for name in names]) if names else results.listing(task=task, since=since)
    total = len(names) or results.count(task=task, since=since)
    if total and not yes:
        confirm(f'Send {names[0] if len(names) == 1 else f"{total:,} failed task" + "s" * (total > 1)} again?')
    done = refused = 0
    show_bar = total > _PROGRESS_BAR_FROM
    with click.progressbar(length=total, label='Send', file=sys.stderr) if show_bar else nullcontext() as bar:
        for each in selected:
            try:
                results.retry(each, queue=queue)
                done += 1
            except NotSent as exc:
                refused += 1
                echo(f'{each.id}: {exc}', err=True)
            if bar:
                bar.update(1)
    echo(f'{done:,} sent again.')
    if refused:
        ctx.exit(1)


def _results(ctx: click.Context) -> StoredResults:
    app = app_of(ctx)
    return StoredResults(app, results_of(app))


def _find(results: StoredResults, name: str) -> StoredResult:
    found = results.get(name)
    if found is None:
        raise click.ClickException(f'there is no result of a task {name!r}')
    return found


def _row(result: StoredResult) -> list[Cell | str]:
    return [
        result.id,
        result.task or NO_VALUE,
        _format_date(result.date),
        Cell(result.error, {'fg': 'red'}) if result.error is not None else json_line(result.result),
    ]


def _format_date(date: float | None) -> str:
    try:
        return NO_VALUE if date is None else f'{datetime.fromtimestamp(date, timezone.utc):%Y-%m-%d %H:%M:%S}'
    except (ValueError, OverflowError, OSError):
        return str(date)
