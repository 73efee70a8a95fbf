"""What the regions have for each other, in each direction, and what is wrong.

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


class Direction(TypedDict, total=False):
    """What the database of the region `source` has for the region `target`."""

    source: str
    target: str
    #: By state, see `Records`: the tasks that it gave to the target; and the `results` that return there.
    numbers: dict[str, Tally]
    #: Why the leader of the source cannot read the database of the target; None if it can.
    error: str | None
    #: The duration of a request.
    response: float
    #: Why the database of the source cannot be read from here, and what to do. The three members above are left out.
    unreadable: str


def leader_of(broker: Client, name: str) -> str | None:
    """Return the worker that leads in a region; `broker` is for the database of its broker."""
    return next((lead['name'] for lead in leaders(broker) if lead['alive'] and lead['duty'] == f'region:{name}'), None)


def outgoing(regions: Client, own: str, others: Collection[str]) -> list[Direction]:
    """Return what the database of the region `own` has for the others, also for removed ones that still have records.

    `others` are those in the option `regions`. *Raises* the errors of `Client`.
    """
    found = [direction(regions, own, name) for name in sorted({*others, *Records(regions).regions()} - {own})]
    for way in found:
        if way['target'] not in others:
            way['error'] = 'it is not in the transport option regions'
    return found


def direction(client: Client, source: str, target: str) -> Direction:
    """Return what the database of the region `source`, that of `client`, has for `target`; *raises* the same."""
    began = time.monotonic()
    errors = (client.get_or_none(region_id(source)) or {}).get('errors')
    response, now = time.monotonic() - began, client.clock.now()
    records = Records(client, target)
    by_state: dict[str, list[Document]] = {state: [] for state in records.states}
    for doc in islice(records.facts(), _MAX_DOCS):
        by_state[records.state_of(doc)].append(doc)
    by_state['results'] = client.select({}, prefix=results_to(target), limit=_MAX_DOCS, fields=['date'])
    return {
        'source': source,
        'target': target,
        'numbers': {state: _tally(docs, records.states.get(state, 'date'), now) for state, docs in by_state.items()},
        'error': str(errors[target]) if isinstance(errors, dict) and target in errors else None,
        'response': response,
    }


def _tally(docs: Collection[Mapping[str, Any]], date: str, now: float) -> Tally:
    dates = [found for doc in docs if is_number(found := doc.get(date))]
    reasons = (str(doc.get('delayed') or doc.get('reason')) for doc in docs)
    return {'count': len(docs), 'oldest': max(0.0, now - min(dates)) if dates else None, 'reason': next(reasons, None)}


def unreadable(name: str, client: Client, error: CouchDBError) -> str:
    """Return in words why the database of the region `name`, that of `client`, cannot be read, and what to do."""
    if isinstance(error, DatabaseMissing):
        return f'region {name} is not set up yet: run "couchdb regions setup" there ({error})'
    if not isinstance(error, AccessDenied):
        return f'region {name} does not respond to this machine; the workers must reach it ({error})'
    if 'not allowed to access' not in str(error):
        return (
            f'region {name} cannot be read: create its user there, or correct its URL in the option regions ({error})'
        )
    member = f' --member {client.user}' if client.user else ''
    return f'region {name} cannot be read yet: run "couchdb regions setup{member}" there ({error})'
