"""The commands `celery couchdb jobs` and `remove`: list and change jobs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from kombu_couchdb.admin.edit import UNCHANGED
from kombu_couchdb.admin.jobs import OPEN, STATES, resolve
from kombu_couchdb.admin.listing import JobFilter, listing
from kombu_couchdb.couchdb.client import Document

from ..jobs import Jobs, Unreadable
from ..resources.inputs import due_date
from ..resources.jobs import job_resource, removal_text
from .clients import jobs_of
from .resource_commands import (
    json_option,
    limit_option,
    print_details,
    print_list,
    since_option,
    yes_option,
)
from .tables import Duration, Json, confirm, echo


@click.group('jobs')
def command() -> None:
    """List jobs; move or edit one."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only jobs of this queue.')
@click.option('--task', metavar='NAME', help='List only jobs of the task with this name.')
@click.option(
    '--state',
    '-s',
    'states',
    multiple=True,
    type=click.Choice(STATES[:7]),
    help='List only jobs in this state. Can be given several times. Default: all but dead and done.',
)
@since_option('List only jobs that were published, failed or finished')
@click.option('--args', metavar='TEXT', help='List only jobs whose arguments, as Python shows them, contain this text.')
@limit_option
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    queue: str | None,
    task: str | None,
    states: tuple[str, ...],
    age: float | None,
    args: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs: first those that workers hold, by the time of the claim, then those of each queue, by state and time.

    With --task, --since, --args or the state "done", the latest come first.
    """
    jobs = jobs_of(ctx)
    since = None if age is None else jobs.client.clock.now() - age
    wanted = JobFilter(states or OPEN, queue, task, since, args)
    found = listing(jobs.client, wanted, limit + 1)
    print_list(job_resource(jobs), found, as_json, empty='There are none.', limit=limit)


@command.command('move')
@click.argument('name', metavar='ID')
@click.option('--queue', '-Q', metavar='NAME', help='Move the job to this queue, which must be declared.')
@click.option('--eta', metavar='DATE', help='Make it due at this date, such as 2026-01-31T08:00+01:00, or "now".')
@click.option('--countdown', metavar='SECONDS', type=Duration(), help='Make it due in so many seconds.')
@click.option('--priority', metavar='0-9', type=click.IntRange(0, 9), help='Give it this priority; 9 is the highest.')
@click.pass_context
def move_(
    ctx: click.Context,
    name: str,
    queue: str | None,
    eta: str | None,
    countdown: float | None,
    priority: int | None,
) -> None:
    """Move a waiting job to another queue, due date or priority.

    ID is the id of the task or of the document, or its first characters.
    """
    if eta is not None and countdown is not None:
        raise click.UsageError('Give --eta or --countdown, not both.')
    if all(given is None for given in (queue, eta, countdown, priority)):
        raise click.UsageError('Give --queue, --eta, --countdown or --priority.')
    date = UNCHANGED if eta is None else _date(eta)
    _change(
        ctx, name, lambda jobs, full: jobs.move(full, queue=queue, eta=date, countdown=countdown, priority=priority)
    )


@command.command('edit')
@click.argument('name', metavar='ID')
@click.option(
    '--args', metavar='JSON', type=Json(list), help='The positional arguments, as a JSON list: \'[1, "two"]\'.'
)
@click.option(
    '--kwargs', metavar='JSON', type=Json(dict), help='The keyword arguments, as a JSON object: \'{"name": "value"}\'.'
)
@click.pass_context
def edit_(ctx: click.Context, name: str, args: list[Any] | None, kwargs: dict[str, Any] | None) -> None:
    """Replace the arguments of a waiting job.

    ID is the id of the task or of the document, or its first characters. Without --args or --kwargs, these stay as they
    are.
    """
    if args is None and kwargs is None:
        raise click.UsageError('Give --args or --kwargs.')
    _change(ctx, name, lambda jobs, full: jobs.edit(full, args=args, kwargs=kwargs))


def _change(ctx: click.Context, name: str, act: Callable[[Jobs, str], Document]) -> None:
    """Change a job by `act(jobs, full id)` and show it."""
    jobs = jobs_of(ctx)
    try:
        doc = act(jobs, resolve(jobs.client, name))
    except Unreadable as exc:
        raise click.ClickException(str(exc)) from exc
    print_details(job_resource(jobs), [doc], as_json=False)


def _date(text: str) -> datetime | None:
    try:
        return due_date(text)
    except ValueError as exc:
        raise click.UsageError(f'--eta: {exc}.') from exc


# -- remove


@click.command('remove')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--terminate', '-t', is_flag=True, help='Stop running jobs, too: terminate their pool process.')
@click.option('--signal', default='SIGTERM', show_default=True, help='The signal that terminates the pool process.')
@yes_option
@click.pass_context
def remove_command(ctx: click.Context, names: tuple[str, ...], terminate: bool, signal: str, yes: bool) -> None:
    """Remove jobs by the ids of their tasks.

    ID is the id of a task, or its first characters. Ready, scheduled and parked jobs are deleted for good, and their
    results become REVOKED. Jobs that a worker holds are revoked; with --terminate the worker also stops them if they
    run. An id that is in no queue is revoked, too, because a worker may be running the task. Dead letters are kept; see
    "failures drop". A job that is done is kept as it is.
    """
    jobs = jobs_of(ctx)
    names = tuple(resolve(jobs.client, name) for name in names)
    if not yes:
        confirm(f'Remove {names[0]}?' if len(names) == 1 else f'Remove {len(names)} jobs?')
    left = 0
    for name in names:
        text, is_left = removal_text(jobs.remove(name, terminate=terminate, signal=signal), terminate)
        echo(f'{name}: {text}', err=is_left)
        left += is_left
    if left:
        ctx.exit(1)
