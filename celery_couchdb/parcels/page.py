"""The page of parcels: those that wait, those that were refused, with the reason, and receipts.

The parameter `device` names the device whose database it shows instead of the database of parcels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.parcels.devices import devices_of
from kombu_couchdb.parcels.stored_parcels import STATES, Parcels

from ..resources.resource import counted
from ..web.tables import Table
from ..web.view import Action, ActionOutcome, Page, View
from .cli import database_of, parcel_resource

#: The maximum number of parcels that are shown, and of reasons why some were not changed.
_LIMIT, _MAX_REASONS = 200, 5

#: The members of a document that are shown if arguments and results are not.
_WITHOUT_ARGUMENTS = frozenset(
    ('_id', 'type', 'task', 'id', 'status', 'state', 'reason', 'error', 'published', 'failed', 'moved', 'done')
)

#: How often an open page reads again, in seconds: CouchDB reads all documents for it.
_SECONDS = 30

#: The maximum number of devices that can be chosen by a button.
_MAX_DEVICES = 30


def _device(view: View) -> str | None:
    """Return the name of the device in the URL of the page, or in that of the page whose form was sent."""
    return view.param('device') or parse_qs(view.form.get('query', '')).get('device', [None])[0]


def _databases(view: View) -> dict[str, str]:
    return devices_of(view.account.broker, database_of(view.account.app) or '')


@contextmanager
def _opening(view: View) -> Iterator[Parcels]:
    """Open the database of parcels, or that of the device that is chosen, as the user of the request."""
    device, name = _device(view), database_of(view.account.app)
    if device:
        name = _databases(view).get(device)
    if name is None:
        raise HTTPException(404, f'There is no device {device!r}.')
    client = view.account.broker.beside(name)
    try:
        yield Parcels(client)
    finally:
        client.close()


def _replay(view: View, targets: Sequence[str]) -> ActionOutcome:
    with _opening(view) as parcels:
        count, reasons = parcels.replay(_named(parcels, targets))
    some = [f'{name}: {reason}' for name, reason in islice(reasons.items(), _MAX_REASONS)]
    text = '; '.join([f'{counted(count, "parcel")} replayed', *some])
    return ActionOutcome(f'{text}{" …" if len(reasons) > _MAX_REASONS else ""}.', 'bad' if reasons else 'good')


def _drop(view: View, targets: Sequence[str]) -> ActionOutcome:
    with _opening(view) as parcels:
        return ActionOutcome(f'{counted(parcels.drop(_named(parcels, targets)), "parcel")} dropped.')


def _named(parcels: Parcels, targets: Sequence[str]) -> list[Document]:
    """Return the documents with these ids. Others than parcels and receipts, such as design documents, are left out."""
    ids = [target for target in targets if target and not target.startswith('_')]
    return [doc for doc in parcels.client.find(ids) if doc] if ids else []


def show(view: View) -> Response:
    """Show the parcels in one state; without the parameter `state`, those that wait or were refused."""
    chosen = view.param('state')
    states = (chosen,) if chosen in STATES else STATES if view.wants_json else STATES[:2]
    with _opening(view) as parcels:
        waiting, refused = list(parcels.ids('waiting')), list(parcels.ids('refused'))
        known = {'waiting': waiting, 'refused': refused}
        ids = chain.from_iterable(known[state] if state in known else parcels.ids(state) for state in states)
        docs, now = list(parcels.read(islice(ids, _LIMIT + 1))), parcels.client.clock.now()
    if view.site.mask_args:
        docs = [{name: value for name, value in doc.items() if name in _WITHOUT_ARGUMENTS} for doc in docs]
    resource = parcel_resource(now)
    if view.wants_json:
        return view.json(list(resource.describe(docs[:_LIMIT])))
    empty = 'No parcel waits, and none was refused.' if len(states) > 1 else f'No parcel is in the state {chosen}.'
    table = Table.of(
        'Parcels',
        resource.columns,
        resource.summary(docs[:_LIMIT]),
        lambda row: row['document']['_id'],
        selectable=view.may_act,
        empty=empty,
        more=f'These are the first {_LIMIT}; there are more.' if len(docs) > _LIMIT else '',
    )
    return view.render(
        'tables.html',
        hint='',
        numbers=[
            ('Waiting', f'{len(waiting):,}', '' if waiting else 'dim'),
            ('Refused', f'{len(refused):,}', 'bad' if refused else 'dim'),
        ],
        remarks=(),
        tables=[table],
        choices=_choices(view, chosen if len(states) == 1 else ''),
        seconds=_SECONDS,
    )


def _choices(view: View, chosen: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the title, the link and whether it is chosen, for each choice of states and of devices."""
    device = _device(view)
    for title, state in [('Waiting and refused', ''), *((state.capitalize(), state) for state in STATES[1:])]:
        yield title, view.link(page.path, state=state, device=device), state == chosen
    names = list(_databases(view))[:_MAX_DEVICES]
    for title, name in [('Database of parcels', None), *((f'Device {name}', name) for name in names)] if names else ():
        yield title, view.link(page.path, state=chosen, device=name), name == device


page = Page(
    '/parcels',
    'Parcels',
    show,
    noun='parcel',
    actions=(
        Action('replay', 'Replay', _replay),
        Action(
            'drop',
            'Drop',
            _drop,
            'Drop {}?',
            'The documents are deleted for good, in all replicas of the database. The task of a parcel that waits does '
            'not run; that of a moved one does.',
            tone='bad',
        ),
    ),
    applies=lambda app: database_of(app) is not None,
)
