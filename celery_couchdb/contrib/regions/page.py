"""The page of regions: what this region gave to the other ones, and the tasks among it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from starlette.responses import Response

from kombu_couchdb.contrib.regions.records import Records, outgoing

from ...resources.fields import Field
from ...web.tables import Table
from ...web.view import Action, ActionOutcome, Page, View
from ..parcels.page import SECONDS, act, parcel_actions, parcel_table
from . import database_of
from .cli import COLUMNS, NO_REGIONS, leader_of, problems


def _opened(view: View) -> Records:
    return Records(view.account.broker.beside(database_of(view.account.app) or ''))


def show(view: View) -> Response:
    """Show the regions and the tasks that were given to them. The databases of other regions are not read."""
    options = view.account.app.conf.broker_transport_options
    with closing(_opened(view)) as records:
        found = outgoing(records.client, options['region'], options['regions'])
        if view.wants_json:
            return view.json(found)
        tasks = parcel_table(
            view,
            'Tasks in other regions',
            records,
            records.listing(),
            'No task is on its way to another region, or there.',
            links={'ID': lambda row: view.link(f'/tasks/{row["id"]}')},
        )
    leader = leader_of(view.account.broker, options['region'])
    return view.render(
        'tables.html',
        hint='The databases of other regions are not read here: run "couchdb regions status".',
        numbers=(),
        remarks=[('bad', line) for line in problems(options['region'], leader, found)],
        tables=[Table.of('Regions', COLUMNS, found, lambda row: row['target'], empty=NO_REGIONS), tasks],
        seconds=SECONDS,
    )


def _cancel(view: View, targets: Sequence[str]) -> ActionOutcome:
    change = partial(Records.cancel, terminate='terminate' in view.form)
    return act(_opened, change, 'to be cancelled', view, targets)


_ACTIONS = parcel_actions(
    _opened, 'A task that the other region has not taken does not run. One that it has taken runs all the same.'
)
_CANCEL = Action(
    'cancel',
    'Cancel',
    _cancel,
    'Cancel {}?',
    'The workers of the other region remove or revoke the task, and its result becomes REVOKED.',
    tone='bad',
    fields=[Field('terminate', 'Terminate it if it is running', kind='check')],
)

page = Page(
    '/regions',
    'Regions',
    show,
    noun='task',
    actions=[*_ACTIONS, _CANCEL],
    applies=lambda app: database_of(app) is not None,
)
