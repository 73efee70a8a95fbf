"""The commands `celery couchdb parcels`: parcels that wait or were refused, and receipts."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kombu_couchdb import design
from kombu_couchdb.admin.parcels import STATES, Parcels, state_of
from kombu_couchdb.couchdb.client import Document

from .databases import app_of, parcels_of, regions_of
from .selection import print_dropped, print_replayed, selection_options
from .tables import (
    NO_VALUE,
    Cell,
    Column,
    confirm,
    echo,
    echo_styled,
    format_duration,
    json_line,
    print_list,
)

__all__ = ['command']

#: The key under which click keeps the option of the group for its commands.
_BETWEEN_REGIONS = f'{__name__}.between_regions'

#: The maximum length of a result in a table, in characters.
_MAX_DETAIL_CHARACTERS = 200

_COLUMNS = [
    Column('ID', min_width=12),
    Column('TASK', min_width=10),
    Column('STATE'),
    Column('SINCE', right=True),
    Column('', min_width=20),
]

#: The member with the date of a document, and its colour, by state.
_DATES = {'waiting': 'published', 'refused': 'failed', 'moved': 'moved', 'done': 'done'}
_COLOURS = {'waiting': 'yellow', 'refused': 'red', 'moved': 'cyan', 'done': 'green'}


@click.group('parcels')
@click.option('--regions', 'between_regions', is_flag=True, help='Use the database of regions instead.')
@click.pass_context
def command(ctx: click.Context, between_regions: bool) -> None:
    """List, show, replay or drop parcels.

    Publishers without rights on the broker write parcels into the database of parcels. The database of regions has
    those on their way between regions: replay a refused one in the region to which it was sent.
    """
    ctx.meta[_BETWEEN_REGIONS] = between_regions


@command.command('list')
@click.option(
    '--state',
    '-s',
    'states',
    multiple=True,
    type=click.Choice(STATES),
    help='List only these: waiting to be moved, refused, moved and not yet done, or done. Can be given several times.',
)
@click.option('--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The maximum to list.')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one object per line.')
@click.pass_context
def list_(ctx: click.Context, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List parcels that wait, refused ones with the reason, and receipts with what the tasks returned."""
    parcels = _parcels(ctx)
    now = parcels.client.clock.now()
    print_list(
        parcels.listing(*(states or STATES)),
        limit,
        (lambda docs: ({'state': state_of(doc), 'document': doc} for doc in docs)) if as_json else None,
        _COLUMNS,
        lambda docs: [_row(doc, now) for doc in docs],
        empty='There are no parcels.',
        more=lambda: f'There are more than these {limit} (--limit).',
    )


@command.command('show')
@click.argument('name', metavar='ID')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON in one line.')
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show the document of a parcel or of a receipt.

    ID is the id of the document, or its first characters.
    """
    doc = _find(_parcels(ctx), name)
    if as_json:
        echo_styled(json_line({'state': state_of(doc), 'document': doc}))
        return
    for member, value in {'state of the parcel': state_of(doc), **doc}.items():
        echo(f'{member}: {value if isinstance(value, str) else json_line(value)}')


#: The options that select parcels.
_selection_options = selection_options('Select all refused parcels.')


@command.command('replay')
@_selection_options
@click.pass_context
def replay(ctx: click.Context, names: tuple[str, ...], every: bool, yes: bool) -> None:
    """Let refused parcels wait again, for example after parcels_accept was extended and workers were restarted.

    ID is the id of a document, or its first characters. A parcel that was moved before is not run again.
    """
    parcels = _parcels(ctx)
    docs = _selected(parcels, names, every, yes, 'Replay')
    print_replayed(ctx, *parcels.replay(docs))


@command.command('drop')
@_selection_options
@click.pass_context
def drop(ctx: click.Context, names: tuple[str, ...], every: bool, yes: bool) -> None:
    """Delete parcels or receipts. The task of a parcel that waits does not run; that of a moved one does.

    ID is the id of a document, or its first characters. Replicas of the database see the deletion, too.
    """
    parcels = _parcels(ctx)
    docs = _selected(parcels, names, every, yes, 'Drop')
    print_dropped(parcels.drop(docs), len(docs))


def _parcels(ctx: click.Context) -> Parcels:
    if ctx.meta[_BETWEEN_REGIONS]:
        return Parcels(regions_of(app_of(ctx)), design.REGIONS, 'traffic')
    client = parcels_of(app_of(ctx))
    if client is None:
        raise click.ClickException('the app has no database of parcels: set the transport option parcels to its name')
    return Parcels(client)


def _selected(parcels: Parcels, names: Sequence[str], every: bool, yes: bool, verb: str) -> list[Document]:
    """Return the selected documents, after a confirmation; *raises* `UsageError` without `names` or `every`."""
    if bool(names) == every:
        raise click.UsageError('Name parcels by id, or give --all for all refused ones.')
    docs = [_find(parcels, name) for name in names] if names else list(parcels.listing('refused'))
    docs = list({doc['_id']: doc for doc in docs}.values())
    if docs and not yes:
        which = f'parcel {docs[0]["_id"]}' if len(docs) == 1 else f'{len(docs):,} parcels'
        confirm(f'{verb} {which}?')
    return docs


def _find(parcels: Parcels, name: str) -> Document:
    found = parcels.find(name)
    if not found:
        raise click.ClickException(f'there is no parcel {name!r}')
    if len(found) > 1:
        raise click.ClickException(f'several ids begin with {name!r}: {", ".join(doc["_id"] for doc in found)}')
    return found[0]


def _row(doc: Document, now: float) -> list[Cell | str]:
    state = state_of(doc)
    date, task = doc.get(_DATES[state]), doc.get('task')
    return [
        doc['_id'],
        task if isinstance(task, str) else NO_VALUE,
        Cell(state, {'fg': _COLOURS[state]}),
        format_duration(now - date if isinstance(date, (int, float)) else None),
        _detail(doc, state)[:_MAX_DETAIL_CHARACTERS],
    ]


def _detail(doc: Document, state: str) -> str:
    """Return why a parcel was refused, or how its task ended."""
    if state == 'refused':
        return str(doc.get('reason', ''))
    if state != 'done':
        return ''
    if 'result' in doc:
        return f'{doc.get("state")}: {json_line(doc["result"])}'
    return f'{doc.get("state")}: {doc.get("error") or doc.get("left_out") or ""}'
