"""The page of schedules: what beat sends and when, how it ended the last time, and a form for entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from starlette.responses import Response

from kombu_couchdb.errors import CouchDBError

from ...jobs import Jobs
from ...resources.columns import Row, json_line
from ...resources.fields import SEEN, Field
from ...resources.inputs import choice
from ...resources.jobs import stored_states
from ...web.actions import each
from ...web.tables import Table
from ...web.view import Action, ActionOutcome, InputRefused, Page, View
from .entries import DEFAULT_GRACE_SECONDS, MISSED, is_date
from .inputs import FIELDS, KINDS, members_of, typed_rule
from .resource import ACTIONS, EntryAction, no_beat, schedule_resource
from .stored_schedules import Schedules

_EMPTY = 'There is no schedule: add one, or start "celery -A your_app beat -S couchdb" to store those of the code.'

#: What a field that was emptied means; the others: None.
_EMPTIED = {'task': '', 'args': [], 'kwargs': {}, 'options': {}, 'missed': MISSED[0], 'grace': DEFAULT_GRACE_SECONDS}


def show(view: View) -> Response:
    """Show all entries, and whether a beat runs."""
    schedules = _schedules(view)
    jobs = Jobs(view.site.app, view.account.broker, view.account.results)
    resource, items = schedule_resource(schedules, states=partial(stored_states, jobs)), schedules.list()
    rows = list(resource.describe(items))
    if view.site.mask_args:
        rows = [{name: value for name, value in row.items() if name not in ('args', 'kwargs')} for row in rows]
    if view.wants_json:
        return view.json(rows)
    table = Table.of(
        'Schedules',
        resource.columns,
        rows,
        lambda row: row['name'],
        links={**view.names(), 'RESULT': lambda row: view.link(f'/tasks/{row["task_id"]}') if row['result'] else None},
        dates={'NEXT': lambda row: row['next'], 'LAST SENT': _sent},
        selectable=view.may_act,
        empty=_EMPTY,
    )
    return view.render('schedules.html', table=table, problem=no_beat(schedules) if items else None)


def _schedules(view: View) -> Schedules:
    return Schedules(view.site.app, view.account.broker, records=False)


def _sent(row: Row) -> Sequence[float]:
    return [row['sent']] if row['sent'] is not None else []


# -- the form of an entry


def _fields(view: View, targets: Sequence[str]) -> list[Field]:
    """Return the fields of an entry: that with the name in `targets`, or a new one."""
    doc: Row = _schedules(view).get(targets[0]).entry.doc if targets else {}
    kind, rule, zone = typed_rule(doc.get('schedule'))
    texts = {member: json_line(value) for member, value in doc.items() if member != 'missed'}
    texts |= {name: rule if name == kind else '' for name in KINDS} | {'timezone': zone}
    texts |= {'missed': doc.get('missed', MISSED[0]), **{name: _date(view, doc, name) for name in ('start', 'until')}}
    tasks = sorted(name for name in view.site.app.tasks if not name.startswith('celery.'))
    shown = [field for field in FIELDS if not (view.site.mask_args and field.is_argument)]
    return [
        replace(SEEN, value=doc['_rev']) if targets else Field('name', 'Name'),
        Field('task', 'Task', str(doc.get('task', '')), options=tasks),
        Field('kind', 'Kind of rule', kind or KINDS[0], kind='select', options=KINDS),
        *(replace(field, value=texts.get(field.name, '')) for field in shown),
    ]


def _date(view: View, doc: Row, member: str) -> str:
    date = doc.get(member)
    return datetime.fromtimestamp(date, view.site.app.timezone).isoformat() if is_date(date) else ''


def _given(view: View, targets: Sequence[str]) -> dict[str, Any]:
    """Return the members of an entry that the user has changed in the form; *raises* `InputRefused`."""
    fields = {field.name: field for field in _fields(view, targets)}
    texts = {name: view.form.get(name, '').strip() for name in fields}
    changed = {name for name, field in fields.items() if texts[name] != (field.value if targets else '')}
    given = dict[str, Any]()
    try:
        if changed & {*KINDS, 'timezone'} or (targets and 'kind' in changed):
            kind = choice(texts['kind'], KINDS)
            given[kind] = fields[kind].typed(texts[kind])
            given['timezone'] = (texts['timezone'] or None) if kind in fields['timezone'].kinds else None
        for name in changed - {*KINDS, 'timezone', 'kind', 'name', SEEN.name}:
            given[name] = fields[name].typed(texts[name]) if texts[name] else _EMPTIED.get(name)
        return members_of(given)
    except ValueError as exc:
        raise InputRefused(str(exc)) from None


@contextmanager
def _refusing() -> Iterator[None]:
    """Ask again for what the entry cannot be."""
    try:
        yield
    except CouchDBError as exc:
        raise InputRefused(str(exc)) from None


def _preview(view: View, targets: Sequence[str]) -> Sequence[float]:
    """Return the next dates of the entry in the form."""
    schedules = _schedules(view)
    former = schedules.get(targets[0]).entry.doc if targets else {'task': 'any'}
    with _refusing():
        item = schedules.draft('draft', former, **_given(view, targets))
    return item.upcoming(schedules.client.clock.now(), 3)


def _add(view: View, targets: Sequence[str]) -> ActionOutcome:
    given, name = _given(view, targets), view.form.get('name', '').strip()
    if 'schedule' not in given or not given.get('task') or not name:
        raise InputRefused('Give a name, a task and a rule')
    schedules = _schedules(view)
    with _refusing():
        schedules.add(name, **given)
    return ActionOutcome(f'{name}: added.', changes=schedules.changes)


def _edit(view: View, targets: Sequence[str]) -> ActionOutcome:
    if not (given := _given(view, targets)):
        return ActionOutcome(f'{targets[0]}: nothing was changed.', 'info')
    schedules = _schedules(view)
    with _refusing():
        schedules.edit(targets[0], rev=view.form.get(SEEN.name), **given)
    return ActionOutcome(f'{targets[0]}: changed.', changes=schedules.changes)


def _action(action: EntryAction) -> Action:
    """Return an action for the selected entries."""

    def act(view: View, targets: Sequence[str]) -> ActionOutcome:
        schedules = _schedules(view)
        return each(view, targets, partial(action.do, schedules), 'entries')._replace(changes=schedules.changes)

    return Action(action.name, action.title, act, action.question, action.consequence, tone=action.tone)


page = Page(
    '/schedules',
    'Schedules',
    show,
    noun='schedule',
    actions=(
        Action('add', 'Add', _add, 'Add {}', fields=_fields, rows='none', preview=_preview),
        Action('edit', 'Edit', _edit, 'Edit {}', fields=_fields, rows='one', preview=_preview),
        *map(_action, ACTIONS),
    ),
)
