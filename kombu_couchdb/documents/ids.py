"""Prefixes of document ids, by kind of document."""

from __future__ import annotations

__all__ = ['BINDING', 'BROADCAST', 'BROKER', 'CONSUMER', 'JOB', 'LEADER', 'ONCE', 'PARCEL', 'QUEUE']

#: Every document of a broker that is no message.
BROKER = 'broker:'

BINDING, BROADCAST, CONSUMER, LEADER, QUEUE = (
    BROKER + kind for kind in ('binding:', 'broadcast:', 'consumer:', 'leader:', 'queue:')
)

#: A unique job; a message that is published once; one that was moved out of a database of parcels. Others have no prefix.
JOB, ONCE, PARCEL = 'job:', 'once:', 'parcel:'
