"""Look-ups of what nobody reports: how messages ended that no worker has ended, and when to look.

A message that expired, was deleted or became a dead letter has no result. So whoever waits for the end of a parcel's
task looks up its message in the broker's database: first after a minute, then after pauses that double up to ten
minutes.
The tombstone of a message that nobody has acknowledged says so (`workitem.dropped`). That of an acknowledged one says
nothing about its task, which may still run, may have been sent again, or may ignore its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from celery import states

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem

#: A parcel: its source and its id, see `parcel.moved_id`.
_Parcel = TypeVar('_Parcel', bound=tuple[str, str])

#: The seconds until the first look-up of something, and the longest pause between two.
_FIRST_SECONDS, _MAX_SECONDS = 60.0, 600.0


def is_old(since: float, now: float) -> bool:
    """Tell whether something that waits since a time is to be looked up."""
    return now - since >= _FIRST_SECONDS


def pause(since: float, now: float) -> float:
    """Return the seconds until the next look-up of something that waits since a time."""
    return min(max(now - since, _FIRST_SECONDS), _MAX_SECONDS)


class End(NamedTuple):
    """The end of a task whose message no worker has ended."""

    state: str
    reason: str


_DROPPED = End(states.REVOKED, 'the message of the task expired, or was deleted, before a worker acknowledged it')


def ends_of_messages(broker: Client, parcels: Sequence[_Parcel]) -> dict[_Parcel, End | None]:
    """Return how those of these parcels have ended whose messages have no result; up to three requests.

    None is for a parcel of which the broker's database has no trace: a vacuum has purged the tombstone of its message,
    or its publisher has forged a receipt.
    """
    of = {parcel.moved_id(*one): one for one in parcels}
    docs = dict(zip(of, broker.find(list(of)), strict=True))
    gone = sorted(broker.known([name for name, doc in docs.items() if doc is None]))
    # In a cluster the node that answers first may have an unproven deletion: each copy that responds is read.
    everywhere = {'r': broker.replicas} if broker.replicas > 1 else {}
    found = broker.fetch_leaves(gone, **everywhere)
    # `_bulk_get` of the embedded server leaves out deleted documents.
    leaves = {name: of_one or broker.leaves(name) for name, of_one in zip(gone, found, strict=True)}
    ends: dict[_Parcel, End | None] = {}
    for name, one in of.items():
        doc = docs[name]
        if doc is not None and workitem.is_dead(doc):
            ends[one] = End(states.FAILURE, f'the message of the task is a dead letter: {doc.get("reason")}')
        elif name in leaves and _is_dropped(leaves[name]):
            ends[one] = _DROPPED
        elif doc is None and name not in leaves:
            ends[one] = None
    return ends


def _is_dropped(leaves: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a message was deleted and nobody has acknowledged it; `leaves` are all its leaf revisions."""
    decided = [leaf for leaf in leaves if not leaf.get('void')]  # the others are withdrawn claims
    return bool(decided) and all(leaf.get('_deleted') and leaf.get('dropped') for leaf in decided)
