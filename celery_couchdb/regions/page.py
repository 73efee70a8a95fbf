"""The page of regions: what the own server knows of the other ones, and the parcels between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from kombu_couchdb.parcels.stored_parcels import STATES, Parcels
from kombu_couchdb.regions.region import REGIONS, database

from ..parcels.page import actions, first, parcel_table
from ..web.tables import Table
from ..web.view import Page, View
from .cli import LOCAL_COLUMNS, NO_REGIONS, OwnRegion, described, hides_states, look_here, remarks

#: How often an open page reads again, in seconds: the replications and the parcels of each region take some requests.
_SECONDS = 30


def _options(app: Any) -> dict[str, Any]:
    return app.conf.broker_transport_options or {}


@contextmanager
def _opening(view: View) -> Iterator[Parcels]:
    options = _options(view.account.app)
    client = view.account.broker.beside(database(options['regions'], options['region']))
    try:
        yield Parcels(client, REGIONS, 'traffic')
    finally:
        client.close()


def show(view: View) -> Response:
    """Show the regions, and the parcels that wait or were refused. The servers of other regions are not asked."""
    app = view.account.app
    with _opening(view) as parcels:
        found = look_here(app, replace(OwnRegion.of(app), client=parcels.client))
        if view.wants_json:
            return view.json(described(found))
        docs, now = first(view, parcels, *STATES[:2]), parcels.client.clock.now()
    hint = 'The servers of other regions are not asked here: run "couchdb regions status".'
    if hides_states(found):
        hint = f'Only administrators of CouchDB can read the states of replications. {hint}'
    return view.render(
        'tables.html',
        hint=hint,
        numbers=(),
        remarks=[('bad', line) for line in remarks(found)],
        tables=[
            Table.of('Regions', LOCAL_COLUMNS, found, lambda row: row['name'], empty=NO_REGIONS),
            parcel_table(view, docs, now, 'Parcels between regions', 'No parcel waits, and none was refused.'),
        ],
        seconds=_SECONDS,
    )


page = Page(
    '/regions',
    'Regions',
    show,
    noun='parcel',
    actions=actions(_opening),
    applies=lambda app: bool(_options(app).get('region') and _options(app).get('regions')),
)
