"""The commands `celery couchdb failures` and `show`: list, show, retry and drop what failed; show one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from ..failures import EVERY, KINDS, Failure, FailureFilter, Failures, Kind
from ..resources.failures import failure_resource, group_resource
from ..resources.fields import ARGS, before
from ..resources.job_actions import new_arguments
from ..resources.resource import Selection, counted
from ..resources.task import find_task, task_resource
from .clients import failures_of
from .resource_commands import (
    Command,
    change,
    field_options,
    json_option,
    limit_option,
    print_details,
    print_list,
    selection_options,
    since_option,
)
from .tables import Age

_NAMES: Mapping[Kind, str] = {'failed': 'failed task', 'dead': 'dead letter'}


@click.group('failures')
def command() -> None:
    """List, show, retry or drop what failed: failed tasks, and dead letters.

    A task that raised an exception has a failed result. A message that no worker could process is a dead letter.
    """


def _filter_options(function: Command) -> Command:
    """Add the options that select failures to a command. It gets them as arguments, see `_filter`."""
    error = (
        'Only this type of exception (ValueError) or kind of reason (rejected); or with a colon the beginning of the '
        'error ("ValueError: no such").'
    )
    for decorate in (
        click.option('--kind', type=click.Choice(KINDS), help='Only failed tasks, or only dead letters.'),
        click.option('--args', metavar='TEXT', help=ARGS.hint),
        click.option('--before', metavar='TIME', type=Age(), help=before('failed').hint),
        since_option('Only what failed'),
        click.option('--error', metavar='TEXT', help=error),
        click.option('--task', metavar='NAME', help='Only failures of the task with this name.'),
        click.option('--queue', '-Q', metavar='NAME', help='Only failures of this queue.'),
    ):
        function = decorate(function)
    return function


def _filter(failures: Failures, options: Mapping[str, Any]) -> FailureFilter:
    kind: Kind | None = options['kind']
    since, until = (None if age is None else failures.now() - age for age in (options['age'], options['before']))
    return FailureFilter(kind, options['queue'], options['task'], options['error'], since, until, options['args'])


@command.command('list')
@_filter_options
@click.option('--group', 'grouped', is_flag=True, help='List groups of the same task and error, with their numbers.')
@limit_option
@json_option
@click.pass_context
def list_(ctx: click.Context, /, grouped: bool, limit: int, as_json: bool, **options: Any) -> None:
    """List failures, the newest first."""
    failures = failures_of(ctx)
    wanted = _filter(failures, options)
    if not grouped:
        resource = failure_resource(failures, failures.now())
        print_list(resource, failures.listing(wanted), as_json, empty='There are no failures.', limit=limit)
        return
    if any(given is not None for given in (wanted.queue, wanted.since, wanted.until, wanted.args)) or ':' in (
        wanted.error or ''
    ):
        raise click.UsageError('--group goes with --kind, --task and the type of the error only.')
    print_list(group_resource(), failures.groups(wanted), as_json, empty='There are no failures.', limit=limit)


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show all that is known of a failed task: message, error, traceback and dates.

    ID is the id of the task or of a document, or its first characters.
    """
    failures = failures_of(ctx)
    _show(failures, [failure.id for failure in failures.find([name])], as_json)


@click.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_command(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show all that is known of a task: where it is, its message, tries, result, traceback and dates.

    ID is the id of the task or of a document, or its first characters. With --json, the documents are printed, too.
    """
    _show(failures_of(ctx), [name], as_json)


def _show(failures: Failures, names: Sequence[str], as_json: bool) -> None:
    found = [find_task(failures, name) for name in dict.fromkeys(names)]
    print_details(task_resource(failures, failures.now()), found, as_json)


# -- changes

_options = selection_options('Select all failures, of which the other options may select some.', _filter_options)


@command.command('retry')
@_options
@click.option('--to', metavar='QUEUE', help='Send the tasks to this queue. Default: the one they were sent to.')
@field_options(new_arguments('Of one task only.'))
@click.pass_context
def retry(
    ctx: click.Context,
    /,
    to: str | None,
    new_args: list[Any] | None,
    new_kwargs: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Send failed tasks again, and put dead letters back into their queues.

    ID is the id of a task or of a document, or its first characters. A task keeps its id; its failed result goes, so
    that the new one can be stored. Dead letters wait at the end of their queues as if they had never been delivered,
    and do not expire any more. The arguments of failed tasks must be stored: set result_extended = True for the
    workers, or give them here. Only the tasks themselves are sent, and not what was to follow them in a chain or a
    chord.
    """
    if (new_args is not None or new_kwargs is not None) and len(options['names']) != 1:
        raise click.UsageError('Give one ID with --new-args and --new-kwargs.')

    def act(failures: Failures, part: Sequence[Failure]) -> tuple[list[Failure], Mapping[str, str]]:
        return failures.retry(part, queue=to, args=new_args, kwargs=new_kwargs)

    _change(ctx, 'Retry', 'retried', options, act)


@command.command('drop')
@_options
@click.pass_context
def drop(ctx: click.Context, /, **options: Any) -> None:
    """Delete failed results and dead letters for good.

    ID is the id of a task or of a document, or its first characters.
    """
    _change(ctx, 'Drop', 'dropped', options, Failures.drop)


def _change(
    ctx: click.Context,
    verb: str,
    done: str,
    options: Mapping[str, Any],
    act: Callable[[Failures, Sequence[Failure]], tuple[list[Failure], Mapping[str, str]]],
) -> None:
    """Change the failures that the options select by `act(failures, some of them)`."""
    failures = failures_of(ctx)
    selection = _selected(failures, options)

    def changed(part: Sequence[Failure]) -> tuple[int, Mapping[str, str]]:
        found, refused = act(failures, part)
        return len(found), refused

    change(ctx, verb, selection, changed, done, yes=options['yes'])


def _selected(failures: Failures, options: Mapping[str, Any]) -> Selection[Failure]:
    """Return failures; *raises* `UsageError` unless either ids are given, or others of the options."""
    wanted, names = _filter(failures, options), options['names']
    is_filtered = wanted != EVERY
    if bool(names) == (is_filtered or options['every']):
        raise click.UsageError('Name failures by id, or select them with --task, --error, --since …, or give --all.')
    if not names:
        total = failures.count(wanted)
        return Selection(counted(total, 'failure'), failures.listing(wanted), total)
    found = failures.find(names)
    which = f'{_NAMES[found[0].kind]} {found[0].id}' if len(found) == 1 else counted(len(found), 'failure')
    return Selection(which, found, len(found))
