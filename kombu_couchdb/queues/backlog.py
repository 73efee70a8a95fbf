"""The backlog of queues: how many messages wait in each, by state, and since when; and queues that are Celery's own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import TypedDict

from .. import design
from ..couchdb.client import Client, Document
from ..couchdb.shapes import exactly, members, number, text
from ..design.rows import QueueCount
from ..documents.ids import QUEUE
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
    #: How long the oldest ready message has been due, in seconds; None without ready messages.
    oldest: float | None


#: The backlog of a queue without unclaimed messages.
EMPTY: Backlog = {'ready': 0, 'scheduled': 0, 'parked': 0, 'oldest': None}


def backlog(client: Client) -> dict[str, Backlog]:
    """Return the messages that no consumer has claimed, by queue, for queues that have any; at most three requests."""
    found, parked = Counter[str](), Counter[str]()
    ranks: dict[str, list[int]] = defaultdict(list)  # by queue, the ranks of its messages that are not parked
    for row in map(QueueCount.of, client.view(design.NAME, 'waiting', _COUNTED, group_level=2)):
        if row.queue is not None and row.rank == design.PARKED:
            parked[row.queue] = row.total
        elif row.queue is not None:
            found[row.queue] += row.total
            ranks[row.queue].append(row.rank)
    now = client.clock.now()
    scheduled = _scheduled(client, [name for name, known in ranks.items() if design.PLANNED in known], now)
    oldest = _oldest(client, ranks, now)
    return {
        name: {
            'ready': max(0, found[name] - scheduled.get(name, 0)),
            'scheduled': scheduled.get(name, 0),
            'parked': parked[name],
            'oldest': oldest.get(name),
        }
        for name in {*found, *parked}
    }


def _scheduled(client: Client, names: list[str], now: float) -> dict[str, int]:
    """Return the number of messages with a due date after `now`, by queue."""
    responses = waiting.query(client, [design.planned_rows(name, now) for name in names], _COUNT)
    return {name: rows[0]['value'] for name, rows in zip(names, responses, strict=True) if rows}


def _oldest(client: Client, ranks: dict[str, list[int]], now: float) -> dict[str, float]:
    """Return for each queue with ready messages how long the oldest one has been due, in seconds."""
    pairs = [(name, rank) for name, known in ranks.items() for rank in known]
    # From date 1 on: the date of a malformed message is 0 in the view.
    responses = waiting.query(
        client,
        [
            {'startkey': [key, rank, 1], 'endkey': [key, rank, now], 'limit': 1, 'reduce': False}
            for key, rank in ((design.key_of(name), rank) for name, rank in pairs)
        ],
        _WAITING,
    )
    oldest: dict[str, float] = {}
    for (name, _), rows in zip(pairs, responses, strict=True):
        for row in rows:
            oldest[name] = max(round(now - row['key'][2], 3), oldest.get(name, 0.0))
    return oldest


def is_internal(doc: Document) -> bool:
    """Tell whether a Queue document is that of a queue for replies, events or remote control.

    Celery declares these with `auto_delete` and a lifetime.
    """
    arguments = doc.get('arguments')
    return bool(doc.get('auto_delete') and isinstance(arguments, dict) and 'x-expires' in arguments)


def internal(client: Client, queues: Collection[str]) -> set[str]:
    """Return those of these queues that are for replies, events or remote control; one request, or none."""
    docs = client.find([QUEUE + queue for queue in queues]) if queues else ()
    return {doc['_id'].removeprefix(QUEUE) for doc in docs if doc and is_internal(doc)}
