"""The backlog of queues: how many messages wait in each, by state, and since when; and queues that are Celery's own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import TypedDict

from .. import design
from ..couchdb.client import Client
from ..couchdb.shapes import exactly, members, number, text
from ..design.rows import QueueCount
from ..documents.ids import QUEUE
from ..documents.queue import is_internal
from . import waiting

#: The shapes of the rows that are read here. The key of a malformed item can be anything.
_COUNT = members(value=number)
_COUNTED = members(key=exactly(lambda queue: True, number), value=number)
_WAITING = members(key=exactly(text, number, number))


class Backlog(TypedDict):
    """The messages in one queue that no consumer has claimed."""

    #: Messages that can be claimed now.
    ready: int
    #: Messages with a due date in the future.
    scheduled: int
    #: Messages that wait for a slot of their concurrency key or a start of their rate key.
    parked: int
    #: How long the oldest ready message has been due, in seconds; None without ready messages, or if it was not read.
    oldest: float | None


#: The backlog of a queue without unclaimed messages.
EMPTY: Backlog = {'ready': 0, 'scheduled': 0, 'parked': 0, 'oldest': None}


def backlog(client: Client, max_ages: float = inf) -> dict[str, Backlog]:
    """Return the messages that no consumer has claimed, by queue, for queues that have any; at most two requests.

    CouchDB needs about a millisecond for each queue and priority with messages to find the oldest ones. These are read
    only if there are at most `max_ages`.
    """
    found, parked = Counter[str](), Counter[str]()
    ranks: dict[str, list[int]] = defaultdict(list)  # by queue, the ranks of its messages that are not parked
    for row in map(QueueCount.from_row, client.view(design.NAME, 'waiting', _COUNTED, group_level=2)):
        if row.queue is not None and row.rank == design.PARKED:
            parked[row.queue] = row.total
        elif row.queue is not None:
            found[row.queue] += row.total
            ranks[row.queue].append(row.rank)
    is_read = sum(map(len, ranks.values())) <= max_ages
    scheduled, oldest = _dates(client, ranks, client.clock.now(), with_oldest=is_read)
    return {
        name: {
            'ready': max(0, found[name] - scheduled.get(name, 0)),
            'scheduled': scheduled.get(name, 0),
            'parked': parked[name],
            'oldest': oldest.get(name),
        }
        for name in {*found, *parked}
    }


def _dates(
    client: Client, ranks: Mapping[str, Sequence[int]], now: float, *, with_oldest: bool
) -> tuple[dict[str, int], dict[str, float]]:
    """Return by queue how many messages have a due date after `now`, and how long the oldest ready one has been due.

    `ranks` has the ranks of the messages of each queue. One request, or none.
    """
    planned = [name for name, known in ranks.items() if design.PLANNED in known]
    pairs = [(name, rank) for name, known in ranks.items() for rank in known if with_oldest]
    later = [design.planned_rows(name, now) for name in planned]
    # From date 1 on: the date of a malformed message is 0 in the view.
    first = [
        {'startkey': [key, rank, 1], 'endkey': [key, rank, now], 'limit': 1, 'reduce': False}
        for key, rank in ((design.key_of(name), rank) for name, rank in pairs)
    ]
    found = waiting.query(client, [*later, *first], [_COUNT] * len(later) + [_WAITING] * len(first))
    scheduled = {name: int(rows[0]['value']) for name, rows in zip(planned, found, strict=False) if rows}
    oldest: dict[str, float] = {}
    for (name, _), rows in zip(pairs, found[len(later) :], strict=True):
        for row in rows:
            oldest[name] = max(round(now - row['key'][2], 3), oldest.get(name, 0.0))
    return scheduled, oldest


def internal(client: Client, queues: Collection[str]) -> set[str]:
    """Return those of these queues that are for replies, events or remote control; one request, or none."""
    docs = client.find([QUEUE + queue for queue in queues]) if queues else ()
    return {doc['_id'].removeprefix(QUEUE) for doc in docs if doc and is_internal(doc)}
