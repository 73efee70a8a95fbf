"""`celery couchdb remove`: jobs that are not wanted any more."""

from __future__ import annotations

import click

from .site import jobs_of

__all__ = ['command']


@click.command('remove')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--terminate', '-t', is_flag=True, help='Halt those that run, too: their pool process is terminated.')
@click.option('--signal', default='SIGTERM', show_default=True, help='How it is terminated.')
@click.option('--yes', '-y', is_flag=True, help='Do not ask.')
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], terminate: bool, signal: str, yes: bool) -> None:
    """Remove jobs by the ids of their tasks.

    What waits, now or for later, is deleted for good. What a worker holds is revoked, and with --terminate halted. Who waits
    for the result of a removed job is told that it was revoked. Dead letters are left: see "dead drop".
    """
    jobs = jobs_of(ctx)
    if not yes:
        click.confirm(f'Remove {names[0]}?' if len(names) == 1 else f'Remove {len(names)} jobs?', abort=True)
    left = 0
    for name in names:
        removal = jobs.remove(name, terminate=terminate, signal=signal)
        if removal.running:
            click.echo(f'{name}: a worker holds it; it was told to {"terminate" if terminate else "revoke"} it')
        elif removal.removed:
            click.echo(f'{name}: removed')
        elif removal.dead:
            left += 1
            click.echo(f'{name}: is a dead letter; see "dead drop"', err=True)
        else:
            click.echo(f'{name}: is not in a queue; the workers were told to {"terminate" if terminate else "revoke"} it, '
                       f'should one run it')
    if left:
        ctx.exit(1)
