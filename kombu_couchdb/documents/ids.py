"""Prefixes of document ids, by type of document."""

from __future__ import annotations

__all__ = ['BINDING', 'BROADCAST', 'BROKER', 'CONSUMER', 'JOB', 'LEADER', 'ONCE', 'PARCEL', 'QUEUE', 'SLOT']

#: All documents in the broker's database that are not messages.
BROKER = 'broker:'

BINDING, BROADCAST, CONSUMER, LEADER, QUEUE = (
    BROKER + kind for kind in ('binding:', 'broadcast:', 'consumer:', 'leader:', 'queue:')
)

#: Unique jobs; messages published within `idempotent`; messages that a worker moved from a database of parcels.
#: The ids of other messages have no prefix.
JOB, ONCE, PARCEL = 'job:', 'once:', 'parcel:'

#: Slots of concurrency limits. They are not below `BROKER`: the changes feeds of consumers report deletions there.
SLOT = 'slot:'
