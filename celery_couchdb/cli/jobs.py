"""The commands `celery couchdb jobs`: waiting and running jobs, and their messages."""

from __future__ import annotations

import click

from kombu_couchdb.admin.jobs import STATES, find, listing

from .databases import jobs_of
from .job_ids import resolve_id
from .job_view import describe, format_jobs, jobs_table
from .tables import echo, echo_styled, json_line, terminal_width

__all__ = ['command']


@click.group('jobs')
def command() -> None:
    """List the jobs in the queues, or show one job."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only jobs of this queue.')
@click.option(
    '--state',
    '-s',
    'states',
    multiple=True,
    type=click.Choice(STATES[:4]),
    help='List only jobs in this state. Can be given several times. Default: running, pending and scheduled.',
)
@click.option('--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The maximum to list.')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one object per line.')
@click.pass_context
def list_(ctx: click.Context, queue: str | None, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List jobs: first the running ones, then the waiting ones in the order in which workers claim them."""
    jobs = jobs_of(ctx)
    docs = listing(jobs.client, states or STATES[:3], queue, limit + 1)
    if as_json:
        for doc in docs[:limit]:
            echo_styled(json_line(describe(jobs, doc)))
        return
    if not docs:
        echo('There are none.')
        return
    echo_styled(jobs_table(docs[:limit], jobs.client.clock.now(), terminal_width()))
    if len(docs) > limit:
        echo(f'These are the first {limit}; there are more (--limit).', err=True)


@command.command('show')
@click.argument('name', metavar='ID')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one object per line.')
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
    echo_styled(format_jobs(jobs, docs, as_json))
