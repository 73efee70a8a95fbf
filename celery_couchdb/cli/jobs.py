"""The commands `celery couchdb jobs`: list, show, move and edit jobs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from kombu_couchdb.admin.edit import UNCHANGED
from kombu_couchdb.admin.jobs import STATES, find
from kombu_couchdb.admin.listing import Wanted, listing
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.values import date_of

from ..jobs import Jobs, Unreadable
from .databases import jobs_of
from .job_resource import job_resource, resolve_id
from .resource import json_option, limit_option
from .tables import Duration, Json, Number

__all__ = ['command']


@click.group('jobs')
def command() -> None:
    """List jobs; show, move or edit one."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only jobs of this queue.')
@click.option('--task', metavar='NAME', help='List only jobs of the task with this name.')
@click.option(
    '--state',
    '-s',
    'states',
    multiple=True,
    type=click.Choice(STATES[:5]),
    help='List only jobs in this state. Can be given several times. Default: running, pending and scheduled.',
)
@click.option(
    '--since',
    metavar='TIME',
    type=Duration(),
    help='List only jobs that were published, failed or finished in this time, such as 90s, 15m, 2h or 7d.',
)
@click.option('--args', metavar='TEXT', help='List only jobs whose arguments, as Python shows them, contain this text.')
@limit_option
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    queue: str | None,
    task: str | None,
    states: tuple[str, ...],
    since: float | None,
    args: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs: first the running ones, then the waiting ones in the order in which workers claim them.

    With --task, --since, --args or the state "done", the latest come first.
    """
    jobs = jobs_of(ctx)
    now = jobs.client.clock.now()
    wanted = Wanted(states or STATES[:3], queue, task, None if since is None else now - since, args)
    job_resource(jobs).print_list(
        listing(jobs.client, wanted, limit + 1),
        as_json,
        empty='There are none.',
        limit=limit,
        more=lambda: f'These are the first {limit}; there are more (--limit).',
    )


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a job with its decoded message.

    ID is the id of the task or of the document, or its first characters.
    """
    jobs = jobs_of(ctx)
    name = resolve_id(jobs.client, name)
    docs = find(jobs.client, name)
    if not docs:
        holders = ', '.join(f'{worker} ({how})' for worker, how in jobs.workers(name).items())
        raise click.ClickException(
            f'job {name!r} is not in a queue'
            + (
                f': it was acknowledged early, and is with {holders}'
                if holders
                else ' and with no worker: it is done, has expired or was removed, or was never here'
            )
        )
    job_resource(jobs).show(docs, as_json)


@command.command('move')
@click.argument('name', metavar='ID')
@click.option('--queue', '-Q', metavar='NAME', help='Move the job to this queue, which must be declared.')
@click.option('--eta', metavar='DATE', help='Make it due at this date, such as 2026-01-31T08:00+01:00, or "now".')
@click.option('--countdown', metavar='SECONDS', type=Number(0), help='Make it due in so many seconds.')
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


def _change(ctx: click.Context, name: str, change: Callable[[Jobs, str], Document]) -> None:
    """Change a job by `change(jobs, full id)` and show it."""
    jobs = jobs_of(ctx)
    try:
        doc = change(jobs, resolve_id(jobs.client, name))
    except Unreadable as exc:
        raise click.ClickException(str(exc)) from exc
    job_resource(jobs).show([doc], as_json=False)


def _date(text: str) -> datetime | None:
    if text == 'now':
        return None
    try:
        return date_of(text)
    except ValueError as exc:
        raise click.UsageError(
            f'--eta must be a date such as 2026-01-31T08:00+01:00, or "now", not {text!r:.80}'
        ) from exc
