"""The commands `celery couchdb results`: list stored results, and send failed tasks again."""

from __future__ import annotations

from collections.abc import Sequence

import click
from celery import states

from ..resources.columns import Cell, Column, Row, format_date, json_line
from ..resources.resource import Resource, Selection, counted
from ..stored_results import NotSent, StoredResult, StoredResults
from .clients import app_of, results_of
from .resource_commands import change, limit_option, print_list, since_option, yes_option

_task_option = click.option('--task', metavar='NAME', help='Only results of this task.')


@click.group('results')
def command() -> None:
    """List stored results, or send failed tasks again."""


@command.command('list')
@since_option('Only results stored')
@_task_option
@click.option(
    '--state',
    '-s',
    default=states.FAILURE,
    show_default=True,
    help='Only results in this state, a custom one for example.',
)
@limit_option
@click.option('--json', 'as_json', is_flag=True, help='Print JSON with the tracebacks, one object per line.')
@click.pass_context
def list_(ctx: click.Context, age: float | None, task: str | None, state: str, limit: int, as_json: bool) -> None:
    """List the stored results in one state, the newest first: by default what failed, with the error."""
    results = _results(ctx)
    since = None if age is None else results.client.clock.now() - age
    columns = [
        Column('ID', 'id', min_width=36),
        Column('TASK', 'task', min_width=8),
        Column('DATE (UTC)', 'date', format_date),
        Column('ERROR' if state in states.EXCEPTION_STATES else 'RESULT', None, _outcome, min_width=10),
    ]
    print_list(
        Resource[StoredResult](lambda part: [result.described() for result in part], columns),
        results.listing(state, task=task, since=since),
        as_json,
        empty=f'There are no results in the state {state}.',
        limit=limit,
    )


@command.command('retry')
@click.argument('names', metavar='[ID…]', nargs=-1)
@click.option('--all', 'every', is_flag=True, help='Select all failed tasks, or those that --task and --since select.')
@since_option('Only results stored')
@_task_option
@click.option('--queue', '-Q', metavar='NAME', help='Send the tasks to this queue. Default: the one they were sent to.')
@yes_option
@click.pass_context
def retry(
    ctx: click.Context,
    names: tuple[str, ...],
    every: bool,
    age: float | None,
    task: str | None,
    queue: str | None,
    yes: bool,
) -> None:
    """Send failed tasks again, with their ids and their arguments.

    ID is the full id of a task. The workers must store the arguments: set result_extended = True. Only the tasks
    themselves are sent, and not what was to follow them in a chain or a chord.
    """
    if bool(names) == every or (names and (task or age is not None)):
        raise click.UsageError('Name tasks by id, or give --all, with --task and --since if you like.')
    results = _results(ctx)
    since = None if age is None else results.client.clock.now() - age
    # The newest come first, so a task that fails again while this runs is not selected again.
    selected = [_find(results, name) for name in names] if names else results.listing(task=task, since=since)
    total = len(names) or results.count(task=task, since=since)

    def act(part: Sequence[StoredResult]) -> tuple[int, dict[str, str]]:
        refused: dict[str, str] = {}
        for result in part:
            try:
                results.retry(result, queue=queue)
            except NotSent as exc:
                refused[result.id] = str(exc)
        return len(part) - len(refused), refused

    which = names[0] if len(names) == 1 else counted(total, 'failed task')
    change(ctx, 'Send', Selection(f'{which} again', selected, total), act, 'sent again', yes=yes)


def _results(ctx: click.Context) -> StoredResults:
    app = app_of(ctx)
    return StoredResults(app, results_of(app))


def _find(results: StoredResults, name: str) -> StoredResult:
    found = results.get(name)
    if found is None:
        raise click.ClickException(f'there is no result of a task {name!r}')
    return found


def _outcome(result: Row) -> Cell | str:
    return Cell(result['error'], 'bad') if result['error'] is not None else json_line(result['result'])
