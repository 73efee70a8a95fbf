"""The commands `celery couchdb queues`: list, pause, resume, purge and delete queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import click

from kombu_couchdb.admin import queues
from kombu_couchdb.admin.status import status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.values import enumerated

from .. import audit
from ..resources.columns import Row
from ..resources.queue_actions import DELETE, PAUSE, PURGE, QUEUES, RESUME
from ..resources.queues import NO_QUEUES, queue_columns, queue_remarks, queue_rows
from ..resources.resource import Resource, counted
from ..resources.selectable import ItemAction
from .clients import app_of, broker_of
from .resource_commands import json_option, print_list, run_change, yes_option
from .tables import echo


@click.group('queues')
def command() -> None:
    """List, pause, resume, purge or delete queues."""


@command.command('list')
@click.option('--all', 'temporary', is_flag=True, help='Also list empty queues for replies, events and remote control.')
@json_option
@click.pass_context
def list_(ctx: click.Context, temporary: bool, as_json: bool) -> None:
    """List queues with their messages and pauses.

    The columns are those of "couchdb status". Below them are the pauses, each with its date, who began it, and why,
    and the queues that no worker consumes.
    """
    client = broker_of(app_of(ctx))
    rows = queue_rows(status(client, temporary=temporary))
    print_list(Resource[Row](list, queue_columns(rows)), rows, as_json, empty=NO_QUEUES)
    for remark in () if as_json else queue_remarks(rows, client.clock.now()):
        echo(f'{remark}.')


@command.command('pause')
@click.argument('patterns', metavar='[QUEUE…]', nargs=-1)
@click.option('--all', 'every', is_flag=True, help='Pause all queues, except those for replies, events and control.')
@click.option('--reason', metavar='TEXT', help='Why; shown by "queues list" and "status".')
@click.option('--refuse', is_flag=True, help='Also let no program publish to them.')
@click.option('--new', is_flag=True, help='Also pause queues that do not exist yet.')
@click.pass_context
def pause(
    ctx: click.Context, patterns: tuple[str, ...], every: bool, reason: str | None, refuse: bool, new: bool
) -> None:
    """Let no worker claim messages of these queues.

    QUEUE is a name, or a pattern such as "mail.*", which does not match queues for replies, events and remote control.

    Workers stop claiming within a second. Tasks that they run, or have received (up to their prefetch count), go on.
    Messages can be published, and wait. With --refuse, programs that publish get an error instead, within a second.
    What the tasks of workers send (retries, next steps) is accepted.
    """
    client = broker_of(app_of(ctx))
    selected = _select({**queues.names(client), **dict.fromkeys(patterns if new else (), False)}, patterns, every)
    if not selected:
        echo('There are no queues.')
        return
    _change(ctx, client, PAUSE, selected, yes=True, by=audit.who_runs_this(), reason=reason, refuse=refuse)


@command.command('resume')
@click.argument('patterns', metavar='[QUEUE…]', nargs=-1)
@click.option('--all', 'every', is_flag=True, help='Resume all paused queues.')
@click.pass_context
def resume(ctx: click.Context, patterns: tuple[str, ...], every: bool) -> None:
    """Let workers claim messages from these queues again, at once.

    QUEUE is a name, or a pattern such as "mail.*".
    """
    client = broker_of(app_of(ctx))
    known = queues.names(client) if patterns else dict.fromkeys(queues.paused(client), False)
    selected = _select(known, patterns, every)
    if not selected:
        echo('No queue is paused.')
        return
    _change(ctx, client, RESUME, selected, yes=True)


@command.command('purge')
@click.argument('patterns', metavar='QUEUE…', nargs=-1, required=True)
@yes_option
@click.pass_context
def purge(ctx: click.Context, patterns: tuple[str, ...], yes: bool) -> None:
    """Delete the ready and scheduled messages of these queues.

    QUEUE is a name, or a pattern such as "mail.*". Messages that workers hold, and dead letters, are kept.
    """
    client = broker_of(app_of(ctx))
    _change(ctx, client, PURGE, _select(queues.names(client), patterns, every=False), yes=yes)


@command.command('delete')
@click.argument('patterns', metavar='QUEUE…', nargs=-1, required=True)
@click.option('--force', is_flag=True, help='Also delete queues that workers consume.')
@yes_option
@click.pass_context
def delete(ctx: click.Context, patterns: tuple[str, ...], force: bool, yes: bool) -> None:
    """Delete these queues with their bindings and messages.

    QUEUE is a name, or a pattern such as "mail.*". The ready and scheduled messages are deleted for good. Messages that
    workers hold, and dead letters, are kept. A queue that workers consume is kept unless you give --force: they would
    go on to consume what is published to this name.
    """
    client = broker_of(app_of(ctx))
    _change(ctx, client, DELETE, _select(queues.names(client), patterns, every=False), yes=yes, force=force)


def _change(
    ctx: click.Context, client: Client, action: ItemAction[Client, str], names: list[str], *, yes: bool, **values: Any
) -> None:
    """Ask for confirmation unless `yes` is true, and do something to these queues."""
    total = action.amount(client, names) if action.amount else len(names)
    what = f'{enumerated(names)} with {counted(total, action.unit)}'
    run_change(
        ctx,
        '' if yes else action.question.format(what),
        action.title,
        QUEUES.change(action, client, names, total, values),
        partial(audit.begin, client, audit.who_runs_this(), f'{action.name} queue', names, values.get('reason')),
    )


def _select(known: Mapping[str, bool], patterns: Sequence[str], every: bool) -> list[str]:
    """Return the names of the selected queues, each once.

    `known` tells of each queue whether it is temporary; patterns and `every` leave such queues out. *Raises*
    `UsageError` unless either `patterns` or `every` is given, and `ClickException` for a pattern without a queue.
    """
    if bool(patterns) == every:
        raise click.UsageError('Name queues, or give --all.')
    lasting = sorted(name for name, temporary in known.items() if not temporary)
    found = lasting if every else []
    for pattern in patterns:
        matches = [pattern] if pattern in known else [name for name in lasting if fnmatchcase(name, pattern)]
        if not matches:
            raise click.ClickException(
                f'there is no queue {pattern!r}; the queues are {enumerated(lasting)}'
                if lasting
                else f'there is no queue {pattern!r}: none has been declared yet'
            )
        found = [*found, *matches]
    return list(dict.fromkeys(found))
