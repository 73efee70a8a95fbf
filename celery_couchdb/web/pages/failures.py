"""The page of failures: in groups and in a list, and what one does about them.

The list stays as it is while somebody reads it: it ends with what failed before the page was shown, failures that were
retried or dropped since are marked, and the page says how many tasks have failed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf, nextafter
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import Response

from kombu_couchdb.errors import AccessDenied

from ...failures import Failure, FailureFilter, FailureGroup, Failures
from ...resources.columns import Row
from ...resources.failure_actions import FAILURES, wanted_failures
from ...resources.failures import failure_resource, group_resource, without_arguments
from ...resources.fields import values_in
from ..actions import sentence
from ..live import StatusReading
from ..selections import actions_of, filled, no_match, target_of
from ..tables import Table
from ..view import Page, View

#: The failures of a page, the groups above them, and how many new failures are counted.
_LIMIT, _MAX_GROUPS, _MAX_NEW = 50, 8, 100

#: In which orders groups are shown.
_ORDERS: Mapping[str, Callable[[FailureGroup], Any]] = {
    'count': lambda group: (-group.count, -group.last),
    'task': lambda group: (group.task or '', -group.count),
    'error': lambda group: (group.error or '', -group.count),
    'first': lambda group: group.first,
    'last': lambda group: -group.last,
}


class FailurePlace(NamedTuple):
    """Where a page of the list begins."""

    #: The date of the failure before it, and how many failures with this date are on the pages before.
    date: float
    skipped: int

    @classmethod
    def of(cls, text: str) -> FailurePlace | None:
        """Return the place that a URL has, or None for ''; *raises* `ValueError`."""
        if not text:
            return None
        date, _, skipped = text.partition(',')
        if not skipped.isdecimal() or len(skipped) > 6:
            raise ValueError('this part of the list does not exist')
        return cls(_number(date), int(skipped))

    def text(self) -> str:
        """Return the place for a URL."""
        return f'{self.date!r},{self.skipped}'


#: By how much a worker's idea of the server's time may be ahead of this process's, in seconds. Later dates are wrong.
_MAX_SKEW_SECONDS = 60.0


class FailureQuery(NamedTuple):
    """What the URL asks for."""

    #: The filters as parameters of a URL.
    query: Mapping[str, Sequence[str]]
    wanted: FailureFilter = FailureFilter()
    after: FailurePlace | None = None
    #: When the page was shown, and the date of its last failure, if a browser reads the same page again.
    at: float | None = None
    oldest: float | None = None


class Found(NamedTuple):
    """What the page shows."""

    failures: Sequence[Failure]
    following: FailurePlace | None
    groups: Sequence[FailureGroup]
    #: The number of failures that match, as far as it is known.
    total: int | None
    new: int


def failures_of(view: View) -> Failures:
    """Return the failures as the user of a view may see them."""
    return Failures(view.site.app, view.account.broker, view.account.results)


def show(view: View) -> Response:
    """Show the failures that the URL asks for."""
    failures = failures_of(view)
    now = failures.now()
    try:
        asked, problem = _asked(view, failures), ''
    except ValueError as exc:
        asked, problem = FailureQuery(_query(view)), sentence(str(exc))
    if problem and view.wants_json:
        raise HTTPException(400, problem)
    found = _read(failures, asked, with_list=not problem)
    masked = view.site.mask_args
    resource = failure_resource(failures, now, arguments=not masked, tries=True)
    rows = list(resource.describe(found.failures))
    if view.wants_json:
        return _json(view, rows, found.following)
    at = _newest(found, now) if asked.at is None else asked.at
    table = Table.of(
        'Failures',
        resource.columns,
        rows,
        lambda row: row['id'],
        links={
            **view.names(),
            'ID': lambda row: view.link(f'/tasks/{row["id"]}'),
            'TASK': lambda row: view.link('/failures', task=row['task']) if row['task'] else None,
            'QUEUE': lambda row: view.link('/failures', queue=row['queue']) if row['queue'] else None,
        },
        dates={'WHEN': lambda row: [row['date']] if row['date'] else []},
        selectable=view.may_act,
        keeps=bool(rows) or asked.at is not None,
        empty='' if problem else no_match(FAILURES, view) or 'There are no failures.',
    )
    return view.render(
        'failures.html',
        problem=problem,
        asked=asked,
        filters=filled(FAILURES, view),
        known={**view.known, 'error': sorted({group.error for group in found.groups if group.error})},
        groups=_groups(view, found.groups, at),
        table=table,
        total=found.total,
        target=target_of(asked.query, at),
        is_filtered=any(asked.query.values()),
        new=found.new,
        most_new=_MAX_NEW,
        first=view.link('/failures', **asked.query),
        following=view.link('/failures', **asked.query, after=found.following.text()) if found.following else '',
        is_later=asked.after is not None,
        again=view.here if asked.at is not None or not rows else _url_again(view, asked, found, at),
    )


# -- what the URL asks for


def _query(view: View) -> dict[str, list[str]]:
    query = view.request.query_params
    return {field.name: [text for text in query.getlist(field.name) if text] for field in FAILURES.filters}


def _asked(view: View, failures: Failures) -> FailureQuery:
    """Return what the URL asks for; *raises* `ValueError`, with a sentence."""
    query = _query(view)
    if view.site.mask_args and query['args']:
        raise ValueError('arguments are not shown on this page, and cannot be searched')
    wanted = wanted_failures(failures, values_in(FAILURES.filters, query))
    at, oldest = (_number(view.param(name)) if view.param(name) else None for name in ('at', 'oldest'))
    return FailureQuery(query, wanted, FailurePlace.of(view.param('after')), at, oldest)


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < inf:
        raise ValueError('this part of the list does not exist')
    return number


# -- reading


def _read(failures: Failures, asked: FailureQuery, with_list: bool) -> Found:
    groups = failures.groups(FailureFilter(task=asked.wanted.task, error=asked.wanted.error_type))
    if not with_list:
        return Found((), None, groups, None, 0)
    found, following = _page(failures, asked)
    new = 0
    if asked.at is not None:
        later = failures.listing(asked.wanted._replace(since=nextafter(asked.at, inf)))
        # The embedded server rounds the dates in an index: what is shown already may be among them.
        new = sum(failure.date > asked.at for failure in islice(later, _MAX_NEW))
    is_whole = following is None and asked.after is None and asked.at is None
    total = len(found) if is_whole else failures.count(asked.wanted, 0)
    return Found(found, following, groups, total, new)


def _page(failures: Failures, asked: FailureQuery) -> tuple[list[Failure], FailurePlace | None]:
    """Return the failures of one page, and where the next one begins."""
    wanted, after = asked.wanted, asked.after or FailurePlace(inf, 0)
    until = [date for date in (asked.after and asked.after.date, asked.at) if date is not None]
    if until:
        wanted = wanted._replace(until=min(until))
    if asked.oldest is not None:
        wanted = wanted._replace(since=max(asked.oldest, wanted.since or 0.0))
    found = list(islice(failures.listing(wanted), after.skipped, after.skipped + _LIMIT + 1))
    shown = found[:_LIMIT]
    if len(found) <= _LIMIT or not shown[-1].date:
        return shown, None
    date = shown[-1].date
    same = sum(failure.date == date for failure in shown)
    return shown, FailurePlace(date, same + (after.skipped if date == after.date else 0))


def _newest(found: Found, now: float) -> float:
    """Return the date of the newest failure that is known; `now` if there is none.

    A failure is new if it is later than this. Its date may be earlier than `now`, because this process and a worker do
    not know the server's time exactly.
    """
    dates = [*(failure.date for failure in found.failures), *(group.last for group in found.groups)]
    return max((date for date in dates if date and date < now + _MAX_SKEW_SECONDS), default=now)


def _url_again(view: View, asked: FailureQuery, found: Found, at: float) -> str:
    """Return the URL with which the same failures are read again."""
    after = asked.after.text() if asked.after else None
    return view.link('/failures', **asked.query, after=after, at=repr(at), oldest=repr(found.failures[-1].date))


# -- what is shown


def _groups(view: View, groups: Sequence[FailureGroup], at: float) -> Table:
    """Return the table of groups; each leads to its failures."""

    def link(row: Row) -> str | None:
        if row['task'] is None or row['error'] is None:
            return None
        return view.link('/failures', task=row['task'], error=row['error'])

    def key(row: Row) -> str:
        if row['task'] is None or row['error'] is None:
            return ''  # no filter selects just these
        return target_of({name: row[name] for name in ('task', 'error')}, at)

    wanted = view.param('sort')
    groups = sorted(groups, key=_ORDERS.get(wanted, _ORDERS['count']))
    shown = groups if view.param('groups') == 'all' or wanted in _ORDERS else groups[:_MAX_GROUPS]
    resource, query = group_resource(at), view.request.query_params
    given = {name: query.getlist(name) for name in query if name not in ('at', 'oldest')}
    return Table.of(
        'Groups',
        resource.columns,
        resource.summary(shown),
        key,
        links={'TASK': link},
        dates={'FIRST': lambda row: [row['first']], 'LAST': lambda row: [row['last']]},
        sorts={name.upper(): view.link('/failures', **{**given, 'sort': name}) for name in _ORDERS},
        selectable=view.may_act,
        more=f'These are the largest of {len(groups):,} groups.' if len(groups) > len(shown) else '',
        more_link=view.link('/failures', **{**given, 'groups': 'all'}),
    )


def _json(view: View, rows: Sequence[Row], following: FailurePlace | None) -> Response:
    shown = [without_arguments(row) for row in rows] if view.site.mask_args else rows
    return view.json_list(shown, following.text() if following else None)


def _is_first(view: View) -> bool:
    """Tell whether there is a failure; a user who may not read them does not begin here.

    The index of the list is not read: with many new messages, CouchDB would have to update it first.
    """
    try:
        return _count(view.snapshot()) > 0
    except AccessDenied:
        return False


def _count(found: StatusReading) -> int:
    return sum(queue['dead'] for queue in found.status['queues'].values()) + found.status['malformed']


page = Page(
    '/failures',
    'Failures',
    show,
    noun='failure',
    actions=actions_of(FAILURES, failures_of),
    is_first=_is_first,
    count=_count,
)
