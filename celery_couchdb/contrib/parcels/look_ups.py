"""Look-ups of what nobody reports: how messages ended that have no result, and when to look.

A message that expired, was deleted or became a dead letter has no result. So whoever waits for the result of a parcel
looks up its message in the broker's database: first after a minute, then after pauses that double up to ten minutes.
The tombstone of a message that nobody has acknowledged says so (`workitem.dropped`). That of an acknowledged one says
nothing about its task, which may still run, may have been sent again, or may ignore its result.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from celery import states

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem

#: What is looked up.
_Key = TypeVar('_Key')
#: A parcel: its source and its id, see `parcel.moved_id`.
_Parcel = TypeVar('_Parcel', bound=tuple[str, str])

#: The seconds until the first look-up of something, and the longest pause between two.
_FIRST_SECONDS, _MAX_SECONDS = 60.0, 600.0

#: How often it is looked what is due, in seconds. This takes no request.
_CHECK_SECONDS = 15.0

#: The number of things that are looked up together.
MAX_TOGETHER = 200


class LookUps(Generic[_Key]):
    """When things are looked up, as monotonic times."""

    def __init__(self) -> None:
        #: By key: when it is looked up next, and the pause before that.
        self._due: dict[_Key, tuple[float, float]] = {}
        #: The time before which `take` returns nothing.
        self.next_at = 0.0

    def take(self, keys: Collection[_Key]) -> list[_Key]:
        """Return those of these keys, at most 200, that are to be looked up now. All others are forgotten."""
        now = time.monotonic()
        if now < self.next_at:
            return []
        first = (now + _FIRST_SECONDS, _FIRST_SECONDS)
        self._due = {key: self._due.get(key, first) for key in keys}
        due = [key for key, (at, _) in self._due.items() if at <= now]
        self.next_at = now if len(due) > MAX_TOGETHER else now + _CHECK_SECONDS
        for key in due[:MAX_TOGETHER]:
            pause = min(2 * self._due[key][1], _MAX_SECONDS)
            self._due[key] = now + pause, pause
        return due[:MAX_TOGETHER]


class End(NamedTuple):
    """The end of a task: the members of a receipt, see `parcel.with_outcome`. `date` is None if it is not known."""

    state: str
    result: Any = None
    error: str | None = None
    date: float | None = None


_DROPPED = End(states.REVOKED, error='the message of the task expired, or was deleted, before a worker acknowledged it')


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
            ends[one] = End(states.FAILURE, error=f'the message of the task is a dead letter: {doc.get("reason")}')
        elif name in leaves and _is_dropped(leaves[name]):
            ends[one] = _DROPPED
        elif doc is None and name not in leaves:
            ends[one] = None
    return ends


def _is_dropped(leaves: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a message was deleted and nobody has acknowledged it; `leaves` are all its leaf revisions."""
    decided = [leaf for leaf in leaves if not leaf.get('void')]  # the others are withdrawn claims
    return bool(decided) and all(leaf.get('_deleted') and leaf.get('dropped') for leaf in decided)
