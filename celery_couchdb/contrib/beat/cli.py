"""The commands `celery couchdb schedule`: the entries of beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import click

from ...cli.clients import app_of, broker_of, jobs_of
from ...cli.resource_commands import json_option, print_details, print_list, yes_option
from ...cli.tables import Duration, Json, confirm, echo
from ...resources.jobs import stored_states
from ...resources.resource import Resource, counted
from .entries import DEFAULT_GRACE_SECONDS, MISSED
from .inputs import KINDS, members_of
from .resource import LISTED_DATES, SHOWN_DATES, no_beat, schedule_resource
from .stored_schedules import Item, Schedules

F = TypeVar('F', bound=Callable[..., Any])


@click.group('schedule')
def command() -> None:
    """Show and change what beat sends periodically.

    Beat is "celery beat -S couchdb". Changes act within a second. Entries in the code of the app
    (beat_schedule) are listed, too. An operator's change of such an entry stays until the entry is changed in the code.
    """


def _members(function: F) -> F:
    """Add the options for the members of an entry."""
    for option in reversed(
        [
            click.option('--every', type=Duration(), metavar='SECONDS', help='An interval: 30, 15m, 1h or 1d.'),
            click.option('--crontab', help='Minute, hour, day, month and weekday, such as "30 3 * * mon-fri".'),
            click.option('--at', help='One date, such as 2027-01-01T09:00.'),
            click.option('--solar', help='An event of the sun and a place, such as "sunset 48.1 11.6".'),
            click.option('--timezone', help="Of --crontab and --at; without it, the app's time zone."),
            click.option('--start', help='Nothing is due until this date, and intervals count from it. Default: now.'),
            click.option('--until', help='Nothing is due after this date.'),
            click.option('--times', type=click.IntRange(1), help='How many due dates are sent at most.'),
            click.option('--args', type=Json(list), metavar='JSON', help='Arguments, a JSON list.'),
            click.option('--kwargs', type=Json(dict), metavar='JSON', help='Named arguments, a JSON object.'),
            click.option('--options', type=Json(dict), metavar='JSON', help='Options of apply_async, a JSON object.'),
            click.option(
                '--missed',
                type=click.Choice(MISSED),
                help='What to send if no beat ran for longer than --grace: the latest due date, or none.',
            ),
            click.option(
                '--grace',
                type=Duration(),
                metavar='SECONDS',
                help=f'After a shorter interruption everything is sent. Default: {DEFAULT_GRACE_SECONDS:.0f}.',
            ),
        ]
    ):
        function = option(function)
    return function


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the members of an entry for the given options."""
    try:
        return members_of(options)
    except ValueError as exc:
        raise click.UsageError(f'{exc}.') from exc


def _schedules(ctx: click.Context) -> Schedules:
    return Schedules(app_of(ctx), broker_of(app_of(ctx)))


@command.command('list')
@json_option
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """List the entries with their rules and next due dates.

    The last line tells if no beat runs.
    """
    schedules = _schedules(ctx)
    empty = 'There is no schedule: add one, or start "celery beat -S couchdb" to store those in the code of the app.'
    items = schedules.list()
    print_list(_resource(ctx, schedules), items, as_json, empty=empty)
    if items:
        _warn(schedules, as_json)


@command.command('show')
@click.argument('name')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show an entry with its state and its next due dates."""
    _show(ctx, _schedules(ctx), name, as_json)


@command.command('add')
@click.argument('name')
@click.argument('task')
@_members
@click.option('--disabled', is_flag=True, help='Do not send anything until the entry is enabled.')
@click.pass_context
def add_(ctx: click.Context, /, name: str, task: str, disabled: bool, **options: Any) -> None:
    """Add an entry: --every, --crontab, --at or --solar."""
    members = _given(options)
    if 'schedule' not in members:
        raise click.UsageError('give one of --every, --crontab, --at and --solar')
    schedules = _schedules(ctx)
    schedules.add(name, task, enabled=not disabled, **members)
    _show(ctx, schedules, name, False)


@command.command('edit')
@click.argument('name')
@click.option('--task', help='The name of the task.')
@_members
@click.pass_context
def edit_(ctx: click.Context, /, name: str, **options: Any) -> None:
    """Change an entry. Everything that you do not give stays as it is, also the time zone."""
    if all(value is None for value in options.values()):
        raise click.UsageError('give at least one option: there is nothing to change')
    schedules = _schedules(ctx)
    former = schedules.get(name).entry.doc.get('schedule')
    former = former if isinstance(former, dict) else {}
    if options['timezone'] is not None and not any(options[kind] for kind in KINDS):
        options |= {kind: former[kind] for kind in ('crontab', 'at') if kind in former}
    members = _given(options)
    schedule = members.get('schedule', {})
    if schedule.keys() & {'crontab', 'at'} and 'timezone' in former:
        schedule.setdefault('timezone', former['timezone'])
    schedules.edit(name, **members)
    _show(ctx, schedules, name, False)


@command.command('enable')
@click.argument('names', metavar='NAME…', nargs=-1, required=True)
@click.pass_context
def enable_(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Enable entries. Nothing is sent for the time in which they were disabled."""
    _for_each(names, _schedules(ctx).enable, 'enabled')


@command.command('disable')
@click.argument('names', metavar='NAME…', nargs=-1, required=True)
@click.pass_context
def disable_(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Disable entries: nothing is sent until they are enabled."""
    _for_each(names, _schedules(ctx).disable, 'disabled')


@command.command('reset')
@click.argument('names', metavar='NAME…', nargs=-1, required=True)
@click.pass_context
def reset_(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Return entries to what the code of the app says.

    That is its beat_schedule; what somebody has edited since is gone.
    """
    _for_each(names, _schedules(ctx).reset, 'as in the code')


@command.command('run')
@click.argument('names', metavar='NAME…', nargs=-1, required=True)
@click.pass_context
def run_(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Send the tasks of entries once, now. Their due dates do not change."""
    schedules = _schedules(ctx)
    for name in names:
        echo(f'{name}: sent {schedules.run(name).id}')


@command.command('delete')
@click.argument('names', metavar='NAME…', nargs=-1, required=True)
@yes_option
@click.pass_context
def delete_(ctx: click.Context, names: tuple[str, ...], yes: bool) -> None:
    """Delete entries. An entry in the code of the app can only be disabled."""
    schedules = _schedules(ctx)
    for name in names:
        schedules.get(name)
    if not yes:
        confirm(f'Delete {names[0] if len(names) == 1 else counted(len(names), "entry", "entries")}?')
    _for_each(names, schedules.delete, 'deleted')


def _for_each(names: Iterable[str], act: Callable[[str], Any], done: str) -> None:
    for name in names:
        act(name)
        echo(f'{name}: {done}')


def _resource(ctx: click.Context, schedules: Schedules, dates: int = LISTED_DATES) -> Resource[Item]:
    return schedule_resource(schedules, dates, states=partial(stored_states, jobs_of(ctx)))


def _show(ctx: click.Context, schedules: Schedules, name: str, as_json: bool) -> None:
    print_details(_resource(ctx, schedules, SHOWN_DATES), [schedules.get(name)], as_json)
    _warn(schedules, as_json)


def _warn(schedules: Schedules, as_json: bool) -> None:
    """Say to a reader if no beat runs."""
    if not as_json and (sentence := no_beat(schedules)):
        echo(sentence, err=True)
