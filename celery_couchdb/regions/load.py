"""The load of the queues of a region: waiting and claimed messages, and how many tasks its workers can run at once."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kombu_couchdb import design
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import members, number
from kombu_couchdb.design.rows import ClaimCount, QueueCount
from kombu_couchdb.documents.ids import CONSUMER, PAUSE
from kombu_couchdb.documents.workitem import HIGHEST
from kombu_couchdb.leases.lease_expiry import ends_at

__all__ = ['Load', 'loads', 'waiting']

#: The end of the names of the queues through which workers receive remote control (in kombu.pidbox).
_MAILBOX = '.pidbox'

_COUNT = members(value=number)
_CLAIMS = members(value=members(count=number))


class Load(NamedTuple):
    """The load of one queue."""

    #: How many tasks the workers of the queue can run at once.
    capacity: int
    #: How many messages wait or are claimed.
    messages: int


def loads(client: Client, concurrency: int) -> dict[str, Load]:
    """Return the load of each queue of tasks that Celery workers serve and nobody has paused; three requests.

    No document says how many tasks another worker runs at once: each worker counts as `concurrency`.
    """
    now, workers, paused = client.clock.now(), Counter[str](), set[str]()
    for row in client.id_range(PAUSE, to=CONSUMER, docs=True):
        doc = row['doc']
        if doc.get('type') == 'Pause':
            paused.add(str(doc.get('queue')))
        elif 'worker' in doc and ends_at(doc) > now:
            queues = map(str, doc.get('queues') or ())
            workers.update(queue for queue in queues if not queue.endswith(_MAILBOX))
    messages = waiting(client)
    claims = client.view(design.NAME, 'leases', _CLAIMS, startkey=['claim'], endkey=['claim', {}], group_level=3)
    for claim in map(ClaimCount.of, claims):
        messages[str(claim.queue)] += claim.total
    return {queue: Load(workers[queue] * concurrency, messages[queue]) for queue in workers.keys() - paused}


def waiting(client: Client) -> Counter[str]:
    """Return how many messages of each queue wait and are due at once; one request."""
    counts = map(QueueCount.of, client.view(design.NAME, 'waiting', _COUNT, group_level=2))
    found = Counter[str]()
    for count in counts:
        if 0 <= count.rank <= HIGHEST:
            found[str(count.queue)] += count.total
    return found
