"""The commands `celery couchdb failures` and `show`: list, show, retry and drop what failed; show one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from ..failures import EVERY, Failure, FailureFilter, Failures
from ..resources.failures import failure_resource, group_resource
from ..resources.resource import Selection, counted
from ..resources.task import TaskSources, find_task, task_resource
from .clients import failures_of, task_sources_of
from .resource_commands import (
    Command,
    change,
    json_option,
    limit_option,
    print_details,
    print_list,
    selection_options,
    since_option,
)
from .tables import Json


@click.group('failures')
def command() -> None:
    """List, show, retry or drop what failed.

    The message of a task that failed for good is kept for a week (the transport option keep_failed), and that of a
    message that no worker could process without end: both as dead letters.
    """


def _filter_options(function: Command) -> Command:
    """Add the options that select failures to a command. It gets them as arguments, see `_filter`."""
    error = (
        'Only this type of exception (ValueError) or other reason (rejected); or with a colon the beginning of the '
        'error ("ValueError: no such").'
    )
    for decorate in (
        since_option('Only what failed'),
        click.option('--error', metavar='TEXT', help=error),
        click.option('--task', metavar='NAME', help='Only failures of the task with this name.'),
        click.option('--queue', '-Q', metavar='NAME', help='Only failures of this queue.'),
    ):
        function = decorate(function)
    return function


def _filter(failures: Failures, options: Mapping[str, Any], args: str | None = None) -> FailureFilter:
    since = None if options['age'] is None else failures.now() - options['age']
    return FailureFilter(options['queue'], options['task'], options['error'], since, args=args)


@command.command('list')
@_filter_options
@click.option('--args', metavar='TEXT', help='Only tasks whose arguments, as Python shows them, contain this text.')
@click.option('--group', 'grouped', is_flag=True, help='List groups of the same task and error, with their numbers.')
@limit_option
@json_option
@click.pass_context
def list_(ctx: click.Context, /, args: str | None, grouped: bool, limit: int, as_json: bool, **options: Any) -> None:
    """List failures, the newest first."""
    failures = failures_of(ctx)
    wanted = _filter(failures, options, args)
    if not grouped:
        resource = failure_resource(failures, failures.now())
        print_list(resource, failures.listing(wanted), as_json, empty='There are no failures.', limit=limit)
        return
    if any(given is not None for given in (wanted.queue, wanted.since, wanted.args)) or ':' in (wanted.error or ''):
        raise click.UsageError('--group goes with --task and the type of the error only.')
    print_list(group_resource(), failures.groups(wanted), as_json, empty='There are no failures.', limit=limit)


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show all that is known of a failed task: message, error, traceback and dates.

    ID is the id of the task or of a document, or its first characters.
    """
    names = [failure.id for failure in failures_of(ctx).find([name])]
    _show(task_sources_of(ctx), names, as_json)


@click.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_command(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show all that is known of a task: where it is, its message, tries, result, traceback and dates.

    ID is the id of the task or of a document, or its first characters. With --json, the documents are printed, too.
    """
    _show(task_sources_of(ctx), [name], as_json)


def _show(sources: TaskSources, names: Sequence[str], as_json: bool) -> None:
    found = [find_task(sources, name) for name in dict.fromkeys(names)]
    print_details(task_resource(sources, sources.now()), found, as_json)


# -- changes

_options = selection_options('Select all failures, of which the other options may select some.', _filter_options)


@command.command('retry')
@_options
@click.option('--to', metavar='QUEUE', help='Send the tasks to this queue. Default: the one they were sent to.')
@click.option('--args', 'args', metavar='JSON', type=Json(list), help='The new positional arguments of one task.')
@click.option('--kwargs', metavar='JSON', type=Json(dict), help='The new keyword arguments of one task.')
@click.pass_context
def retry(
    ctx: click.Context,
    /,
    to: str | None,
    args: list[Any] | None,
    kwargs: dict[str, Any] | None,
    **options: Any,
) -> None:
    """Put the messages of failures back into their queues.

    ID is the id of a task or of a document, or its first characters. A message waits at the end of its queue as if it
    had never been delivered, and does not expire any more. A task keeps its id, and what follows it: the rest of its
    chain and the body of its chord run after it. Their failed results go, so that the new ones can be stored.
    """
    if (args is not None or kwargs is not None) and len(options['names']) != 1:
        raise click.UsageError('Give one ID with --args JSON and --kwargs.')

    def act(failures: Failures, part: Sequence[Failure]) -> tuple[list[Failure], Mapping[str, str]]:
        return failures.retry(part, queue=to, args=args, kwargs=kwargs)

    _change(ctx, 'Retry', 'retried', options, act)


@command.command('drop')
@_options
@click.pass_context
def drop(ctx: click.Context, /, **options: Any) -> None:
    """Delete the messages of failures for good. Results stay.

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
    which = f'{found[0].task or "message"} {found[0].id}' if len(found) == 1 else counted(len(found), 'failure')
    return Selection(which, found, len(found))
