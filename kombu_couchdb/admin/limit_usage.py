"""The limits in use: which keys have taken slots or recent starts, and how many messages wait for them.

Only messages say how high a limit is. The database knows the slots, the starts and the parked messages of a key.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from .. import design
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import exactly, members, number, text
from ..documents import rates
from ..documents.ids import RATE, SLOT
from ..queues import waiting

#: How many slots, rate keys and keys of parked messages are read at most, each.
MAX_READ = 1000

#: The rows of parked messages, reduced to their keys.
_PARKED = members(key=exactly(text, lambda nothing: True, lambda key: True), value=members(count=number))


class LimitUsage(TypedDict):
    """One key."""

    key: str
    #: What it limits: how many tasks run at the same time, or how many start in a period.
    limits: Literal['concurrency', 'rate']
    #: The slots that consumers have taken, one for each claimed message; None for rates.
    slots: int | None
    #: How long ago the oldest of these slots, or the last start, was taken, in seconds; None if that is unknown.
    age: float | None
    #: In how many seconds the next message may start, 0.0 for now; None for concurrency.
    next: float | None
    #: Messages that wait for a slot or a start.
    parked: int


def limit_usage(client: Client) -> list[LimitUsage]:
    """Return the keys in use: those with the most parked messages first. Three requests, however many messages wait.

    Of slots, rate keys and keys of parked messages, `MAX_READ` are read. *Raises* the errors of `Client`.
    """
    now, found = client.clock.now(), dict[tuple[str, str], LimitUsage]()

    def usage(limits: Literal['concurrency', 'rate'], key: str) -> LimitUsage:
        return found.setdefault(
            (limits, key),
            {
                'key': key,
                'limits': limits,
                'slots': 0 if limits == 'concurrency' else None,
                'age': None,
                'next': None,
                'parked': 0,
            },
        )

    for doc in _documents(client, SLOT, 'Slot'):
        slot = usage('concurrency', doc['key'])
        slot['slots'] = (slot['slots'] or 0) + 1
        slot['age'] = max(slot['age'] or 0.0, _age(doc, now) or 0.0)
    for doc in _documents(client, RATE, 'Rate'):
        rate = usage('rate', doc['key'])
        rate['age'], rate['next'] = _age(doc, now), round(max(0.0, rates.next_of(doc, now) - now), 3)
    keys = {'startkey': ['parked', None], 'endkey': ['parked', None, LAST], 'group_level': 3, 'limit': MAX_READ}
    [rows] = waiting.query(client, [keys], _PARKED, view='leases')
    for row in rows:
        parked = design.queue_of(row['key'][2])
        if parked is not None:
            queue_and_key = rates.queue_and_key(parked)
            waiting_for = usage('rate', queue_and_key[1]) if queue_and_key else usage('concurrency', parked)
            waiting_for['parked'] += int(row['value']['count'])
    return sorted(found.values(), key=lambda one: (-one['parked'], -(one['slots'] or 0), one['limits'], one['key']))


def _documents(client: Client, prefix: str, kind: str) -> list[Document]:
    docs = (row['doc'] for row in client.id_range(prefix, docs=True, limit=MAX_READ))
    return [doc for doc in docs if doc.get('type') == kind and isinstance(doc.get('key'), str)]


def _age(doc: Document, now: float) -> float | None:
    date: Any = doc.get('date')
    return round(max(0.0, now - date), 3) if number(date) else None
