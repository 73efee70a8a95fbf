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
from ..parcels.parcel import moved_id
from ..values import is_number
from . import records
from .region import STATES, records_to, region_id, results_to, state_of, wants_of

#: The maximum number of documents that are read of one kind.
_MAX_DOCS = 10_000

#: The rows that one request reads without documents.
_BATCH_ROWS = 5_000


class Tally(TypedDict):
    """A number of documents."""

    count: int
    #: Whether there may be more: only 10,000 are read.
    more: bool
    #: The age of the oldest; None without one that has a date.
    oldest: float | None


class GivenAway(TypedDict):
    """The records of a region for another one."""

    #: The tasks that the other region has not taken, as far as it has said; and the age of the oldest one that is not
    #: delayed.
    sent: Tally
    untaken: float | None
    #: The number of tasks that the leaders cannot move now, and the reason for one of them.
    delayed: int
    reason: str | None
    there: Tally
    refused: Tally


class Remote(TypedDict):
    """What the database of another region says."""

    #: The duration of a request.
    response: float
    #: Results that wait there for this region.
    back: Tally
    #: The tasks that it gave to this region.
    given: GivenAway
    #: The number of tasks that it would run for other regions.
    wanted: int
    #: Why its leader cannot read the database of this region; None if it can.
    error: str | None


class RegionStatus(TypedDict):
    """The state of another region."""

    name: str
    #: The worker that leads in this region; None if there is none.
    leader: str | None
    #: The tasks that this region gave to it.
    given: GivenAway
    #: Why the leader of this region cannot read its database; None if it can.
    error: str | None
    #: What its database says; None if it does not respond, or was not asked, and why it does not respond.
    remote: Remote | None
    unreadable: str | None


def look(regions: Client, broker: Client, own: str, others: Collection[str]) -> list[RegionStatus]:
    """Return the other regions as the databases of the region `own` show them; *raises* `DatabaseMissing`.

    `others` are those in the option `regions`. Removed ones that still have records are also returned.
    """
    duty = f'region:{own}'
    leader = next((lead['name'] for lead in leaders(broker) if lead['alive'] and lead['duty'] == duty), None)
    errors = _errors(regions.get_or_none(region_id(own)) or {}) if leader else {}
    return [
        {
            'name': name,
            'leader': leader,
            'given': _given(regions, name),
            'error': errors.get(name),
            'remote': None,
            'unreadable': None if name in others else 'it is not in the transport option regions',
        }
        for name in sorted({*others, *records.regions(regions)})
    ]


def remote(client: Client, own: str, other: str) -> Remote:
    """Return what the database of region `other` says; `client` is for it. *Raises* what prevents the requests."""
    began = time.monotonic()
    doc = client.get_or_none(region_id(other)) or {}
    response = time.monotonic() - began
    returning = list(islice(records.documents(client, results_to(own)), _MAX_DOCS))
    return {
        'response': response,
        'back': _tally(client, returning, 'date', len(returning) == _MAX_DOCS),
        'given': _given(client, own),
        'wanted': sum(wants_of(doc).values()),
        'error': _errors(doc).get(own),
    }


def moving(client: Client, name: str, prefix: str) -> set[str]:
    """Return the ids that the messages of these records have, or will have, in the broker's database.

    The records are those in the database of region `name` whose ids begin with `prefix`. A message whose record still
    exists is published again, unless the broker's database knows that it existed. *Raises* the errors of `Client`.
    """
    found, start = set[str](), prefix
    while rows := client.id_range(start, to=prefix, limit=_BATCH_ROWS):
        found.update(moved_id(f'region {name}', row['id']) for row in rows)
        start = f'{rows[-1]["id"]} '
    return found


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


def _given(client: Client, to: str) -> GivenAway:
    docs = list(islice(records.documents(client, records_to(to)), _MAX_DOCS))
    more = len(docs) == _MAX_DOCS
    by_state: dict[str, list[Document]] = {state: [] for state in STATES}
    for doc in docs:
        by_state[state_of(doc)].append(doc)
    delayed = [doc for doc in by_state['sent'] + by_state['withdrawn'] if 'delayed' in doc]
    others = [doc for doc in by_state['sent'] if 'delayed' not in doc]
    return {
        'sent': _tally(client, by_state['sent'], 'published', more),
        'untaken': _tally(client, others, 'published', more)['oldest'],
        'delayed': len(delayed),
        'reason': str(delayed[0]['delayed']) if delayed else None,
        'there': _tally(client, by_state['there'], 'taken', more),
        'refused': _tally(client, by_state['refused'], 'failed', more),
    }


def _tally(client: Client, docs: Collection[Mapping[str, Any]], date: str, more: bool) -> Tally:
    dates = [found for doc in docs if is_number(found := doc.get(date))]
    oldest = max(0.0, client.clock.now() - min(dates)) if dates else None
    return {'count': len(docs), 'more': more, 'oldest': oldest}


def _errors(doc: Mapping[str, Any]) -> dict[str, str]:
    found = doc.get('errors')
    return {name: str(text) for name, text in found.items()} if isinstance(found, dict) else {}
