"""The command `celery couchdb remove`: delete waiting jobs, revoke running ones."""

from __future__ import annotations

import click

from .databases import jobs_of
from .job_resource import resolve_id
from .resource import yes_option
from .tables import confirm, echo

__all__ = ['command']


@click.command('remove')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--terminate', '-t', is_flag=True, help='Stop running jobs, too: terminate their pool process.')
@click.option('--signal', default='SIGTERM', show_default=True, help='The signal that terminates the pool process.')
@yes_option
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], terminate: bool, signal: str, yes: bool) -> None:
    """Remove jobs by the ids of their tasks.

    ID is the id of a task, or its first characters. Pending and scheduled jobs are deleted for good, and their results
    become REVOKED. Jobs that a worker holds are revoked; with --terminate the worker also stops them if they run. An id
    that is in no queue is revoked, too, because a worker may be running the task. Dead letters are kept; see "dead
    drop". A job that is done is kept as it is.
    """
    jobs = jobs_of(ctx)
    names = tuple(resolve_id(jobs.client, name) for name in names)
    if not yes:
        confirm(f'Remove {names[0]}?' if len(names) == 1 else f'Remove {len(names)} jobs?')
    left = 0
    for name in names:
        removal = jobs.remove(name, terminate=terminate, signal=signal)
        if removal.running:
            echo(f'{name}: a worker holds it; it was told to {"terminate" if terminate else "revoke"} it')
        elif removal.removed:
            echo(f'{name}: removed')
        elif removal.dead:
            left += 1
            echo(f'{name}: is a dead letter; see "dead drop"', err=True)
        elif removal.done and not removal.revoked:
            left += 1
            echo(f'{name}: is done: there is nothing to remove', err=True)
        else:
            echo(
                f'{name}: is not in a queue; the workers were told to {"terminate" if terminate else "revoke"} it, '
                f'should one run it'
            )
    if left:
        ctx.exit(1)
