"""The resource of beat's entries: their descriptions and columns, and whether a beat runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery.states import PROPAGATE_STATES, READY_STATES

from kombu_couchdb.admin.status import leaders

from ...resources.columns import NO_VALUE, Cell, Column, Row, Tone, format_date, format_duration
from ...resources.resource import Resource
from .stored_schedules import Item, Schedules
from .words import in_words

#: The due dates in the description of an entry in a list, and in that of one entry.
LISTED_DATES, SHOWN_DATES = 3, 5

_UNKNOWN = 'the app does not know this task: it is not imported here, or the name is wrong'

#: A function that returns the states of results by the ids of their tasks.
States = Callable[[Sequence[str]], Mapping[str, str]]

#: The members of a document that are shown as they are.
_MEMBERS = ('schedule', 'args', 'kwargs', 'options', 'missed', 'grace', 'start', 'until', 'times')


def schedule_resource(
    schedules: Schedules, dates: int = LISTED_DATES, *, states: States = lambda task_ids: {}
) -> Resource[Item]:
    """Return the resource of entries, each with so many of its next due dates; the summary has the first one.

    `states` returns the states of the results of tasks by id, for the last task of each entry.
    """
    now = schedules.client.clock.now()
    columns = [
        Column('NAME', 'name', min_width=10),
        Column('TASK', 'task', min_width=10),
        Column('RULE', 'rule', min_width=10),
        Column('NEXT', 'next', _dates),
        Column('LAST SENT', 'sent', format_date),
        Column('RESULT', 'result', _result_cell, min_width=8),
        Column('SENT', 'count', lambda count: f'{count:,}', right=True),
        Column('STATE', None, _state_cell, min_width=10),
    ]
    return Resource(
        lambda items: _describe_all(schedules, items, now, dates, states),
        columns,
        summarize=lambda items: _describe_all(schedules, items, now, 1, states),
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


def _describe_all(schedules: Schedules, items: Sequence[Item], now: float, count: int, states: States) -> list[Row]:
    task_ids = [task_id for item in items if (task_id := _last_task(item))]
    results = states(task_ids) if task_ids else {}
    return [_described(schedules, item, now, count, results.get(_last_task(item) or '')) for item in items]


def _last_task(item: Item) -> str | None:
    return item.state['task_id'] if item.state else None


def _described(schedules: Schedules, item: Item, now: float, count: int, result: str | None) -> Row:
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
        'edited': item.entry.edited,
        'next': item.upcoming(now, count),
        'last': state and state['last'],
        'sent': state and state['sent'],
        'task_id': _last_task(item),
        'result': result,
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
    text = entry['state'] + (', not as in the code' if entry['edited'] else '')
    if entry['state'] == 'active' and not entry['known']:
        return Cell(f'{text}, but {_UNKNOWN}', 'warning')
    return Cell(text, '' if entry['state'] == 'active' else 'dim')


def _result_cell(state: str | None) -> Cell:
    if state is None:
        return Cell(NO_VALUE, 'dim')
    return Cell(state, 'bad' if state in PROPAGATE_STATES else 'good' if state in READY_STATES else '')


def _dates(dates: Iterable[Any]) -> str:
    return ', '.join(map(format_date, dates)) or NO_VALUE


def _details(entry: Row) -> Row:
    shown = {**entry, 'state': _state_cell({**entry, 'error': None}).text, 'next': _dates(entry['next'])}
    del shown['known']
    shown |= {name: format_date(shown[name]) for name in ('last', 'sent', 'start', 'until') if name in shown}
    return {name: NO_VALUE if value is None else value for name, value in shown.items()}


class EntryAction(NamedTuple):
    """Something that people do to some entries, with a command and on the page."""

    name: str
    title: str
    #: Does it to the entry of a name; what was done then, in which `{0}` is what this returns.
    act: Callable[[Schedules, str], Any]
    done: str
    consequence: str
    #: The question on the page before it; '' to ask nothing. The command asks if the tone is `bad`.
    question: str = ''
    tone: Tone = ''

    def do(self, schedules: Schedules, name: str) -> str:
        """Do it to the entry of a name, and return what was done; *raises* what the method of `Schedules` raises."""
        return self.done.format(self.act(schedules, name))


_NO_PAST = 'Nothing is sent for the time in which they were disabled.'
_DISABLED = 'Nothing is sent until somebody enables it again.'
_RESET = 'What the code of the app says replaces all edits.'
_DELETED = 'Nothing more is sent. A schedule in the code of the app can only be disabled.'

ACTIONS = (
    EntryAction('run', 'Run now', Schedules.run, 'sent as {0.id}', 'The tasks are sent once; no due date changes.'),
    EntryAction('enable', 'Enable', Schedules.enable, 'enabled', _NO_PAST),
    EntryAction('disable', 'Disable', Schedules.disable, 'disabled', _DISABLED, 'Disable {}?'),
    EntryAction('reset', 'Reset', Schedules.reset, 'as in the code', _RESET, 'Reset {}?'),
    EntryAction('delete', 'Delete', Schedules.delete, 'deleted', _DELETED, 'Delete {}?', 'bad'),
)
