"""The page of regions: what this region gave to the other ones, and the tasks among it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from starlette.responses import Response

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.regions import records
from kombu_couchdb.regions.region import RECORD, database
from kombu_couchdb.values import enumerated

from ..resources.resource import counted
from ..web.tables import Table
from ..web.view import Action, ActionOutcome, Field, Page, View
from .cli import LOCAL_COLUMNS, NO_REGIONS, NO_TASKS, OwnRegion, problems, record_resource

#: How often an open page reads again, in seconds: up to 10,000 records are counted for each region.
_SECONDS = 30

#: The maximum number of tasks that are shown, and of reasons why some were not changed.
_LIMIT, _MAX_REASONS = 200, 5


def _options(app: Any) -> dict[str, Any]:
    return app.conf.broker_transport_options or {}


@contextmanager
def _opening(view: View) -> Iterator[Client]:
    options = _options(view.account.app)
    client = view.account.broker.beside(database(options['regions'], options['region']))
    try:
        yield client
    finally:
        client.close()


def show(view: View) -> Response:
    """Show the regions and the tasks that were given to them. The databases of other regions are not read."""
    with _opening(view) as client:
        own = replace(OwnRegion.of(view.account.app), client=client, broker=view.account.broker)
        found = own.look()
        if view.wants_json:
            return view.json(found)
        docs, now = list(islice(records.listing(client), _LIMIT + 1)), client.clock.now()
    resource = record_resource(now)
    return view.render(
        'tables.html',
        hint='The databases of other regions are not read here: run "couchdb regions status".',
        numbers=(),
        remarks=[('bad', line) for line in problems(own.name, found)],
        tables=[
            Table.of('Regions', LOCAL_COLUMNS, found, lambda row: row['name'], empty=NO_REGIONS),
            Table.of(
                'Tasks in other regions',
                resource.columns,
                resource.summary(docs[:_LIMIT]),
                lambda row: row['record'],
                links={'ID': lambda row: view.link(f'/tasks/{row["id"]}')},
                selectable=view.may_act,
                empty=NO_TASKS,
                more=f'These are the first {_LIMIT}; there are more.' if len(docs) > _LIMIT else '',
            ),
        ],
        seconds=_SECONDS,
    )


# -- actions


def _act(
    change: Callable[[View, Client, Sequence[Document]], tuple[int, Mapping[str, str]]],
    done: str,
    view: View,
    targets: Sequence[str],
) -> ActionOutcome:
    """Change the records with these document ids."""
    with _opening(view) as client:
        ids = [target for target in targets if target.startswith(RECORD)]
        docs = [doc for doc in client.find(ids) if doc] if ids else []
        count, reasons = change(view, client, docs)
    some = [f'{name}: {reason}' for name, reason in reasons.items()]
    text = f'{counted(count, "task")} {done}'
    return ActionOutcome(f'{text}{"; " if some else ""}{enumerated(some, _MAX_REASONS)}.', 'bad' if some else 'good')


def _cancel(view: View, client: Client, docs: Sequence[Document]) -> tuple[int, Mapping[str, str]]:
    return records.cancel_all(client, docs, terminate='terminate' in view.form)


_ACTIONS = (
    Action('replay', 'Replay', partial(_act, lambda view, client, docs: records.replay(client, docs), 'replayed')),
    Action(
        'cancel',
        'Cancel',
        partial(_act, _cancel, 'to be cancelled'),
        'Cancel {}?',
        'The workers of the other region remove or revoke the task, and its result becomes REVOKED.',
        tone='bad',
        fields=[Field('terminate', 'Terminate it if it is running', kind='check')],
    ),
    Action(
        'drop',
        'Drop',
        partial(_act, lambda view, client, docs: (records.drop(client, docs), {}), 'dropped'),
        'Drop {}?',
        'A task that the other region has not taken does not run. One that it has taken runs all the same.',
        tone='bad',
    ),
)

page = Page(
    '/regions',
    'Regions',
    show,
    noun='task',
    actions=_ACTIONS,
    applies=lambda app: bool(_options(app).get('region') and _options(app).get('regions')),
)
