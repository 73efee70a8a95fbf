"""The commands `celery couchdb jobs`, `remove` and `dead`: list, show and change jobs, among them dead letters.

A dead letter is a job in the state `dead`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from kombu_couchdb.admin import dead
from kombu_couchdb.admin.edit import UNCHANGED
from kombu_couchdb.admin.jobs import OPEN, STATES, find, resolve
from kombu_couchdb.admin.listing import JobFilter, listing
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents import workitem

from ..jobs import Jobs, Unreadable
from ..resources.inputs import due_date
from ..resources.jobs import job_resource, removal_text
from ..resources.resource import Selection, counted
from .clients import jobs_of
from .resource_commands import (
    change,
    json_option,
    limit_option,
    print_details,
    print_list,
    selection_options,
    since_option,
    yes_option,
)
from .tables import Duration, Json, confirm, echo


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
    """List jobs: first those that workers hold, then the ready ones in the order in which workers claim them.

    With --task, --since, --args or the state "done", the latest come first.
    """
    jobs = jobs_of(ctx)
    since = None if age is None else jobs.client.clock.now() - age
    _print_list(jobs, JobFilter(states or OPEN, queue, task, since, args), limit, as_json, 'There are none.')


def _print_list(jobs: Jobs, wanted: JobFilter, limit: int, as_json: bool, empty: str) -> None:
    print_list(job_resource(jobs), listing(jobs.client, wanted, limit + 1), as_json, empty=empty, limit=limit)


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a job with its decoded message.

    ID is the id of the task or of the document, or its first characters.
    """
    jobs = jobs_of(ctx)
    name = resolve(jobs.client, name)
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
    print_details(job_resource(jobs), docs, as_json)


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


# -- dead letters


@click.group('dead')
def dead_command() -> None:
    """List, show, replay or drop dead letters."""


@dead_command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only dead letters of this queue.')
@limit_option
@json_option
@click.pass_context
def list_dead(ctx: click.Context, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the oldest of each queue first."""
    _print_list(jobs_of(ctx), JobFilter(['dead'], queue), limit, as_json, 'There are no dead letters.')


@dead_command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_dead(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a dead letter with its decoded message.

    ID is the id of the task or of the document, or its first characters.
    """
    jobs = jobs_of(ctx)
    print_details(job_resource(jobs), _find_dead(jobs, [name]), as_json)


#: The options that select dead letters.
_dead_options = selection_options(
    'Select all dead letters of all queues.',
    click.option('--queue', '-Q', metavar='NAME', help='Select all dead letters of this queue.'),
)


@dead_command.command('replay')
@_dead_options
@click.pass_context
def replay_dead(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Put dead letters back at the end of their queues, as if they had never been delivered.

    ID is the id of a task or of a document, or its first characters. Stored results of these tasks are deleted, and the
    messages no longer expire.
    """
    jobs = jobs_of(ctx)

    def act(docs: Sequence[Document]) -> tuple[int, Mapping[str, str]]:
        replayed, refused = jobs.replay(docs)
        return len(replayed), refused

    change(ctx, 'Replay', _selected_dead(jobs, names, queue, every), act, 'replayed', yes=yes)


@dead_command.command('drop')
@_dead_options
@click.pass_context
def drop_dead(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Delete dead letters for good.

    ID is the id of a task or of a document, or its first characters.
    """
    jobs = jobs_of(ctx)
    selected = _selected_dead(jobs, names, queue, every)
    change(ctx, 'Drop', selected, lambda docs: (dead.drop(jobs.client, docs), {}), 'dropped', yes=yes)


def _find_dead(jobs: Jobs, names: Sequence[str]) -> list[Document]:
    found: dict[str, Document] = {}
    for name in names:
        full = resolve(jobs.client, name, dead=True)
        letters = [dead.as_letter(doc) for doc in find(jobs.client, full) if dead.is_letter(doc)]
        if not letters:
            raise click.ClickException(f'there is no dead letter {name!r}')
        found |= {doc['_id']: doc for doc in letters}
    return list(found.values())


def _selected_dead(jobs: Jobs, names: Sequence[str], queue: str | None, every: bool) -> Selection[Document]:
    """Return dead letters; *raises* `UsageError` unless one of names, a queue, and all is given."""
    if sum((bool(names), queue is not None, every)) != 1:
        raise click.UsageError('Name dead letters by id, or give --queue NAME, or --all.')
    named, now = _find_dead(jobs, names), jobs.client.clock.now()
    # Skip messages that become dead letters while this runs: otherwise a replayed message that fails again would be
    # replayed forever.
    letters = named or (doc for doc in dead.letters(jobs.client, queue) if not _failed_after(doc, now))
    total = len(named) or dead.count(jobs.client, queue)
    which = counted(total, 'dead letter') + (f' of queue {queue}' if queue else '')
    if len(named) == 1:
        which = f'dead letter {workitem.task_id(named[0]) or named[0]["_id"]}'
    return Selection(which, letters, total)


def _failed_after(doc: Document, date: float) -> bool:
    failed = doc.get('failed')
    return isinstance(failed, (int, float)) and failed > date
