"""The page of jobs: what waits, runs and was done, and what one does about it.

The list stays as it is while somebody reads it: the rows change in their places, jobs that have ended are marked, and
the page says how many were published since. Pages begin after a row, see `kombu_couchdb.admin.listing.page`, so that
the last page of a million jobs costs as much as the first one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kombu.utils.json import dumps
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.admin.jobs import OPEN, STATES, find, items_in
from kombu_couchdb.admin.listing import MAX_EXAMINED, JobFilter, Place, published_since
from kombu_couchdb.admin.listing import page as page_of
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents.task_message import HIGHEST
from kombu_couchdb.documents.workitem import is_waiting
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.values import is_number

from ...jobs import Jobs, Unreadable
from ...resources.columns import Row, json_line
from ...resources.inputs import age, due_date, duration, json_value
from ...resources.jobs import job_resource, removal_text, without_arguments
from ..actions import each, sentence
from ..tables import Table
from ..view import Action, ActionOutcome, Field, InputRefused, Page, View

#: The jobs of a page.
_LIMIT = 50

#: How many jobs that were published since the page was shown are counted.
_MAX_NEW = 100

#: The maximum length of the ids in the URL with which a page is read again, in characters.
_MAX_IDS = 6000

#: The states that can be chosen: all but `gone`.
_STATES = ('ready', 'scheduled', 'parked', 'prefetched', 'running', 'dead', 'done')

_FIELDS = ('queue', 'task', 'since', 'args')


class JobQuery(NamedTuple):
    """What the URL asks for."""

    states: Sequence[str]
    #: The other filters by name, as they were typed.
    texts: Mapping[str, str]
    wanted: JobFilter
    after: Place | None


def show(view: View) -> Response:
    """Show one page of the jobs that the URL asks for."""
    jobs = _jobs(view)
    try:
        asked, problem = _asked(view, jobs), ''
    except ValueError as exc:
        asked, problem = JobQuery((), {name: view.param(name) for name in _FIELDS}, JobFilter(()), None), str(exc)
    now = jobs.client.clock.now()
    shown = _shown_before(view) if view.is_fragment else None
    if shown is not None:
        docs, following = _again(jobs, shown, asked.wanted.needs_history), _place(view, 'next')
    elif problem:
        docs, following = [], None
    else:
        docs, following = page_of(jobs.client, asked.wanted, _LIMIT, asked.after)
    if view.wants_json:
        return _json(view, jobs, docs, following, problem)
    resource = job_resource(jobs, arguments=not view.site.mask_args)
    empty = 'There are none.' if following is None else f'None of the last {MAX_EXAMINED:,} jobs is one of these.'
    table = Table.of(
        'Jobs',
        resource.columns,
        resource.summary(docs),
        _key,
        links={'ID': lambda job: view.link(f'/tasks/{_key(job)}')},
        selectable=view.may_act,
        keeps=bool(docs) or shown is not None,
        empty='' if problem else empty,
    )
    query = {name: value for name, value in asked.texts.items() if value} | {'state': _given_states(view)}
    return view.render(
        'jobs.html',
        table=table,
        problem=problem and sentence(problem),
        asked=asked,
        states=[(state, state in asked.states, _count(view, state, asked.wanted.queue)) for state in _STATES],
        known=known(view),
        new=_new(view, jobs, asked) if shown is not None else 0,
        most_new=_MAX_NEW,
        first=view.link('/jobs', **query),
        following=view.link('/jobs', **query, after=following.text()) if following else '',
        is_later=asked.after is not None,
        again=view.here if shown is not None else _url_again(view, docs, query, asked.after, following, now),
    )


def _jobs(view: View) -> Jobs:
    return Jobs(view.site.app, view.account.broker, view.account.results)


def _key(job: Row) -> str:
    """Return the id by which a job is found and changed."""
    return str(job['id'] or job['document'])


# -- what the URL asks for


def _given_states(view: View) -> list[str]:
    return view.request.query_params.getlist('state')


def _asked(view: View, jobs: Jobs) -> JobQuery:
    """Return what the URL asks for; *raises* `ValueError`, with a sentence."""
    given, texts = _given_states(view), {name: view.param(name).strip() for name in _FIELDS}
    if unknown := [state for state in given if state not in _STATES]:
        raise ValueError(f'there is no state {unknown[0]!r:.80}')
    if view.site.mask_args and texts['args']:
        raise ValueError('arguments are not shown on this page, and cannot be searched')
    try:
        since = jobs.client.clock.now() - age(texts['since']) if texts['since'] else None
        after = _place(view, 'after')
    except ValueError as exc:
        raise ValueError(f'this page cannot be shown: {exc}') from None
    states = given or [state for state in STATES if state in OPEN]
    wanted = JobFilter(states, texts['queue'] or None, texts['task'] or None, since, texts['args'] or None)
    return JobQuery(states, texts, wanted, after)


def _place(view: View, name: str) -> Place | None:
    return Place.of(view.param(name)) if view.param(name) else None


def _count(view: View, state: str, queue: str | None) -> int | None:
    """Return the number of jobs in a state, as it was read last; None if it is not known."""
    found = view.account.live.last
    queues: Mapping[str, Any] = found.status['queues'] if found else {}
    numbers = [one.get(state) for name, one in queues.items() if queue in (None, name)]
    return sum(numbers) if numbers and all(map(is_number, numbers)) else None


def known(view: View) -> Mapping[str, Sequence[str]]:
    """Return suggestions for filters: queues and tasks that are known."""
    found = view.account.live.last
    return {
        'queue': sorted(found.status['queues']) if found else (),
        'task': sorted(name for name in view.site.app.tasks if not name.startswith('celery.')),
    }


# -- the same page again


def _url_again(
    view: View,
    docs: Sequence[Document],
    query: Mapping[str, Any],
    after: Place | None,
    following: Place | None,
    now: float,
) -> str:
    """Return the URL with which the same rows are read again; that of the page if it would be too long."""
    ids = json.dumps(list(dict.fromkeys(doc['_id'] for doc in docs)))
    if not docs or len(ids) > _MAX_IDS:
        return view.here
    places = {name: place.text() for name, place in (('after', after), ('next', following)) if place}
    return view.link('/jobs', **query, **places, shown=ids, at=f'{now:.3f}')


def _shown_before(view: View) -> list[str] | None:
    """Return the ids of the documents that the browser shows; None if it asks for the page as it is now."""
    try:
        found = json.loads(view.param('shown', 'null'))
    except (ValueError, RecursionError):
        return None
    is_ids = isinstance(found, list) and len(found) <= 2 * _LIMIT and all(isinstance(one, str) and one for one in found)
    return found if is_ids else None


def _again(jobs: Jobs, ids: Sequence[str], is_history: bool) -> list[Document]:
    docs = [doc for doc in jobs.client.find(ids) if doc and doc.get('type') in ('WorkItem', 'DoneItem')]
    now = jobs.client.clock.now()
    return [item for doc in docs for item in (items_in(doc, now) if is_history else [doc])]


def _new(view: View, jobs: Jobs, asked: JobQuery) -> int:
    try:
        since = float(view.param('at'))
    except ValueError:
        return 0
    is_date = 0 < since <= jobs.client.clock.now()
    return published_since(jobs.client, asked.wanted, since, _MAX_NEW) if is_date else 0


def _json(view: View, jobs: Jobs, docs: Sequence[Document], following: Place | None, problem: str) -> Response:
    if problem:
        raise HTTPException(400, sentence(problem))
    rows = list(job_resource(jobs).describe(docs))
    shown = [without_arguments(row) for row in rows] if view.site.mask_args else rows
    return view.json_list(shown, following.text() if following else None)


# -- actions


def _remove(view: View, targets: Sequence[str]) -> ActionOutcome:
    jobs, terminate = _jobs(view), 'terminate' in view.form
    return each(view, targets, lambda name: removal_text(jobs.remove(name, terminate=terminate), terminate)[0])


def _run_now(view: View, targets: Sequence[str]) -> ActionOutcome:
    jobs = _jobs(view)

    def act(name: str) -> str:
        jobs.move(name, eta=None)
        return 'is due now'

    return each(view, targets, act)


def _move(view: View, targets: Sequence[str]) -> ActionOutcome:
    jobs, given = _jobs(view), dict[str, Any]()
    if queue := view.form.get('queue', '').strip():
        given['queue'] = queue
    if due := view.form.get('due', '').strip():
        given |= _due(due)
    if priority := view.form.get('priority', '').strip():
        if not priority.isdecimal() or int(priority) > HIGHEST:
            raise InputRefused(f'The priority must be a whole number from 0 to {HIGHEST}, not {priority!r:.80}')
        given['priority'] = int(priority)
    if not given:
        raise InputRefused('Give a queue, a due date or a priority')

    def act(name: str) -> str:
        jobs.move(name, **given)
        return 'moved'

    outcome = each(view, targets, act)
    if outcome.tone == 'bad' and len(targets) == 1:
        raise InputRefused(outcome.text)
    return outcome


def _due(text: str) -> dict[str, Any]:
    try:
        return {'countdown': duration(text)}
    except ValueError:
        pass
    try:
        return {'eta': due_date(text)}
    except ValueError as exc:
        raise InputRefused(f'The due date: {exc}; or a duration from now, such as 10m') from None


def _move_fields(view: View, targets: Sequence[str]) -> Sequence[Field]:
    return (
        Field('queue', 'Queue', options=known(view)['queue'], hint='Empty: the same queue.'),
        Field(
            'due', 'Due', hint='A duration from now, such as 10m, or a date such as 2026-01-31T08:00+01:00, or "now".'
        ),
        Field('priority', 'Priority', hint=f'0 to {HIGHEST}; {HIGHEST} is the highest.'),
    )


def _edit_fields(view: View, targets: Sequence[str]) -> Sequence[Field]:
    jobs = _jobs(view)
    docs = [doc for doc in find(jobs.client, targets[0]) if is_waiting(doc)]
    if not docs:
        raise InputRefused(f'The job {targets[0]} does not wait any more')
    try:
        body = jobs.decode(docs[0])
        args, kwargs, _ = body
        dumps([args, kwargs])
    except (Unreadable, TypeError, ValueError) as exc:
        raise InputRefused(f'The arguments of the job {targets[0]} cannot be edited here: {exc}') from None
    return (
        Field('args', 'Arguments', json_line(args), 'A list in JSON.', kind='area'),
        Field('kwargs', 'Named arguments', json_line(kwargs), 'An object in JSON.', kind='area'),
    )


def _edit(view: View, targets: Sequence[str]) -> ActionOutcome:
    given = dict[str, Any]()
    for name, label, kind in (('args', 'Arguments', list), ('kwargs', 'Named arguments', dict)):
        try:
            given[name] = json_value(view.form.get(name, ''), kind)
        except ValueError as exc:
            raise InputRefused(f'{label}: {exc}') from None
    try:
        _jobs(view).edit(targets[0], **given)
    except (CouchDBError, Unreadable) as exc:
        raise InputRefused(str(exc)) from None
    return ActionOutcome(f'{targets[0]}: its arguments are changed.')


page = Page(
    '/jobs',
    'Jobs',
    show,
    noun='job',
    actions=(
        Action('run', 'Run now', _run_now),
        Action(
            'move',
            'Move',
            _move,
            'Move {}?',
            'What you leave empty stays as it is. Only jobs that wait can be moved.',
            fields=_move_fields,
        ),
        Action(
            'edit',
            'Edit arguments',
            _edit,
            'Edit the arguments of {}',
            'Only a job that waits can be edited.',
            fields=_edit_fields,
            rows='one',
            is_offered=lambda view: not view.site.mask_args,
        ),
        Action(
            'remove',
            'Remove',
            _remove,
            'Remove {}?',
            'Jobs that wait are deleted for good, and their results become REVOKED. Jobs that a worker holds are '
            'revoked: they do not start. Dead letters are kept.',
            tone='bad',
            fields=(Field('terminate', 'Stop jobs that run: terminate their processes', kind='check'),),
        ),
    ),
)
