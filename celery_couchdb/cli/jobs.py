"""`celery couchdb jobs`: what waits, what runs, and what a message says."""

from __future__ import annotations

import click

from kombu_couchdb.admin.jobs import STATES, find, listing

from .databases import jobs_of
from .job_view import described, listed, shown
from .named import whole
from .tables import json_line, say, show, width

__all__ = ['command']


@click.group('jobs')
def command() -> None:
    """List the jobs in the queues, or show one with its message."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='Only jobs of this queue.')
@click.option(
    '--state',
    '-s',
    'states',
    multiple=True,
    type=click.Choice(STATES[:4]),
    help='Only jobs in this state; may be repeated. Default: running, pending and scheduled.',
)
@click.option('--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The most jobs to list.')
@click.option('--json', 'as_json', is_flag=True, help='One JSON object a line.')
@click.pass_context
def list_(ctx: click.Context, queue: str | None, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List jobs: those that run first, then the next to be taken."""
    jobs = jobs_of(ctx)
    docs = listing(jobs.client, states or STATES[:3], queue, limit + 1)
    if as_json:
        for doc in docs[:limit]:
            show(json_line(described(jobs, doc)))
        return
    if not docs:
        say('There are none.')
        return
    show(listed(docs[:limit], jobs.client.clock.now(), width()))
    if len(docs) > limit:
        say(f'These are the first {limit}; there are more (--limit).', err=True)


@command.command('show')
@click.argument('name', metavar='ID')
@click.option('--json', 'as_json', is_flag=True, help='One JSON object a line.')
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a job, with its message decoded. ID is that of its task or of its document, or how it begins."""
    jobs = jobs_of(ctx)
    name = whole(jobs.client, name)
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
    show(shown(jobs, docs, as_json))
