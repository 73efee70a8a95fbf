"""The other regions: what this region gave to them, what waits in their databases for it, and what is wrong.

Durations are seconds. The numbers come from several requests, one after the other, while workers run.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, TypedDict

from ..admin.status import leaders
from ..couchdb.client import Client, Document
from ..errors import AccessDenied, CouchDBError, DatabaseMissing
from ..values import is_number
from .records import Records
from .region import region_id, results_to

#: The maximum number of documents of one kind that are counted for each region.
_MAX_DOCS = 10_000


class Tally(TypedDict):
    """A number of documents, the age of the oldest one that has a date, and why one of them waits or was refused."""

    count: int
    oldest: float | None
    reason: str | None


class Direction(TypedDict):
    """What the database of one region has for another one."""

    #: By state, see `Records`: the tasks that it gave to the other region.
    given: dict[str, Tally]
    #: The results that return there.
    results: Tally
    #: Why its leader cannot read the database of the other region; None if it can.
    error: str | None
    #: The duration of a request.
    response: float


class RegionStatus(TypedDict):
    """The state of another region."""

    name: str
    #: The worker that leads in this region; None if there is none.
    leader: str | None
    #: What this region has for it.
    outgoing: Direction
    #: What it has for this region; None if it does not respond, or was not asked, and why it does not respond.
    incoming: Direction | None
    unreadable: str | None


def look(regions: Client, broker: Client, own: str, others: Collection[str]) -> list[RegionStatus]:
    """Return the other regions as the databases of the region `own` show them; *raises* `DatabaseMissing`.

    `others` are those in the option `regions`. Removed ones that still have records are also returned.
    """
    alive = {lead['duty']: lead['name'] for lead in leaders(broker) if lead['alive']}
    leader = alive.get(f'region:{own}')
    return [
        {
            'name': name,
            'leader': leader,
            'outgoing': direction(regions, own, name, led=leader is not None),
            'incoming': None,
            'unreadable': None if name in others else 'it is not in the transport option regions',
        }
        for name in sorted({*others, *Records(regions).regions()})
    ]


def direction(client: Client, own: str, other: str, *, led: bool = True) -> Direction:
    """Return what the database of region `own`, that of `client`, has for region `other`; *raises* what prevents that.

    The errors of its leader are left out unless it is `led`.
    """
    began = time.monotonic()
    errors = (client.get_or_none(region_id(own)) or {}).get('errors')
    response, now = time.monotonic() - began, client.clock.now()
    records = Records(client, other)
    by_state: dict[str, list[Document]] = {state: [] for state in records.states}
    for doc in islice(records.facts(), _MAX_DOCS):
        by_state[records.state_of(doc)].append(doc)
    results = client.select({}, prefix=results_to(other), limit=_MAX_DOCS, fields=['date'])
    return {
        'given': {state: _tally(docs, records.states[state], now) for state, docs in by_state.items()},
        'results': _tally(results, 'date', now),
        'error': str(errors[other]) if led and isinstance(errors, dict) and other in errors else None,
        'response': response,
    }


def _tally(docs: Collection[Mapping[str, Any]], date: str, now: float) -> Tally:
    dates = [found for doc in docs if is_number(found := doc.get(date))]
    reasons = (str(doc.get('delayed') or doc.get('reason')) for doc in docs)
    return {'count': len(docs), 'oldest': max(0.0, now - min(dates)) if dates else None, 'reason': next(reasons, None)}


def unready(client: Client, name: str) -> str | None:
    """Read the database of region `name`; return in words what prevents that and what to do, or None."""
    try:
        client.info()
    except DatabaseMissing as exc:
        return f'region {name} is not set up yet: run "couchdb regions setup" there ({exc})'
    except AccessDenied as exc:
        if 'not allowed to access' in str(exc):
            member = f' --member {client.user}' if client.user else ''
            return f'region {name} cannot be read yet: run "couchdb regions setup{member}" there ({exc})'
        return f'region {name} cannot be read: create its user there, or correct its URL in the option regions ({exc})'
    except CouchDBError as exc:
        return f'region {name} does not respond to this machine; the workers must reach it ({exc})'
    return None
