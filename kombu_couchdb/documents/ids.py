"""Prefixes of document ids, by type of document."""

from __future__ import annotations

__all__ = [
    'BELL',
    'BINDING',
    'BROADCAST',
    'BROKER',
    'CONSUMER',
    'JOB',
    'LEADER',
    'NOTICE',
    'ONCE',
    'PARCEL',
    'PAUSE',
    'QUEUE',
    'RATE',
    'SLOT',
]

#: All documents in the broker's database that are not messages.
BROKER = 'broker:'

BINDING, BROADCAST, CONSUMER, LEADER, QUEUE = (
    BROKER + kind for kind in ('binding:', 'broadcast:', 'consumer:', 'leader:', 'queue:')
)

#: Pauses of queues. The prefix sorts between `BROADCAST` and `CONSUMER`, so that a busy consumer reads these documents
#: with the others that it polls.
PAUSE = BROKER + 'closed:'

#: In the broadcasts database: the notice, and the bells of queues.
NOTICE, BELL = 'notice', 'bell:'

#: Unique jobs; messages published within `idempotent`; messages that a worker moved from a database of parcels.
#: The ids of other messages have no prefix.
JOB, ONCE, PARCEL = 'job:', 'once:', 'parcel:'

#: Slots of concurrency limits. They are not below `BROKER`: the changes feeds of consumers report deletions there.
SLOT = 'slot:'

#: The next starts of rate keys. Also the beginning of `parked.key` of messages that wait for one.
RATE = 'rate:'
