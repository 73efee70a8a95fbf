"""The page of schedules: what beat sends and when, how it ended the last time, and a form for entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from starlette.responses import Response

from kombu_couchdb.errors import CouchDBError

from ...jobs import Jobs
from ...resources.columns import Row, json_line
from ...resources.fields import SEEN, Field
from ...resources.inputs import choice, duration, json_value, whole
from ...resources.jobs import stored_states
from ...web.actions import each
from ...web.tables import Table
from ...web.view import Action, ActionOutcome, InputRefused, Page, View
from .entries import DEFAULT_GRACE_SECONDS, MISSED, is_date
from .inputs import KINDS, members_of, typed_rule
from .resource import no_beat, schedule_resource
from .stored_schedules import Schedules

_EMPTY = 'There is no schedule: add one, or start "celery -A your_app beat -S couchdb" to store those of the code.'

#: The fields of the form for each kind of rule, and the kinds that have a time zone.
_RULES = (
    ('every', 'Every', 'A duration: 30 (seconds), 15m, 1h or 1d.'),
    ('crontab', 'Crontab', 'Minute, hour, day, month and weekday, such as "30 3 * * mon-fri".'),
    ('at', 'At', 'A date such as 2027-01-01T09:00: it is sent once.'),
    ('solar', 'Event and place', 'Such as "sunset 48.1 11.6", with latitude and longitude.'),
)
_WITH_ZONE = ('crontab', 'at')

#: How the texts of the form are read, and what a field that was emptied means.
_READERS: dict[str, tuple[Callable[[str], Any], Any]] = {
    'task': (str, ''),
    'timezone': (str, None),
    'args': (partial(json_value, kind=list), []),
    'kwargs': (partial(json_value, kind=dict), {}),
    'options': (partial(json_value, kind=dict), {}),
    'missed': (partial(choice, known=MISSED), MISSED[0]),
    'grace': (duration, DEFAULT_GRACE_SECONDS),
    'start': (str, None),
    'until': (str, None),
    'times': (whole, None),
}


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
        links={'RESULT': lambda row: view.link(f'/tasks/{row["task_id"]}') if row['result'] else None},
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
    tasks = sorted(name for name in view.site.app.tasks if not name.startswith('celery.'))
    masked = view.site.mask_args
    return [
        replace(SEEN, value=doc['_rev']) if targets else Field('name', 'Name'),
        Field('task', 'Task', str(doc.get('task', '')), options=tasks),
        Field('kind', 'Kind of rule', kind or KINDS[0], kind='select', options=KINDS),
        *(Field(name, label, rule if name == kind else '', hint, kinds=(name,)) for name, label, hint in _RULES),
        Field('timezone', 'Time zone', zone, "Such as Europe/Berlin; empty: the app's.", kinds=_WITH_ZONE),
        *([] if masked else [Field('args', 'Arguments', _typed(doc, 'args'), 'A list in JSON.', 'area')]),
        *([] if masked else [Field('kwargs', 'Named arguments', _typed(doc, 'kwargs'), 'An object in JSON.', 'area')]),
        Field('options', 'Options', _typed(doc, 'options'), 'Options of apply_async, an object in JSON.', 'area'),
        Field(
            'missed',
            'Missed',
            str(doc.get('missed', MISSED[0])),
            'What is sent if no beat ran for longer than the grace: the latest due date, or none.',
            'select',
            MISSED,
        ),
        Field('start', 'Start', _date(view, doc, 'start'), 'Nothing is due until this date; empty: now.'),
        Field('until', 'Until', _date(view, doc, 'until'), 'Nothing is due after this date; empty: no end.'),
        Field('times', 'Times', _typed(doc, 'times'), 'How many due dates are sent at most; empty: no limit.'),
        Field('grace', 'Grace', _typed(doc, 'grace'), f'A duration; empty: {DEFAULT_GRACE_SECONDS:.0f} s.'),
    ]


def _date(view: View, doc: Row, member: str) -> str:
    date = doc.get(member)
    return datetime.fromtimestamp(date, view.site.app.timezone).isoformat() if is_date(date) else ''


def _typed(doc: Row, member: str) -> str:
    return json_line(doc[member]) if member in doc else ''


def _given(view: View, targets: Sequence[str]) -> dict[str, Any]:
    """Return the members of an entry that the user has changed in the form; *raises* `InputRefused`."""
    fields = {field.name: field for field in _fields(view, targets)}
    texts = {name: view.form.get(name, '').strip() for name in fields}
    changed = {name for name, field in fields.items() if texts[name] != (field.value if targets else '')}
    given = dict[str, Any]()
    try:
        if changed & {*KINDS, 'timezone'} or (targets and 'kind' in changed):
            kind = choice(texts['kind'], KINDS)
            given |= {kind: duration(texts[kind]) if kind == 'every' else texts[kind]}
            given['timezone'] = (texts['timezone'] or None) if kind in _WITH_ZONE else None
        for name in changed & _READERS.keys() - {'timezone'}:
            read, default = _READERS[name]
            given[name] = read(texts[name]) if texts[name] else default
        return members_of(given)
    except ValueError as exc:
        raise InputRefused(str(exc)) from None


def _preview(view: View, targets: Sequence[str]) -> Sequence[float]:
    """Return the next dates of the entry in the form."""
    schedules = _schedules(view)
    former = schedules.get(targets[0]).entry.doc if targets else {'task': 'any'}
    try:
        item = schedules.draft('draft', former, **_given(view, targets))
    except CouchDBError as exc:
        raise InputRefused(str(exc)) from None
    return item.upcoming(schedules.client.clock.now(), 3)


def _add(view: View, targets: Sequence[str]) -> ActionOutcome:
    given, name = _given(view, targets), view.form.get('name', '').strip()
    if 'schedule' not in given or not given.get('task') or not name:
        raise InputRefused('Give a name, a task and a rule')
    schedules = _schedules(view)
    try:
        schedules.add(name, **given)
    except CouchDBError as exc:
        raise InputRefused(str(exc)) from None
    return ActionOutcome(f'{name}: added.', changes=schedules.changes)


def _edit(view: View, targets: Sequence[str]) -> ActionOutcome:
    if not (given := _given(view, targets)):
        return ActionOutcome(f'{targets[0]}: nothing was changed.', 'info')
    schedules = _schedules(view)
    try:
        schedules.edit(targets[0], rev=view.form.get(SEEN.name), **given)
    except CouchDBError as exc:
        raise InputRefused(str(exc)) from None
    return ActionOutcome(f'{targets[0]}: changed.', changes=schedules.changes)


# -- actions for entries


def _for_each(act: Callable[[Schedules, str], str]) -> Callable[[View, Sequence[str]], ActionOutcome]:
    def function(view: View, targets: Sequence[str]) -> ActionOutcome:
        schedules = _schedules(view)
        return each(view, targets, partial(act, schedules))._replace(changes=schedules.changes)

    return function


def _enable(schedules: Schedules, name: str) -> str:
    schedules.enable(name)
    return 'enabled'


def _disable(schedules: Schedules, name: str) -> str:
    schedules.disable(name)
    return 'disabled'


def _reset(schedules: Schedules, name: str) -> str:
    schedules.reset(name)
    return 'as in the code'


def _run(schedules: Schedules, name: str) -> str:
    return f'sent as {schedules.run(name).id}'


def _delete(schedules: Schedules, name: str) -> str:
    schedules.delete(name)
    return 'deleted'


page = Page(
    '/schedules',
    'Schedules',
    show,
    noun='schedule',
    actions=(
        Action('add', 'Add', _add, 'Add {}', fields=_fields, rows='none', preview=_preview),
        Action('run', 'Run now', _for_each(_run)),
        Action('enable', 'Enable', _for_each(_enable)),
        Action(
            'disable', 'Disable', _for_each(_disable), 'Disable {}?', 'Nothing is sent until somebody enables it again.'
        ),
        Action('edit', 'Edit', _edit, 'Edit {}', fields=_fields, rows='one', preview=_preview),
        Action('reset', 'Reset', _for_each(_reset), 'Reset {}?', 'What the code of the app says replaces all edits.'),
        Action(
            'delete',
            'Delete',
            _for_each(_delete),
            'Delete {}?',
            'Nothing more is sent. A schedule in the code of the app can only be disabled.',
            tone='bad',
        ),
    ),
)
