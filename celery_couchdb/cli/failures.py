"""The commands `celery couchdb failures` and `show`: list, show, retry and drop what failed; show one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..resources.failure_actions import FAILURES, wanted_failures
from ..resources.failures import failure_resource, group_resource
from ..resources.task import TaskSources, find_task, task_resource
from .clients import failures_of, task_sources_of
from .resource_commands import (
    action_command,
    field_options,
    given,
    json_option,
    limit_option,
    print_details,
    print_list,
)


@click.group('failures')
def command() -> None:
    """List, show, retry or drop what failed.

    The message of a task that failed for good is kept for a week (the transport option keep_failed), and that of a
    message that no worker could process without end: both as dead letters.
    """


@command.command('list')
@field_options(FAILURES.filters)
@click.option('--group', 'grouped', is_flag=True, help='List groups of the same task and error, with their numbers.')
@limit_option
@json_option
@click.pass_context
def list_(ctx: click.Context, /, grouped: bool, limit: int, as_json: bool, **options: Any) -> None:
    """List failures, the newest first."""
    failures = failures_of(ctx)
    values = given(FAILURES.filters, options)
    wanted, empty, now = wanted_failures(failures, values), FAILURES.no_match(values), failures.now()
    if grouped:
        print_list(group_resource(now), failures.groups(wanted), as_json, empty=empty, limit=limit)
    else:
        print_list(failure_resource(failures, now), failures.listing(wanted), as_json, empty=empty, limit=limit)


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show all that is known of a failed task.

    That is its message, error, traceback and dates. ID is the id of the task or of a document, or its first characters.
    """
    names = [failure.id for failure in failures_of(ctx).find([name])]
    _show(task_sources_of(ctx), names, as_json)


@click.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_command(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show all that is known of a task.

    That is where it is, its message, tries, result, traceback and dates. ID is the id of the task or of a document, or
    its first characters. With --json, the documents are printed, too.
    """
    _show(task_sources_of(ctx), [name], as_json)


def _show(sources: TaskSources, names: Sequence[str], as_json: bool) -> None:
    found = [find_task(sources, name) for name in dict.fromkeys(names)]
    print_details(task_resource(sources, sources.now()), found, as_json)


for action in FAILURES.actions:
    command.add_command(action_command(FAILURES, action, failures_of))
