"""The page of activity: who changed what with this page, when and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.responses import Response

from kombu_couchdb.values import is_number

from ... import audit
from ...resources.columns import NO_VALUE, Column, Row
from ..tables import Table
from ..view import Action, ActionOutcome, Page, View

#: The number of actions that are shown.
_LIMIT = 200


def _targets(row: Row) -> str:
    more = row['count'] - len(row['targets'])
    return ', '.join(map(str, row['targets'])) + (f' and {more:,} more' if is_number(more) and more > 0 else '')


def _changes(row: Row) -> str:
    """Return what was changed as words: `args: [1] → [7]`."""
    found = row.get('changes') or {}
    return '; '.join(
        f'{f"{target}: " if len(found) > 1 else ""}{member}: {former or NO_VALUE} → {new or NO_VALUE}'
        for target, changes in found.items()
        for member, (former, new) in changes.items()
    )


#: Where the only target of an action leads to, by a word of the action.
_PLACES: Mapping[str, Callable[[View, str], str]] = {
    'worker': lambda view, name: view.link('/workers', worker=name),
    'queue': lambda view, name: view.link('/jobs', queue=name),
    'schedule': lambda view, name: view.link('/schedules'),
    **dict.fromkeys(('job', 'failure', 'task'), lambda view, name: view.link(f'/tasks/{name}')),
}


def _about(view: View, row: Row) -> str | None:
    """Return the page of what an action was about, if that is one thing."""
    place = next((place for noun, place in _PLACES.items() if noun in row['action'].split()), None)
    # "all 3,000 failures (…)" is one target, too.
    is_one = row['count'] == 1 and row['targets'][:1] and not str(row['targets'][0]).startswith('all ')
    return place(view, row['targets'][0]) if place and is_one else None


_COLUMNS = [
    Column('WHEN', 'date'),
    Column('WHO', 'user'),
    Column('ACTION', 'action'),
    Column('TARGETS', None, _targets),
    Column('OUTCOME', 'outcome'),
    Column('CHANGES', None, _changes),
    Column('REASON', 'reason'),
]


def show(view: View) -> Response:
    """Show the newest actions first."""
    found = audit.newest(view.account.broker, _LIMIT)
    if view.site.mask_args:
        for changes in (changes for row in found for changes in (row.get('changes') or {}).values()):
            for member in ('args', 'kwargs'):
                changes.pop(member, None)
    if view.wants_json:
        return view.json(found)
    empty = 'Nobody has changed anything yet. What users do here, such as pausing a queue, is listed for 90 days.'
    table = Table.of(
        'Activity',
        _COLUMNS,
        found,
        lambda row: row['_id'],
        links={'TARGETS': lambda row: _about(view, row)},
        dates={'WHEN': lambda row: [row['date']]},
        empty=empty,
    )
    return view.render('activity.html', table=table)


def _stop(view: View, targets: Sequence[str]) -> ActionOutcome:
    titles = [view.site.operations.stop(name) for name in targets]
    texts = [f'{title}: this stops after what it does just now.' for title in titles if title]
    return ActionOutcome(' '.join(texts) or 'The action has ended already.', 'info')


page = Page('/activity', 'Activity', show, noun='action', actions=(Action('stop', 'Stop', _stop),))
