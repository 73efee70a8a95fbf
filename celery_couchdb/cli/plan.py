"""The command `celery -A app couchdb plan`: which plan of a managed CouchDB service suffices for a load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ..backend import CouchDBBackend
from ..connections import backend_of, has_our_broker
from ..plans import LITE, STANDARD, USABLE, Units, Workload, capacity, suffices
from ..resources.columns import Column, json_line, rate_cell
from .clients import app_of, options_of
from .resource_commands import json_option
from .tables import echo, echo_styled, format_table

_COLUMNS = [
    Column('units a second', 'name'),
    *(Column(name, name, rate_cell, right=True) for name in Units._fields),
]

#: The maximum of tasks per second, and of workers. No service has as many units.
_MOST = 10**9


@click.command('plan')
@click.option('--tasks-per-second', 'tasks', required=True, type=float, help='On average, when most are sent.')
@click.option(
    '--workers', default=1, show_default=True, type=click.IntRange(1, _MOST), help='Not counting their processes.'
)
@click.option('--results/--no-results', default=None, help='Whether results are stored.')
@click.option('--events/--no-events', default=None, help='Whether a monitor such as Flower receives events.')
@json_option
@click.pass_context
def command(
    ctx: click.Context, tasks: float, workers: int, results: bool | None, events: bool | None, as_json: bool
) -> None:
    """Tell which plan of IBM Cloudant suffices for a load.

    Other services have such limits, too. The command sends no request. What the options leave open is as in the app's
    settings: task_ignore_result, task_track_started, worker_send_task_events and the transport option keep_done.
    """
    if not 0 <= tasks <= _MOST:  # click's ranges accept nan
        raise click.BadParameter(f'it must be a number from 0 to {_MOST:,}.', param_hint='--tasks-per-second')
    load = _load(app_of(ctx), tasks, workers, results, events)
    parts, total = load.parts(), load.total()
    if as_json:
        found = {'parts': {name: units._asdict() for name, units in parts.items()}, 'total': total._asdict()}
        echo_styled(json_line({**found, 'lite': suffices(total, LITE), 'standard_units': capacity(total)}))
        return
    lines = {**parts, 'together': total, 'limits of Lite': LITE, 'limits of a capacity unit': STANDARD}
    echo_styled(format_table(_COLUMNS, [{'name': name, **units._asdict()} for name, units in lines.items()]))
    echo('')
    echo(f'{_plan(total)} This leaves {1 - USABLE:.0%} of its limits to seconds that need more than others.')
    scarce = total.scarce()
    most = max(parts, key=lambda name: float(getattr(parts[name], scarce)))
    echo(f'The {scarce} decide, and most of them are for: {most}.')
    for what, other in load.savings():
        less = {name: getattr(total, name) - getattr(other.total(), name) for name in Units._fields}
        saved = ', '.join(f'{number:.1f} {name}' for name, number in less.items() if number >= 0.05)
        if saved:
            echo(f'- {what}: saves {saved} a second.')


def _load(app: Any, tasks: float, workers: int, results: bool | None, events: bool | None) -> Workload:
    load = Workload(
        tasks,
        workers,
        results=isinstance(backend_of(app), CouchDBBackend) and not app.conf.task_ignore_result,
        started=bool(app.conf.task_track_started),
        events=bool(app.conf.worker_send_task_events),
        kept=has_our_broker(app) and bool(options_of(app).keep_done),
    )
    load = load if results is None else replace(load, results=results)
    return load if events is None else replace(load, events=events)


def _plan(total: Units) -> str:
    if suffices(total, LITE):
        return 'The plan Lite suffices.'
    units = capacity(total)
    return f'The plan Standard with {units:,} capacity {"unit" if units == 1 else "units"} suffices, Lite does not.'
