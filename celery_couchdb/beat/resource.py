"""The resource of beat's entries: their descriptions and columns, and whether a beat runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from kombu_couchdb.admin.status import leaders

from ..resources.columns import NO_VALUE, Cell, Column, Row, format_date, format_duration
from ..resources.resource import Resource
from .stored_schedules import Item, Schedules
from .words import in_words

#: The due dates in the description of an entry in a list, and in that of one entry.
LISTED_DATES, SHOWN_DATES = 3, 5

_UNKNOWN = 'the app does not know this task: it is not imported here, or the name is wrong'

#: The members of a document that are shown as they are.
_MEMBERS = ('schedule', 'args', 'kwargs', 'options', 'missed', 'grace', 'start')

_date = partial(format_date, zone=None, form='%Y-%m-%d %H:%M:%S %z')


def schedule_resource(schedules: Schedules, dates: int = LISTED_DATES) -> Resource[Item]:
    """Return the resource of entries, each with so many of its next due dates; the table has the first one."""
    now = schedules.client.clock.now()
    columns = [
        Column('NAME', 'name', min_width=10),
        Column('TASK', 'task', min_width=10),
        Column('RULE', 'rule', min_width=10),
        Column('NEXT', 'next', _dates),
        Column('LAST SENT', 'sent', _date),
        Column('SENT', 'count', lambda count: f'{count:,}', right=True),
        Column('STATE', None, _state_cell, min_width=10),
    ]
    return Resource(
        lambda items: [_described(schedules, item, now, dates) for item in items],
        columns,
        summarize=lambda items: [_described(schedules, item, now, 1) for item in items],
        details=_details,
    )


def no_beat(schedules: Schedules) -> str | None:
    """Return a sentence if no beat leads, so that nothing is sent; None if one does. One request."""
    leader = next((found for found in leaders(schedules.client) if found['duty'] == schedules.names.leader), None)
    if leader is not None and leader['alive']:
        return None
    ago = leader and leader['renewed']
    ran = '' if ago is None else f' One ran {format_duration(ago)} ago.'
    return f'No beat runs: start "celery -A your_app beat -S couchdb".{ran}'


def _described(schedules: Schedules, item: Item, now: float, count: int) -> Row:
    """Return an entry and its state as one dictionary. Dates are seconds since the epoch."""
    doc, state = item.entry.doc, item.state
    return {
        'name': item.name,
        'state': _state(item, now),
        'error': item.error,
        **({'task': doc['task']} if 'task' in doc else {}),
        'known': schedules.knows(doc.get('task')),
        'rule': in_words(doc.get('schedule'), item.entry.rule),
        **{member: doc[member] for member in _MEMBERS if member in doc},
        'source': doc.get('source', 'database'),
        'next': item.upcoming(now, count),
        'last': state and state['last'],
        'sent': state and state['sent'],
        'task_id': state and state['task_id'],
        'count': state['count'] if state else 0,
        'skipped': state['skipped'] if state else 0,
    }


def _state(item: Item, now: float) -> str:
    if item.entry.error is not None:
        return 'malformed'
    if item.entry.doc.get('removed'):
        return 'removed'
    if not item.entry.enabled:
        return 'disabled'
    return 'active' if item.upcoming(now) else 'done'


def _state_cell(entry: Row) -> Cell:
    if entry['error']:
        return Cell(f'{entry["state"]}: {entry["error"]}', 'bad')
    if entry['state'] == 'active' and not entry['known']:
        return Cell(f'active, but {_UNKNOWN}', 'warning')
    return Cell(entry['state'], '' if entry['state'] == 'active' else 'dim')


def _dates(dates: Iterable[Any]) -> str:
    return ', '.join(map(_date, dates)) or NO_VALUE


def _details(entry: Row) -> Row:
    shown = {**entry, 'state': _state_cell({**entry, 'error': None}).text, 'next': _dates(entry['next'])}
    del shown['known']
    shown |= {name: _date(shown[name]) for name in ('last', 'sent', 'start') if name in shown}
    return {name: NO_VALUE if value is None else value for name, value in shown.items()}
