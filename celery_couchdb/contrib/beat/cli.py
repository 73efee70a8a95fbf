"""The commands `celery couchdb schedule`: the entries of beat."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ...cli.clients import app_of, broker_of, jobs_of
from ...cli.resource_commands import field_options, json_option, print_details, print_list, yes_option
from ...cli.tables import confirm, echo
from ...resources.jobs import stored_states
from ...resources.resource import Resource, counted
from .inputs import FIELDS, KINDS, members_of
from .resource import ACTIONS, LISTED_DATES, SHOWN_DATES, EntryAction, no_beat, schedule_resource
from .stored_schedules import Item, Schedules


@click.group('schedule')
def command() -> None:
    """Show and change what beat sends periodically.

    Beat is "celery beat -S couchdb". Changes act within a second. Entries in the code of the app
    (beat_schedule) are listed, too. An operator's change of such an entry stays until the entry is changed in the code.
    """


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
@field_options(FIELDS)
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
@field_options(FIELDS)
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


def _command(action: EntryAction) -> click.Command:
    """Return the command of an action for entries; it asks before it destroys something."""
    asks = action.tone == 'bad'

    def do(ctx: click.Context, names: tuple[str, ...], yes: bool = True) -> None:
        schedules = _schedules(ctx)
        if asks:  # nothing is deleted if one of the names is wrong
            for name in names:
                schedules.get(name)
        if not yes:
            confirm(f'{action.title} {names[0] if len(names) == 1 else counted(len(names), "entry", "entries")}?')
        for name in names:
            echo(f'{name}: {action.do(schedules, name)}')

    function = click.argument('names', metavar='NAME…', nargs=-1, required=True)(click.pass_context(do))
    summary = f'{action.title} some entries.'
    return click.command(action.name, help=f'{summary} {action.consequence}', short_help=summary)(
        yes_option(function) if asks else function
    )


for action in ACTIONS:
    command.add_command(_command(action))


def _resource(ctx: click.Context, schedules: Schedules, dates: int = LISTED_DATES) -> Resource[Item]:
    return schedule_resource(schedules, dates, states=partial(stored_states, jobs_of(ctx)))


def _show(ctx: click.Context, schedules: Schedules, name: str, as_json: bool) -> None:
    print_details(_resource(ctx, schedules, SHOWN_DATES), [schedules.get(name)], as_json)
    _warn(schedules, as_json)


def _warn(schedules: Schedules, as_json: bool) -> None:
    """Say to a reader if no beat runs."""
    if not as_json and (sentence := no_beat(schedules)):
        echo(sentence, err=True)
