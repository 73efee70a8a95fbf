"""Reading the view `waiting`: the items of queues that nobody holds, for any number of queues in one request.

A queue has two parts there: what is due at once, by priority and time of publishing, and what is planned, by its due date. Only
the second is read up to a time, so an item that is due at once is found whatever the clocks said when it was published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import design
from ..couchdb.client import Client, Document
from ..couchdb.shapes import Shape, exactly, items, members, number, revision, text
from ..design.rows import WaitingRow
from ..documents.workitem import HIGHEST

__all__ = ['BEGIN', 'HORIZON', 'Ask', 'Cursor', 'Page', 'count', 'planned', 'query', 'read']

#: How far beyond now planned items are read, in seconds, to have them at hand when they are due.
HORIZON = 5.0

_ROW = members(id=text, key=exactly(text, number, number), value=exactly(number, revision))
_COUNT = members(value=number)

#: In the place of a row: this part of the queue was read to its end.
_END = 'end'


class Cursor(NamedTuple):
    """Where to read on in the two parts of a queue: behind which row, or `_END`; None is the beginning."""

    at_once: Any = None
    planned: Any = None


BEGIN = Cursor()


class Ask(NamedTuple):
    """What is asked of a queue: up to `limit` rows of each part behind `after`."""

    queue: str
    limit: int
    after: Cursor = BEGIN


class Page(NamedTuple):
    """What a queue answers."""

    #: Next first: the highest priority, then the oldest.
    rows: list[WaitingRow]
    #: Where to read on; None if this was all.
    last: Cursor | None
    #: When the first of what is planned for later is due, None if there is none; known when a queue is read from its beginning.
    next_due: float | None


def read(client: Client, asks: Sequence[Ask], until: float, *, update: str = 'true') -> list[Page]:
    """Read queues in one request: what is due at once, and what is planned for a time up to `until`.

    `update` is CouchDB's: with `false` the index is read as it stands, with `lazy` it is brought up to date afterwards. An item
    may have been claimed a moment ago: its document decides.
    """
    queries = [query for ask in asks for query in _queries(ask, until)]
    answers = iter(query(client, queries, _ROW, {'update': update} if update != 'true' else {}))
    return [_page(ask, answers) for ask in asks]


def planned(client: Client, queues: Sequence[str], after: float, limit: int) -> list[WaitingRow]:
    """Return up to `limit` items of these queues that are planned for later than `after`, the soonest first."""
    ranges = [{**design.rows_of(queue, design.PLANNED, after), 'limit': limit, 'reduce': False} for queue in queues]
    rows = [WaitingRow.of(row) for rows in query(client, ranges, _ROW) for row in rows]
    return sorted(rows, key=lambda row: (row.date, row.id))[:limit]


def count(client: Client, ranges: Sequence[Mapping[str, Any]]) -> int:
    """Return how many rows there are in ranges of keys together, in one request."""
    return sum(int(row['value']) for rows in query(client, [dict(where) for where in ranges], _COUNT) for row in rows)


def query(
    client: Client, queries: Sequence[Document], row: Shape, params: Mapping[str, Any] | None = None
) -> list[list[Document]]:
    """Return the rows, each of the shape `row`, of several reads of the view, in one request."""
    if not queries:
        return []
    answer = client.request(
        'POST',
        f'/_design/{design.NAME}/_view/waiting/queries',
        params,
        {'queries': queries},
        repeat=True,
        shape=members(results=exactly(*[members(rows=items(row))] * len(queries))),
    )
    return [result['rows'] for result in answer['results']]


def _queries(ask: Ask, until: float) -> list[Document]:
    name, queries = design.key_of(ask.queue), list[Document]()
    for after, start, end in (
        (ask.after.at_once, [name], [name, HIGHEST, {}]),
        (ask.after.planned, [name, design.PLANNED], [name, design.PLANNED, until]),
    ):
        if after != _END:
            behind = {'startkey': after['key'], 'startkey_docid': after['id']} if after else {'startkey': start}
            queries.append({**behind, 'endkey': end, 'limit': ask.limit, 'reduce': False})
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


def _page(ask: Ask, answers: Any) -> Page:
    at_once, planned = ([] if after == _END else next(answers) for after in ask.after)
    later = next(answers) if ask.after == BEGIN else []
    # The row to read on from may be there once more, or have been claimed.
    seen = {after['id'] for after in ask.after if isinstance(after, dict)}
    rows = sorted(
        (WaitingRow.of(row) for row in at_once + planned if row['id'] not in seen),
        key=lambda row: (row.rank, row.date, row.id),
    )
    ends = [found[-1] if len(found) >= ask.limit else _END for found in (at_once, planned)]
    return Page(rows, None if ends == [_END, _END] else Cursor(*ends), later[0]['key'][2] if later else None)
