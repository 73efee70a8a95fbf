"""The page of parcels: those that wait, those that were refused, with the reason, and receipts.

The parameter `device` names the device whose database it shows instead of the database of parcels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.contrib.parcels.stored_parcels import Changed, Parcels
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.values import enumerated

from ...resources.resource import counted
from ...web.tables import Table
from ...web.view import Action, ActionOutcome, Page, View
from .cli import database_of, databases_of, parcel_resource

#: The maximum number of parcels that are shown, and of reasons why some were not changed.
_LIMIT, _MAX_REASONS = 200, 5

#: The members of a document that are shown if arguments and results are not.
_WITHOUT_ARGUMENTS = frozenset(
    ('_id', 'type', 'task', 'id', 'status', 'state', 'reason', 'error', 'published', 'failed', 'moved', 'done')
)

#: How often an open page reads again, in seconds: CouchDB reads all documents for it.
SECONDS = 30

#: The maximum number of devices that can be chosen by a button.
_MAX_DEVICES = 30

#: Returns the parcels that a page shows, as the user of the request reads them. They are closed then.
Open = Callable[[View], Any]


# -- parts of each page of stored parcels


def parcel_table(view: View, caption: str, stored: Parcels, docs: Iterator[Document], empty: str, **more: Any) -> Table:
    """Return a table of the first of these documents."""
    resource, shown = parcel_resource(stored), list(islice(docs, _LIMIT))
    if next(docs, None) is not None:
        more['more'] = f'These are the first {_LIMIT}; there are more.'
    return Table.of(
        caption,
        resource.columns,
        resource.summary(shown),
        lambda row: row['document']['_id'],
        selectable=view.may_act,
        empty=empty,
        **more,
    )


def act(
    opened: Open,
    change: Callable[[Any, Sequence[Document]], Changed],
    done: str,
    view: View,
    targets: Sequence[str],
) -> ActionOutcome:
    """Change documents by `change`, so that they are `done`."""
    with closing(opened(view)) as stored:
        count, reasons = change(stored, list(stored.read(targets)))
    some = enumerated([f'{name}: {reason}' for name, reason in reasons.items()], _MAX_REASONS)
    text = f'{counted(count, stored.noun)} {done}'
    return ActionOutcome(f'{text}; {some}.' if some else f'{text}.', 'bad' if some else 'good')


def parcel_actions(opened: Open, consequence: str) -> tuple[Action, Action]:
    """Return the actions for stored parcels: replay, and drop, with its consequence."""
    replay = partial(act, opened, Parcels.replay, 'replayed')
    drop = partial(act, opened, Parcels.drop, 'dropped')
    return Action('replay', 'Replay', replay), Action('drop', 'Drop', drop, 'Drop {}?', consequence, tone='bad')


# -- the page of parcels


def _device(view: View) -> str:
    """Return the name of the device in the URL of the page, or in that of the page whose form was sent."""
    return view.param('device') or parse_qs(view.form.get('query', '')).get('device', [''])[0]


def _databases(view: View) -> dict[str, str]:
    return databases_of(view.account.app, view.account.broker)


def _opened(view: View) -> Parcels:
    database = _databases(view).get(_device(view))
    if database is None:
        raise HTTPException(404, f'There is no device {_device(view)!r}.')
    return Parcels(view.account.broker.beside(database))


def show(view: View) -> Response:
    """Show the parcels in one state; without the parameter `state`, those that wait or were refused."""
    states, chosen = [*Parcels.states], view.param('state')
    wanted = [chosen] if chosen in states else states if view.wants_json else states[:2]
    with closing(_opened(view)) as stored:
        docs = (_masked(doc) if view.site.mask_args else doc for doc in stored.listing(*wanted))
        if view.wants_json:
            return view.json(list(parcel_resource(stored).describe([*islice(docs, _LIMIT)])))
        empty = f'No parcel is in the state {chosen}.' if len(wanted) == 1 else 'No parcel waits, and none was refused.'
        table = parcel_table(view, 'Parcels', stored, docs, empty)
    return view.render(
        'tables.html',
        hint='',
        numbers=(),
        remarks=(),
        tables=[table],
        choices=_choices(view, chosen if len(wanted) == 1 else ''),
        seconds=SECONDS,
    )


def _masked(doc: Document) -> Document:
    return {name: value for name, value in doc.items() if name in _WITHOUT_ARGUMENTS}


def _choices(view: View, chosen: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the title, the link and whether it is chosen, for each choice of states and of devices."""
    device, link = _device(view), partial(view.link, page.path)
    for title, state in [('Waiting and refused', ''), ('Refused', 'refused'), ('Moved', 'moved'), ('Done', 'done')]:
        yield title, link(state=state, device=device), state == chosen
    names = list(_databases(view))[: 1 + _MAX_DEVICES]
    for name in names if len(names) > 1 else ():
        yield f'Device {name}' if name else 'Database of parcels', link(state=chosen, device=name), name == device


page = Page(
    '/parcels',
    'Parcels',
    show,
    noun='parcel',
    actions=parcel_actions(
        _opened,
        'The documents are deleted for good, in all replicas of the database. The task of a parcel that waits does not '
        'run; that of a moved one does.',
    ),
    applies=lambda app: database_of(app) is not None,
)
