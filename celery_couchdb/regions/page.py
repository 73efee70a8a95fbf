"""The page of regions: what this region gave to the other ones, and the tasks among it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from starlette.responses import Response

from kombu_couchdb.regions.records import Records

from ..parcels.page import SECONDS, acting, parcel_actions, parcel_table
from ..web.tables import Table
from ..web.view import Action, Field, Page, View
from .cli import COLUMNS, NO_REGIONS, OwnRegion, database_of, problems, record_resource


@contextmanager
def _opened(view: View) -> Iterator[Records]:
    client = view.account.broker.beside(database_of(view.account.app) or '')
    try:
        yield Records(client)
    finally:
        client.close()


def show(view: View) -> Response:
    """Show the regions and the tasks that were given to them. The databases of other regions are not read."""
    with _opened(view) as records:
        own = replace(OwnRegion.of(view.account.app), client=records.client, broker=view.account.broker)
        found = own.look()
        if view.wants_json:
            return view.json(found)
        tasks = parcel_table(
            view,
            'Tasks in other regions',
            record_resource(records),
            records.listing(),
            'No task is on its way to another region, or there.',
            links={'ID': lambda row: view.link(f'/tasks/{row["id"]}')},
        )
    return view.render(
        'tables.html',
        hint='The databases of other regions are not read here: run "couchdb regions status".',
        numbers=(),
        remarks=[('bad', line) for line in problems(own.name, found)],
        tables=[Table.of('Regions', COLUMNS[:-3], found, lambda row: row['name'], empty=NO_REGIONS), tasks],
        seconds=SECONDS,
    )


_CANCEL = Action(
    'cancel',
    'Cancel',
    acting(
        _opened,
        'to be cancelled',
        lambda view, records, docs: records.cancel(docs, terminate='terminate' in view.form),
    ),
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
    actions=(
        *parcel_actions(
            _opened,
            'A task that the other region has not taken does not run. One that it has taken runs all the same.',
        ),
        _CANCEL,
    ),
    applies=lambda app: database_of(app) is not None,
)
