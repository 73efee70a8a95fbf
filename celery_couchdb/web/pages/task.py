"""The page of one task: where it is, its message and result, what happened to it, and what one does about it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from celery import states
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.errors import AccessDenied, ConfigurationError

from ...resources.columns import NO_VALUE, Row, Tone, json_line
from ...resources.jobs import STATE_TONES
from ...resources.task import TaskSources, find_task, task_resource, without_arguments
from ..actions import sentence
from ..view import Page, View
from . import failures as failures_page
from . import jobs as jobs_page

#: The maximum length of a value, in characters, and of a list of children.
_MAX_CHARACTERS, _MAX_CHILDREN = 4000, 50

#: The actions for a task by what it is.
_FOR_FAILURES = ('retry', 'drop')
_FOR_WAITING = ('run', 'move', 'edit', 'remove')
_FOR_HELD = ('remove',)

_WAITING, _HELD = ('ready', 'scheduled', 'parked'), ('prefetched', 'running')


class Fact(NamedTuple):
    """A line of the page: a label, and a text, behind the texts and the addresses of links."""

    label: str
    text: str = ''
    is_code: bool = False
    links: Sequence[tuple[str, str]] = ()


def show(view: View) -> Response:
    """Show the task with the id in the path."""
    name, remark = _name(view), ''
    try:
        sources = TaskSources.of(view.site.app, view.account.broker, view.account.results)
        try:
            row = _row(sources, name)
        except AccessDenied:
            if sources.jobs is None or sources.results is None:
                raise
            remark = 'Results are not shown: you may not read them.'
            row = _row(sources._replace(results=None), name)
    except ConfigurationError as exc:
        if view.session.notices and not view.is_fragment:  # the user has removed it just now
            return view.redirect('/failures')
        raise HTTPException(404, sentence(str(exc))) from None
    if row['id'] != name:  # the beginning of its id, or the id of a document
        return view.redirect(f'/tasks/{row["id"]}', **view.request.query_params)
    documents = row['documents']
    if view.site.mask_args:
        row = without_arguments(row)
    if view.wants_json:
        return view.json(row)
    wanted = _actions_for(row)
    return view.render(
        'task.html',
        row=row,
        now=sources.now(),
        where='' if row['state'] == 'gone' and _result_state(row) in states.READY_STATES else row['where'],
        remark=remark,
        tone=STATE_TONES.get(row['state'], ''),
        result_tone=_result_tone(row),
        actions=[action for action in view.offered('any', 'one') if action.name in wanted],
        message=[*_message(view, row)],
        outcome=[*_outcome(row)],
        related=[*_related(view, row)],
        command=f'celery -A {shlex.quote(view.site.app.main or "your_app")} couchdb show {shlex.quote(name)}',
        documents='' if view.site.mask_args else json.dumps(documents, indent=2, ensure_ascii=False, default=repr),
    )


def _row(sources: TaskSources, name: str) -> Row:
    [row] = task_resource(sources, sources.now()).describe([find_task(sources, name)])
    return row


def _name(view: View) -> str:
    return str(view.request.path_params['id'])


def _actions_for(row: Row) -> Collection[str]:
    """Return the names of the actions that make sense in the state of a task."""
    if row['state'] in _WAITING:
        return _FOR_WAITING
    if row['state'] in _HELD:
        return _FOR_HELD
    return _FOR_FAILURES if any(message['state'] == 'dead' for message in row['messages']) else ()


def _result_state(row: Row) -> str | None:
    return row['result']['state'] if row['result'] else None


def _result_tone(row: Row) -> Tone:
    state = _result_state(row)
    return 'good' if state == states.SUCCESS else 'bad' if state in states.PROPAGATE_STATES else ''


# -- what is shown


def _message(view: View, row: Row) -> Iterator[Fact]:
    """Yield what is known of the message of a task."""
    for name, link in view.names().items():
        if address := link(row):
            yield Fact(name.capitalize(), links=[(_text(row[name.lower()]), address)])
    values: Mapping[str, Any] = {
        'Priority': row['priority'],
        'Job key': row['job_key'],
        'Lease of': _holder(row),
        'Deliveries': row['attempts'],
        'Retries': row['retries'],
    }
    yield from (Fact(label, _text(value)) for label, value in values.items() if value is not None)
    if row['args'] is not None:
        yield Fact('Arguments', _cut(_call(row)), is_code=True)
    if row['body'] is not None:
        yield Fact('Body', _cut(json_line(row['body'])), is_code=True)
    if row['unreadable']:
        yield Fact('Unreadable', row['unreadable'])
    yield from (Fact(name.replace('_', ' ').capitalize(), _text(value)) for name, value in row['headers'].items())
    if len(row['messages']) > 1:
        texts = (f'{message["state"]} in {message["queue"]}' for message in row['messages'])
        yield Fact(f'{len(row["messages"])} messages', '; '.join(texts))


def _call(row: Row) -> str:
    """Return the arguments as Python shows them, as in lists: `(54, 0) {'unit': 'EUR'}`."""
    args = tuple(row['args']) if isinstance(row['args'], list) else row['args']
    return f'{args!r} {row["kwargs"]!r}' if row['kwargs'] else repr(args)


def _holder(row: Row) -> str | None:
    """Return the consumer that holds the lease of a message."""
    holders = (str(message['consumer']) for message in row['messages'] if message['state'] in _HELD)
    return next((holder.removeprefix(CONSUMER) for holder in holders), None)


def _outcome(row: Row) -> Iterator[Fact]:
    """Yield what came of a task, apart from its error."""
    result = row['result']
    if result and result['error'] is None and result['result'] is not None:
        yield Fact(
            'Returned' if result['state'] == states.SUCCESS else 'Result', _cut(json_line(result['result'])), True
        )


def _related(view: View, row: Row) -> Iterator[Fact]:
    """Yield the tasks that a task belongs to."""
    if row['group']:
        yield Fact('Group', _text(row['group']))
    for label, member in (('Called by', 'parent'), ('Root', 'root')):
        if row[member] and row[member] != row['id']:
            yield _tasks(view, label, [_text(row[member])])
    children = [child for child in row['children'] if child != row['id']]
    if children:
        more = f'and {len(children) - _MAX_CHILDREN:,} more' if len(children) > _MAX_CHILDREN else ''
        yield _tasks(view, 'Calls', children[:_MAX_CHILDREN], more)


def _tasks(view: View, label: str, ids: Sequence[str], more: str = '') -> Fact:
    return Fact(label, more, links=[(task_id, view.link(f'/tasks/{task_id}')) for task_id in ids])


def _text(value: Any) -> str:
    return _cut(value if isinstance(value, str) else NO_VALUE if value is None else json_line(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f'{text[:_MAX_CHARACTERS]}…'


page = Page(
    '/tasks/{id:path}',
    'Task',
    show,
    noun='task',
    actions=(
        *failures_page.page.actions,
        *jobs_page.page.actions,
    ),
    targets=lambda view: [_name(view)],
    in_menu=False,
)
