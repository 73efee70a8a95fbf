"""The page of jobs: what waits, runs and was done, and what one does about it.

The list stays as it is while somebody reads it: the rows change in their places, jobs that have ended are marked, and
the page says how many were published since. Pages begin after a row, see `kombu_couchdb.admin.listing.page`, so that
the last page of a million jobs costs as much as the first one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.admin.jobs import items_in
from kombu_couchdb.admin.listing import MAX_EXAMINED, JobFilter, Place, published_since
from kombu_couchdb.admin.listing import page as page_of
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.values import is_number

from ...cli.clients import options_of
from ...jobs import Jobs
from ...resources.columns import Row
from ...resources.fields import values_in
from ...resources.job_actions import JOBS, wanted_jobs
from ...resources.jobs import date_of, job_resource, without_arguments
from ..actions import sentence
from ..selections import actions_of, filled, no_match, target_of
from ..tables import Table
from ..view import Page, View

#: The jobs of a page.
_LIMIT = 50

#: The states that can be chosen: all but `gone`.
STATES = JOBS.filters[0].options

#: How many jobs that were published since the page was shown are counted.
_MAX_NEW = 100

_UNKEPT = (
    'Jobs that are done are not kept. With the transport option keep_done, a number of seconds, workers keep them for '
    'so long.'
)

#: The maximum length of the ids in the URL with which a page is read again, in characters.
_MAX_IDS = 6000


class JobQuery(NamedTuple):
    """What the URL asks for."""

    states: Sequence[str]
    wanted: JobFilter
    after: Place | None


def show(view: View) -> Response:
    """Show one page of the jobs that the URL asks for."""
    jobs = _jobs(view)
    try:
        asked, problem = _asked(view, jobs), ''
    except ValueError as exc:
        asked, problem = JobQuery((), JobFilter(()), None), str(exc)
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
    is_unkept = not docs and asked.states == ['done'] and not options_of(view.site.app).keep_done
    if is_unkept:
        following = None
    table = Table.of(
        'Jobs',
        resource.columns,
        resource.summary(docs),
        _key,
        links={
            'ID': lambda job: view.link(f'/tasks/{_key(job)}'),
            'TASK': lambda job: (
                view.link('/jobs', task=job['task'], state=_given_states(view)) if job['task'] else None
            ),
            'QUEUE': lambda job: view.link('/jobs', queue=job['queue'], state=_given_states(view)),
            'WORKER OR ERROR': lambda job: (
                view.names()['WORKER'](job) if job['state'] in ('running', 'prefetched', 'done') else None
            ),
        },
        dates={'WHEN': lambda job: [date] if is_number(date := date_of(job)) else []},
        selectable=view.may_act,
        keeps=bool(docs) or shown is not None,
        empty='' if problem else _UNKEPT if is_unkept else _empty(view, following),
    )
    query = {field.name: field.value for field in filled(JOBS, view)} | {'state': _given_states(view)}
    return view.render(
        'jobs.html',
        table=table,
        problem=problem and sentence(problem),
        asked=asked,
        filters=filled(JOBS, view),
        states=[(state, state in asked.states, _count(view, state, asked.wanted.queue)) for state in STATES],
        target=target_of(query, now),
        count=_total(view, asked),
        is_filtered=any(query.values()),
        known=view.known,
        new=_new(view, jobs, asked) if shown is not None else 0,
        most_new=_MAX_NEW,
        first=view.link('/jobs', **query),
        following=view.link('/jobs', **query, after=following.text()) if following else '',
        is_later=asked.after is not None,
        is_unkept=is_unkept,
        again=view.here if shown is not None else _url_again(view, docs, query, asked.after, following, now),
    )


def _empty(view: View, following: Place | None) -> str:
    """Return what is said in place of an empty list."""
    if following is not None:
        return f'None of the last {MAX_EXAMINED:,} jobs is one of these.'
    return no_match(JOBS, view) or 'No job waits or runs.'


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
    query = view.request.query_params
    given = {field.name: query.getlist(field.name) for field in JOBS.filters}
    if view.site.mask_args and any(given['args']):
        raise ValueError('arguments are not shown on this page, and cannot be searched')
    wanted = wanted_jobs(jobs, values_in(JOBS.filters, given))
    try:
        after = _place(view, 'after')
    except ValueError as exc:
        raise ValueError(f'this page cannot be shown: {exc}') from None
    return JobQuery([*wanted.states], wanted, after)


def _place(view: View, name: str) -> Place | None:
    return Place.of(view.param(name)) if view.param(name) else None


def _count(view: View, state: str, queue: str | None) -> int | None:
    """Return the number of jobs in a state, as it was read last; None if it is not known."""
    found = view.account.live.last
    queues: Mapping[str, Any] = found.status['queues'] if found else {}
    numbers = [one.get(state) for name, one in queues.items() if queue in (None, name)]
    return sum(numbers) if numbers and all(map(is_number, numbers)) else None


def _total(view: View, asked: JobQuery) -> int | None:
    """Return the number of jobs that match, as it was read last; None if it is not known."""
    wanted = asked.wanted
    if wanted.needs_history or wanted.until is not None:
        return None
    numbers = [_count(view, state, wanted.queue) for state in asked.states]
    return sum(number or 0 for number in numbers) if numbers and None not in numbers else None


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


page = Page('/jobs', 'Jobs', show, noun='job', actions=actions_of(JOBS, _jobs))
