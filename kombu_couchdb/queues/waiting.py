"""Reads of the view `waiting`, which has the messages that no consumer has claimed, of many queues in one request.

The view has two parts of each queue: messages that are due at once, by priority and time of publishing, and planned
messages, by due date. Only the second part is read up to a time. So a message that is due at once is found even if a
clock was wrong when it was published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from .. import design
from ..couchdb.client import Client, Document
from ..couchdb.pacing import RequestKind, TooManyUnits
from ..couchdb.shapes import Shape, exactly, items, members, number, revision
from ..design.rows import WaitingRow
from ..documents.task_message import HIGHEST

#: Consumers read planned messages this many seconds before they are due, to have them in time.
HORIZON_SECONDS = 5.0


def is_row(row: Any) -> bool:
    """Shape of a row; without `members` and `exactly`, which need three times as long for thousands of rows."""
    if not isinstance(row, dict) or not isinstance(row.get('id'), str):
        return False
    key, value = row.get('key'), row.get('value')
    return (
        isinstance(key, list)
        and len(key) == 3
        and isinstance(key[0], str)
        and number(key[1])
        and number(key[2])
        and isinstance(value, list)
        and len(value) == 2
        and number(value[0])
        and revision(value[1])
    )


_COUNT = members(value=number)

#: In a cursor, instead of a row: this part of the queue was read to its end.
_END = 'end'


class Cursor(NamedTuple):
    """The position after which to continue in each part of a queue: a row, `_END`, or None for the beginning."""

    at_once: Any = None
    planned: Any = None


BEGIN = Cursor()


class Ask(NamedTuple):
    """A request for up to `limit` rows of each part of a queue, after the position `after`."""

    queue: str
    limit: int
    after: Cursor = BEGIN


class WaitingPage(NamedTuple):
    """The rows of a queue that were read for an `Ask`."""

    #: In the order of delivery: the highest priority first, then the oldest message.
    rows: list[WaitingRow]
    #: The position after which to continue; None if there are no more rows.
    last: Cursor | None
    #: The due date of the first message that is planned for later than `until`; None if there is none, or if the queue
    #: was not read from its beginning.
    next_due: float | None


def read(client: Client, asks: Sequence[Ask], until: float, *, update: str = 'true') -> list[WaitingPage]:
    """Read queues in one request: messages due at once, and those planned for a time up to `until`.

    Return a page for each ask. `until` is in seconds since the epoch. `update` is CouchDB's parameter: `true` updates
    the index first, `false` reads it as it is, and `lazy` updates it afterwards. A message may have been claimed since:
    check its document. *Raises* the errors of `Client`.
    """
    params = {'update': update} if update != 'true' else {}
    if client.pace and client.pace.is_limited(RequestKind.QUERY):
        return [_read_sparingly(client, ask, until, params) for ask in asks]
    queries = [query for ask in asks for query in _queries(ask, until)]
    results = iter(query(client, queries, is_row, params))
    return [_page(ask, results) for ask in asks]


def _read_sparingly(client: Client, ask: Ask, until: float, params: Mapping[str, Any]) -> WaitingPage:
    """Read a queue with one query, if it is short; the parts of the view follow each other."""
    queries = _queries(ask, until)
    if ask.after != BEGIN:
        return _page(ask, iter(query(client, queries, is_row, params)))
    [found] = query(client, [{**queries[0], 'endkey': queries[-1]['endkey']}], is_row, params)
    at_once = [row for row in found if row['key'][1] < design.PLANNED]
    planned = found[len(at_once) :]
    if len(found) == ask.limit:  # there may be more
        return _page(ask, iter([at_once, *query(client, queries[1:], is_row, params)]))
    due = [row for row in planned if row['key'][2] <= until]
    return _page(ask, iter([at_once, due, planned[len(due) :][:1]]))


def first_due(client: Client, queues: Sequence[str], until: float, limit: int = 1) -> dict[str, list[str]]:
    """Return by queue the ids of up to `limit` messages due at once, or else planned for a time up to `until`.

    With one queue and a limit of 1 this is the cheapest read of a queue, 1 to 2.5 ms of the server's time. *Raises*
    the errors of `Client`.
    """

    def is_due(row: Document) -> bool:
        _, place, date = row['key']
        return bool(place < design.PLANNED or (place == design.PLANNED and date <= until))

    heads = query(client, [{**design.rows_of(queue), 'limit': limit, 'reduce': False} for queue in queues], is_row)
    return {queue: [row['id'] for row in filter(is_due, rows)] for queue, rows in zip(queues, heads, strict=True)}


def planned(client: Client, queues: Sequence[str], after: float, limit: int) -> list[WaitingRow]:
    """Return rows of up to `limit` messages of these queues with due dates from `after` on, the soonest first."""
    ranges = [{**design.planned_rows(queue, after), 'limit': limit, 'reduce': False} for queue in queues]
    rows = [WaitingRow.from_row(row) for rows in query(client, ranges, is_row) for row in rows]
    return sorted(rows, key=lambda row: (row.date, row.id))[:limit]


def count(client: Client, ranges: Sequence[Mapping[str, Any]]) -> int:
    """Return the total number of rows in ranges of keys, in one request."""
    return sum(int(row['value']) for rows in query(client, [dict(where) for where in ranges], _COUNT) for row in rows)


def query(
    client: Client,
    queries: Sequence[Document],
    row: Shape | Sequence[Shape],
    params: Mapping[str, Any] | None = None,
    view: str = 'waiting',
) -> list[list[Document]]:
    """Return the rows for each of several queries of a view, in one request, or in several to a service with limits.

    `row` is the shape of a row, or has one for each query.
    """
    found, each = list[list[Document]](), [row] * len(queries) if callable(row) else row
    while (start := len(found)) < len(queries):
        most = client.pace.most(RequestKind.QUERY) if client.pace else inf
        end = int(min(len(queries), start + most))
        with suppress(TooManyUnits):  # the next part is smaller
            found += _query(client, queries[start:end], each[start:end], params, view)
    return found


def _query(
    client: Client, queries: Sequence[Document], rows: Sequence[Shape], params: Mapping[str, Any] | None, view: str
) -> list[list[Document]]:
    each = [members(rows=items(row)) for row in rows]
    if len(queries) == 1:
        response = client.query(design.NAME, 'POST', view, params, queries[0], shape=each[0])
        return [response['rows']]
    response = client.query(
        design.NAME,
        'POST',
        f'{view}/queries',
        params,
        {'queries': queries},
        shape=members(results=exactly(*each)),
    )
    return [result['rows'] for result in response['results']]


def _queries(ask: Ask, until: float) -> list[Document]:
    name, queries = design.key_of(ask.queue), list[Document]()
    for after, start, end in (
        (ask.after.at_once, [name], [name, HIGHEST, {}]),
        (ask.after.planned, [name, design.PLANNED], [name, design.PLANNED, until]),
    ):
        if after != _END:
            begin = {'startkey': after['key'], 'startkey_docid': after['id']} if after else {'startkey': start}
            queries.append({**begin, 'endkey': end, 'limit': ask.limit, 'reduce': False})
    if ask.after == BEGIN:
        queries.append(
            {
                'startkey': [name, design.PLANNED, until],
                'endkey': [name, design.PLANNED, {}],
                'limit': 1,
                'reduce': False,
            }
        )
    return queries


def _page(ask: Ask, results: Iterator[list[Document]]) -> WaitingPage:
    at_once, planned = ([] if after == _END else next(results) for after in ask.after)
    later = next(results) if ask.after == BEGIN else []
    # CouchDB returns the row of the cursor again, unless its message was claimed since.
    seen = {after['id'] for after in ask.after if isinstance(after, dict)}
    rows = sorted(
        (WaitingRow.from_row(row) for row in at_once + planned if row['id'] not in seen),
        key=lambda row: (row.rank, row.date, row.id),
    )
    ends = [found[-1] if len(found) >= ask.limit else _END for found in (at_once, planned)]
    return WaitingPage(
        rows, None if ends == [_END, _END] else Cursor(*ends), WaitingRow.from_row(later[0]).date if later else None
    )
