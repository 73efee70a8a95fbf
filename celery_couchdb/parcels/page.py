"""The page of parcels: those that wait, those that were refused, with the reason, and receipts.

The page of regions uses the same table and the same actions for the parcels between regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice

from starlette.responses import Response

from kombu_couchdb.couchdb.client import Document
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

#: A function that opens a database with parcels as the user of a request.
Opening = Callable[[View], AbstractContextManager[Parcels]]


def parcel_table(view: View, docs: Sequence[Document], now: float, caption: str, empty: str) -> Table:
    """Return the table of parcels."""
    resource = parcel_resource(now)
    return Table.of(
        caption,
        resource.columns,
        resource.summary(docs[:_LIMIT]),
        lambda row: row['document']['_id'],
        selectable=view.may_act,
        empty=empty,
        more=f'These are the first {_LIMIT}; there are more.' if len(docs) > _LIMIT else '',
    )


def first(view: View, parcels: Parcels, *states: str) -> list[Document]:
    """Return the first parcels in these states: one more than a page shows."""
    docs = list(islice(parcels.listing(*states), _LIMIT + 1))
    if view.site.mask_args:
        return [{name: value for name, value in doc.items() if name in _WITHOUT_ARGUMENTS} for doc in docs]
    return docs


def actions(opening: Opening) -> tuple[Action, ...]:
    """Return the actions for the parcels in a database."""

    def replay(view: View, targets: Sequence[str]) -> ActionOutcome:
        with opening(view) as parcels:
            count, reasons = parcels.replay(_named(parcels, targets))
        return _outcome(count, 'replayed', reasons)

    def drop(view: View, targets: Sequence[str]) -> ActionOutcome:
        with opening(view) as parcels:
            return _outcome(parcels.drop(_named(parcels, targets)), 'dropped', {})

    return (
        Action('replay', 'Replay', replay),
        Action(
            'drop',
            'Drop',
            drop,
            'Drop {}?',
            'The documents are deleted for good, in all replicas of the database. The task of a parcel that waits does '
            'not run; that of a moved one does.',
            tone='bad',
        ),
    )


def _named(parcels: Parcels, targets: Sequence[str]) -> list[Document]:
    """Return the documents with these ids. Others than parcels and receipts, such as design documents, are left out."""
    ids = [target for target in targets if target and not target.startswith('_')]
    return [doc for doc in parcels.client.find(ids) if doc] if ids else []


def _outcome(count: int, done: str, reasons: Mapping[str, str]) -> ActionOutcome:
    some = [f'{name}: {reason}' for name, reason in islice(reasons.items(), _MAX_REASONS)]
    text = '; '.join([f'{counted(count, "parcel")} {done}', *some])
    return ActionOutcome(f'{text}{" …" if len(reasons) > _MAX_REASONS else ""}.', 'bad' if reasons else 'good')


@contextmanager
def _opening(view: View) -> Iterator[Parcels]:
    client = view.account.broker.beside(database_of(view.account.app) or '')
    try:
        yield Parcels(client)
    finally:
        client.close()


def show(view: View) -> Response:
    """Show the parcels in one state; without the parameter `state`, those that wait or were refused."""
    chosen = view.param('state')
    states = (chosen,) if chosen in STATES else STATES if view.wants_json else STATES[:2]
    with _opening(view) as parcels:
        docs, now = first(view, parcels, *states), parcels.client.clock.now()
        if view.wants_json:
            return view.json(list(parcel_resource(now).describe(docs[:_LIMIT])))
        waiting, refused = parcels.count('waiting'), parcels.count('refused')
    empty = 'No parcel waits, and none was refused.' if len(states) > 1 else f'No parcel is in the state {chosen}.'
    return view.render(
        'tables.html',
        hint='',
        numbers=[
            ('Waiting', f'{waiting:,}', '' if waiting else 'dim'),
            ('Refused', f'{refused:,}', 'bad' if refused else 'dim'),
        ],
        remarks=(),
        tables=[parcel_table(view, docs, now, 'Parcels', empty)],
        choices=[
            ('Waiting and refused', view.link(page.path), len(states) > 1),
            *((state.capitalize(), view.link(page.path, state=state), state == chosen) for state in STATES[1:]),
        ],
    )


page = Page(
    '/parcels',
    'Parcels',
    show,
    noun='parcel',
    actions=actions(_opening),
    applies=lambda app: database_of(app) is not None,
)
