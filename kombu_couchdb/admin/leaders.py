"""Leaders: the processes that currently do duties that only one process may do at a time, such as beat."""

from __future__ import annotations

from typing import TypedDict

from ..couchdb.client import Client
from ..couchdb.shapes import number
from ..documents.ids import LEADER
from ..leases.leader import LEASE_SECONDS


class LeaderStatus(TypedDict):
    """The leader of one duty, as its document says."""

    #: `beat:`, `parcels:` or `region:`, and a name.
    duty: str
    #: Host, process id and a random number; None if the last leader has stopped and no other has taken over.
    holder: str | None
    #: How long ago the leader has renewed its lease, in seconds; None if the date is malformed.
    renewed: float | None
    #: Whether its lease is current.
    alive: bool


def leaders(client: Client) -> list[LeaderStatus]:
    """Return the leader of each duty; one request."""
    now, found = client.clock.now(), list[LeaderStatus]()
    for doc in (row['doc'] for row in client.id_range(LEADER, docs=True)):
        if doc.get('type') != 'Leader':
            continue
        holder = doc['holder'] if isinstance(doc.get('holder'), str) else None
        renewed = round(max(0.0, now - doc['date']), 3) if number(doc.get('date')) else None
        is_current = holder is not None and renewed is not None and renewed < LEASE_SECONDS
        found.append(
            {'duty': doc['_id'].removeprefix(LEADER), 'holder': holder, 'renewed': renewed, 'alive': is_current}
        )
    return found
