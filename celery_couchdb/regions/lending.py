"""Lending: messages that may run in any region are moved from their home to regions that want them.

Each message is moved in three writes: its item becomes a LentItem, by revision, so that no consumer can claim it; the
parcel is stored under an id that is derived from the item's id and the region; the item is deleted. The next leader
finishes what a killed one has begun.

The *demand* of a region says how many tasks of each queue it would run for other regions. Its Region document has it.
That is written only when a queue begins or ceases to have nothing to do, and after lent tasks have arrived. So a region
that stays idle, or busy, writes nothing. The demand follows from the load of the queues: waiting and claimed messages,
and how many tasks the workers can run at once.

A look is a few requests. After some looks that found nothing, the next one is made when CouchDB's changes feed reports
a message, a pause, or a worker that has come or gone: until then, one waiting request takes their place. Only a region
without messages waits so, because the feed costs the server something for each change.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kombu.exceptions import KombuError
from kombu.serialization import prepare_accept_content

from kombu_couchdb import design
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.couchdb.shapes import members, number
from kombu_couchdb.design.rows import ClaimCount, QueueCount
from kombu_couchdb.documents import validation, workitem
from kombu_couchdb.documents.body import decoded, loaded, stub
from kombu_couchdb.documents.ids import CONSUMER, PAUSE
from kombu_couchdb.documents.task_message import HIGHEST
from kombu_couchdb.documents.types import Document
from kombu_couchdb.errors import Unstorable
from kombu_couchdb.leases.lease import ends_at
from kombu_couchdb.log import get_logger
from kombu_couchdb.parcels.parcel import Parcel
from kombu_couchdb.regions import region

from ..parcels.messages import attached_body
from ..parcels.parcel_checks import UNSAFE_CONTENT, ParcelRefused

logger = get_logger(__name__)

#: The number of looks that find nothing before the feed is followed.
_QUIET_LOOKS = 5

#: While the feed is followed, it is looked this often nevertheless: a consumer whose lease has ended, for example, is
#: not a change.
_RARELY_SECONDS = 60.0

#: A message may be claimed already when the feed reports it. `;` is the character after `:`, and consumers follow
#: pauses in the order of ids. Heartbeats, the later revisions of consumers, are no activity.
_SELECTOR = {
    '$or': [
        {'type': {'$in': ['WorkItem', 'Pause']}},
        {'type': 'Consumer', 'beats': 0},
        {'_deleted': True, '_id': {'$gt': PAUSE, '$lt': 'broker:consumer;'}},
    ]
}

#: The interval at which the load is read, unless nothing happens; and for some time after lent tasks have
#: arrived.
_LOAD_SECONDS, _SOON_SECONDS, _LENT_SECONDS = 5.0, 1.0, 60.0

#: The maximum number of tasks of a queue that a region asks for at once, and by how much short tasks raise the number.
_MAX_TASKS, _MAX_FACTOR = 100, 32


#: The end of the names of the queues through which workers receive remote control (in kombu.pidbox).
_MAILBOX = '.pidbox'

_COUNT = members(value=number)
_CLAIMS = members(value=members(count=number))

#: The maximum number of messages that are lent together, and of bytes of their bodies (but it is one message at least).
_BATCH_DOCS, _BATCH_BYTES = 100, 1_000_000

#: How many more messages are read: some cannot be lent.
_MORE_DOCS = 10

#: The shortest interval at which waiting messages are counted.
_LOOK_SECONDS = 1.0


class Activity:
    """The next change in a broker's database that matters to regions. Use it in one thread."""

    def __init__(self, broker: Client, wake: Callable[[], None]) -> None:
        """Another thread calls `wake()` when `take` has become true."""
        self._broker, self._since = broker, 0.0
        self._follower = Follower(broker, 'celery-couchdb-region-feed', wake)

    @property
    def is_enough(self) -> bool:
        """True if a look from now on is enough until the next change is reported.

        In a cluster, the node that is read may not have yet what another one stored before the feed was followed.
        """
        is_synchronised = self._broker.replicas == 1 or time.monotonic() >= self._since + SYNC
        return self._follower.is_following and is_synchronised

    def watch(self) -> None:
        """Report the next change from now on, once; one request, or none if that was asked for before."""
        if not self._follower.is_following:
            since = self._broker.sequence()
            self._since = time.monotonic()
            self._follower.follow(since, _SELECTOR)

    def take(self) -> bool:
        """Tell whether there was a change, or the feed has failed, since the last call."""
        return self._follower.take() is not None

    def pause(self) -> None:
        """Report nothing until the next call of `watch`."""
        self._follower.pause()

    def close(self) -> None:
        """End the thread of the feed."""
        self._follower.close()


class Looks:
    """The times of one kind of look."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self.reset()

    def reset(self) -> None:
        """Forget earlier looks: the next one is due."""
        #: The monotonic time of the next look.
        self.next_at = 0.0
        self._quiet, self._may_rest = 0, False

    def soon(self, seconds: float) -> None:
        """Look in so many seconds, or when the next look is due if that is earlier."""
        self.next_at, self._quiet = min(self.next_at, time.monotonic() + seconds), 0

    def begin(self, seconds: float) -> None:
        """Note that a look begins; the next one follows after so many seconds, unless `end` is told otherwise."""
        self.next_at, self._quiet = time.monotonic() + seconds, self._quiet + 1
        if self._quiet >= _QUIET_LOOKS:
            self._activity.watch()  # before the look: a later change is reported
        self._may_rest = self._activity.is_enough

    def end(self, *, found: bool) -> None:
        """Note whether the look has found something to do."""
        if found:
            self._quiet = 0
        elif self._quiet >= _QUIET_LOOKS and self._may_rest and self._activity.is_enough:
            self.next_at = time.monotonic() + _RARELY_SECONDS


# -- demand


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
        self._looks.begin(_SOON_SECONDS if is_lent_to else _LOAD_SECONDS)
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


# -- lending


class Lender:
    """Lends messages of this region to other regions, for the leader."""

    def __init__(
        self,
        broker: Client,
        regions: Client,
        own: str,
        others: Sequence[str],
        lend_after: float,
        content: Collection[str],
        looks: Looks,
    ) -> None:
        """Lend messages that wait for `lend_after` seconds. `content` is the app's `accept_content`."""
        self._broker, self._regions, self._own, self._others = broker, regions, own, others
        self._lend_after, self._content, self._looks = lend_after, content, looks
        self.reset()

    def reset(self) -> None:
        """Forget everything: another process may have been the leader."""
        self._wants: dict[str, dict[str, int]] = {}  # by region and queue, what is not lent yet
        self._seen: dict[str, str] = {}  # by region, the revision of its document
        self._looks.reset()
        self._finish_at: float | None = 0.0

    @property
    def next_at(self) -> float:
        """The monotonic time of the next step; infinite if only a change makes one useful."""
        looks = self._looks.next_at if any(any(want.values()) for want in self._wants.values()) else float('inf')
        return looks if self._finish_at is None else min(looks, self._finish_at)

    def read_wants(self) -> None:
        """Read what the other regions want; one request. What a document asks for is lent once."""
        docs = self._regions.find([region.region_id(name) for name in self._others])
        for name, doc in zip(self._others, docs, strict=True):
            if doc is None:
                self._wants.pop(name, None)
            elif self._seen.get(name) != doc['_rev']:
                self._seen[name], self._wants[name] = doc['_rev'], region.wants_of(doc)
                self._looks.soon(0.0)

    def note_activity(self) -> None:
        """Note that a message may wait now: it can be lent `lend_after` seconds after it was published."""
        self._looks.soon(min(_LOOK_SECONDS, self._lend_after))

    def step(self) -> None:
        """Finish what was begun, and lend what other regions want, if it is time."""
        now = time.monotonic()
        if self._finish_at is not None and now >= self._finish_at:
            self._finish_at = now + SYNC
            if self._finish():
                self._finish_at = None
        if now >= self.next_at:
            self._looks.begin(max(_LOOK_SECONDS, self._lend_after))
            wanted = {queue for want in self._wants.values() for queue, count in want.items() if count}
            found = wanted & waiting(self._broker).keys()
            for queue in sorted(found):
                self._lend(queue)
            self._looks.end(found=bool(found))

    def _lend(self, queue: str) -> None:
        """Lend the messages of a queue that have waited longest."""
        left = {name: want[queue] for name, want in self._wants.items() if want.get(queue)}
        before, key = self._broker.clock.now() - self._lend_after, design.key_of(queue)
        rows = self._broker.view(
            region.LENDING,
            'lendable',
            startkey=[key],
            endkey=[key, before],
            limit=min(_BATCH_DOCS, 2 * sum(left.values()) + _MORE_DOCS),
            # The index is updated afterwards: a long queue delays nothing. Each document is read and checked.
            update='lazy',
        )
        prepared, size = list[tuple[Document, Parcel]](), 0
        for doc in self._broker.fetch([row['id'] for row in rows]):
            to = max(left, key=lambda name: left[name])
            if not left[to] or (prepared and size + (_size(doc) if doc else 0) > _BATCH_BYTES):
                break
            if doc and region.is_lendable(doc, before) and (made := self._parcel_of(doc, to, is_marked=False)):
                left[to], size = left[to] - 1, size + _size(doc)
                prepared.append((doc, made))
        if prepared:
            self._move(prepared)

    def _move(self, prepared: Sequence[tuple[Document, Parcel]]) -> None:
        """Mark items as lent, and send those whose marks are proven."""
        now = self._broker.clock.now()
        destinations = [made['_id'].split(':')[1] for _, made in prepared]
        self._finish_at = time.monotonic() + SYNC  # if a request fails
        results = self._broker.bulk(
            [region.lent(doc, to, now) for (doc, _), to in zip(prepared, destinations, strict=True)]
        )
        marked = list[tuple[Document, Parcel]]()
        for (doc, made), to, result in zip(prepared, destinations, results, strict=True):
            if result.is_proven:
                self._wants[to][doc['queue']] -= 1
                marked.append(({**region.lent(doc, to, now), '_rev': result.rev}, made))
        self._send(marked)
        if not any(result.is_unproven for result in results):
            self._finish_at = None

    def _finish(self) -> bool:
        """Send the messages that a killed leader, or a failed request, has left; return whether none is left."""
        rows = self._broker.view(region.LENDING, 'lendable', startkey=[None], endkey=[None, {}], limit=_BATCH_DOCS)
        if not rows:
            return True
        settled = SYNC if self._broker.is_cluster() else 0.0
        now, found = self._broker.clock.now(), list[tuple[Document, Parcel]]()
        for leaves in self._broker.fetch_leaves([row['id'] for row in rows]):
            rivals = [leaf for leaf in leaves if not (leaf.get('_deleted') and leaf.get('void'))]
            is_settled = len(rivals) == 1 and _is_lent(doc := rivals[0]) and abs(now - doc['lent']) >= settled
            if is_settled and (made := self._parcel_of(doc, doc['region'], is_marked=True)):
                found.append((doc, made))
        self._send(found)
        return len(found) == len(rows) < _BATCH_DOCS

    def _send(self, lending: Sequence[tuple[Document, Parcel]]) -> None:
        """Store the parcels of LentItems, and delete the items; those that CouchDB refuses stay at home."""
        if not lending:
            return
        results = self._regions.create_once([made for _, made in lending])
        self._broker.bulk(
            [
                deletion(doc) if result.is_stored else region.not_lent(doc)
                for (doc, _), result in zip(lending, results, strict=True)
            ]
        )
        for (doc, made), result in zip(lending, results, strict=True):
            if result.is_stored:
                logger.debug('message %s of queue %s was lent: parcel %s', doc['_id'], doc['queue'], made['_id'])
            else:
                logger.warning('message %s of queue %s cannot be lent: %s', doc['_id'], doc['queue'], result.reason)

    def _parcel_of(self, doc: Document, to: str, *, is_marked: bool) -> Parcel | None:
        """Return the parcel with the message of an item; None if it has to stay at home, or has no valid body.

        An item that is marked as lent must leave: its parcel may be stored already.
        """
        try:
            body = attached_body(self._broker, doc)
        except ParcelRefused:
            return None
        if not is_marked and may_be_in_header(doc['message'], body, self._content):
            return None
        return region.lent_parcel(doc, self._own, to, body, self._broker.clock.now())


def _is_lent(doc: Mapping[str, object]) -> bool:
    return doc.get('type') == 'LentItem' and isinstance(doc.get('lent'), (int, float)) and validation.flaw(doc) is None


def _size(doc: Document) -> int:
    attachment = stub(doc)
    return int(attachment['length']) if attachment else workitem.size(doc)


def may_be_in_header(message: Mapping[str, Any], body: bytes | None, content: Collection[str]) -> bool:
    """Tell whether a task, or a later step of its chain, is in the header of a chord; True if it cannot be decoded.

    Messages of the header of a chord stay in the region where their results are counted.

    `body` is the attached body, or None; `content` is the app's `accept_content`. Pickle and YAML are not decoded.
    """
    try:
        text = decoded(message['body'] if body is None else body, message['properties'].get('body_encoding'))
        _, _, embedded = loaded(message, text, prepare_accept_content(set(content) - UNSAFE_CONTENT))
        steps = embedded.get('chain') or []
        return bool(embedded.get('chord') or any((step.get('options') or {}).get('chord') for step in steps))
    except (KombuError, Unstorable, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return True
