"""`celery couchdb remove`: jobs that are not wanted any more."""

from __future__ import annotations

import click

from .databases import jobs_of
from .named import whole
from .tables import asked, say

__all__ = ['command']


@click.command('remove')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--terminate', '-t', is_flag=True, help='Halt those that run, too: their pool process is terminated.')
@click.option('--signal', default='SIGTERM', show_default=True, help='How it is terminated.')
@click.option('--yes', '-y', is_flag=True, help='Do not ask.')
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], terminate: bool, signal: str, yes: bool) -> None:
    """Remove jobs by the ids of their tasks, or by how these begin.

    What waits, now or for later, is deleted for good. What a worker holds is revoked, and with --terminate halted. Who waits
    for the result of a removed job is told that it was revoked. Dead letters are left: see "dead drop".
    """
    jobs = jobs_of(ctx)
    names = tuple(whole(jobs.client, name) for name in names)
    if not yes:
        asked(f'Remove {names[0]}?' if len(names) == 1 else f'Remove {len(names)} jobs?')
    left = 0
    for name in names:
        removal = jobs.remove(name, terminate=terminate, signal=signal)
        if removal.running:
            say(f'{name}: a worker holds it; it was told to {"terminate" if terminate else "revoke"} it')
        elif removal.removed:
            say(f'{name}: removed')
        elif removal.dead:
            left += 1
            say(f'{name}: is a dead letter; see "dead drop"', err=True)
        else:
            say(
                f'{name}: is not in a queue; the workers were told to {"terminate" if terminate else "revoke"} it, '
                f'should one run it'
            )
    if left:
        ctx.exit(1)
