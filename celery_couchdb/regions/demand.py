"""The demand of a region: how many tasks of each queue it would run for other regions, as its Region document says.

It is written only when a queue begins or ceases to have nothing to do, and after lent tasks have arrived. So a region
that stays idle, or busy, writes nothing. It follows from the load of the queues: waiting and claimed messages, and how
many tasks the workers can run at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kombu_couchdb import design
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import members, number
from kombu_couchdb.design.rows import ClaimCount, QueueCount
from kombu_couchdb.documents.ids import CONSUMER, PAUSE
from kombu_couchdb.documents.task_message import HIGHEST
from kombu_couchdb.leases.lease import ends_at
from kombu_couchdb.log import get_logger
from kombu_couchdb.regions import region

from .polling import Looks

logger = get_logger(__name__)

#: The interval at which the load is read, unless nothing happens (`polling`); and for some time after lent tasks have
#: arrived.
_LOOK_SECONDS, _SOON_SECONDS, _LENT_SECONDS = 5.0, 1.0, 60.0

#: The maximum number of tasks of a queue that a region asks for at once, and by how much short tasks raise the number.
_MAX_TASKS, _MAX_FACTOR = 100, 32


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


class Demand:
    """Writes the Region document of this region, for the leader."""

    def __init__(self, broker: Client, regions: Client, own: str, concurrency: int, looks: Looks) -> None:
        self._broker, self._regions, self._own, self._concurrency = broker, regions, own, concurrency
        self._looks = looks
        self.reset()

    def reset(self) -> None:
        """Forget what was written: another process may have been the leader."""
        self._doc: dict[str, object] | None = None
        self._arrived, self._lent_until = 0, 0.0
        self._looks.reset()
        self._factors: Counter[str] = Counter()

    @property
    def next_at(self) -> float:
        """The monotonic time of the next step."""
        return self._looks.next_at

    def note_arrived(self, count: int) -> None:
        """Note that lent tasks have arrived."""
        if count:
            self._arrived, self._lent_until = self._arrived + count, time.monotonic() + _LENT_SECONDS
            self.note_activity()

    def note_activity(self) -> None:
        """Note that the load may have changed."""
        self._looks.soon(_SOON_SECONDS)

    def step(self) -> None:
        """Read the load if it is time, and write the document if it has to change."""
        now = time.monotonic()
        if now < self.next_at:
            return
        is_lent_to = now < self._lent_until
        self._looks.begin(_SOON_SECONDS if is_lent_to else _LOOK_SECONDS)
        found = loads(self._broker, self._concurrency)
        self._write(found)
        is_busy = any(load.messages for load in found.values())
        self._looks.end(found=is_busy or is_lent_to or self._doc is None)

    def _write(self, found: Mapping[str, Load]) -> None:
        """Write the document if the load of the queues requires that."""
        doc = self._doc or self._regions.find([region.region_id(self._own)])[0] or {}
        before = region.wants_of(doc)
        for queue, load in found.items():
            again = self._arrived and not load.messages and queue in before
            self._factors[queue] = min(_MAX_FACTOR, 2 * max(1, self._factors[queue])) if again else 1
        want = wanted(found, before, self._factors)
        self._doc = doc
        if want.keys() == before.keys() and not (want and self._arrived):
            return
        self._doc, self._arrived = None, 0  # if the write fails, the document is read again
        new = {
            **region.new(self._own, want, self._regions.clock.now()),
            **({'_rev': doc['_rev']} if '_rev' in doc else {}),
        }
        [result] = self._regions.bulk([new])
        if result.is_stored:
            self._doc = {**new, '_rev': result.rev}
            logger.debug('region %s wants %s', self._own, want or 'nothing')


def wanted(found: Mapping[str, Load], before: Mapping[str, int], factors: Mapping[str, int]) -> dict[str, int]:
    """Return how many tasks of each queue a region wants, given what it wanted `before`.

    A queue begins to want tasks when its workers are less than half busy, and ceases when they are busy. The number is
    that of the idle processes, or a multiple of it if the last tasks were done within the shortest interval.
    """
    return {
        queue: min(_MAX_TASKS, (load.capacity - load.messages) * factors.get(queue, 1))
        for queue, load in found.items()
        if load.messages < (load.capacity if queue in before else load.capacity / 2)
    }


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
