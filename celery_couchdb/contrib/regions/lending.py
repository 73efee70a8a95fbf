"""Lending: messages that may run in any region are moved from their home to regions that want them.

Each message is moved in three writes: its item becomes a LentItem, by revision, so that no consumer can claim it; its
record is stored under an id that is derived from the item's id and the region; the item is deleted. The next leader
finishes what a killed one has begun. A message that its region does not take in time comes back, see `region.decide`,
and is not lent again.

The *demand* of a region says how many tasks of each queue it would run for other regions. Its Region document has it.
That is written only when a queue begins or ceases to have nothing to do, after lent tasks have arrived, and when
another region can be read, or no longer. So a region that stays idle, or busy, writes nothing. The demand follows from
the load of the queues: waiting and claimed messages, and how many tasks the workers can run at once.

A look is a few requests. After some looks that found nothing, the next one is made when CouchDB's changes feed reports
a message, a pause, or a worker that has come or gone: until then, one waiting request takes their place. Only a region
without messages waits so, because the feed costs the server something for each change.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from celery.worker import state
from kombu.exceptions import KombuError
from kombu.serialization import prepare_accept_content

from kombu_couchdb import design
from kombu_couchdb.contrib.parcels.parcel import Parcel
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client, Row
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.couchdb.shapes import members, number
from kombu_couchdb.design.rows import ClaimCount, QueueCount
from kombu_couchdb.documents import validation, workitem
from kombu_couchdb.documents.body import decoded, loaded, stub
from kombu_couchdb.documents.ids import CONSUMER, PAUSE
from kombu_couchdb.documents.task_message import HIGHEST, headers_of
from kombu_couchdb.documents.types import Document
from kombu_couchdb.errors import CouchDBError, Unstorable
from kombu_couchdb.leases.lease import ends_at, queues_of
from kombu_couchdb.log import get_logger
from kombu_couchdb.values import is_number

from ..parcels.messages import attached_body
from ..parcels.parcel_checks import UNSAFE_CONTENT

logger = get_logger(__name__)

#: The number of looks that find nothing before the feed is followed.
_QUIET_LOOKS = 5

#: While the feed is followed, it is looked this often nevertheless: a consumer whose lease has ended, for example, is
#: not a change. The Region document is read again as often: somebody may have deleted it.
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

#: The interval at which the load is read, unless nothing happens; and for some time after lent tasks have arrived.
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
    """Writes the Region document of this region, for the leader. Use it in one thread."""

    def __init__(self, broker: Client, regions: Client, own: str, concurrency: int, looks: Looks) -> None:
        """`regions` is a client for the database of regions of this region, `own`."""
        self._broker, self._regions, self._own, self._concurrency = broker, regions, own, concurrency
        self._looks, self._lent = looks, 0
        self._errors: dict[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what was written: another process may have been the leader."""
        self._doc: Document | None = None
        self._has_arrived, self._lent_until, self._read_at = False, 0.0, 0.0
        self._looks.reset()
        self._factors = Counter[str]()

    @property
    def next_at(self) -> float:
        """The monotonic time of the next step."""
        return self._looks.next_at

    def note_lent(self, count: int) -> None:
        """Note how many lent tasks have arrived since this process was started."""
        if count != self._lent:
            self._lent, self._has_arrived = count, True
            self._lent_until = time.monotonic() + _LENT_SECONDS
            self.note_activity()

    def note_activity(self) -> None:
        """Note that the load may have changed."""
        self._looks.soon(_SOON_SECONDS)

    def note_errors(self, errors: dict[str, str]) -> None:
        """Note which regions cannot be read, and why."""
        if errors != self._errors:
            self._errors = errors
            self._looks.soon(0.0)

    def step(self) -> None:
        """Read the load if it is time, and write the document if it has to change."""
        now = time.monotonic()
        if now < self.next_at:
            return
        is_lent_to = now < self._lent_until
        self._looks.begin(_SOON_SECONDS if is_lent_to else _LOAD_SECONDS)
        found = loads(self._broker, self._concurrency)
        before = region.wants_of(self._read())
        for queue, load in found.items():
            is_short = self._has_arrived and not load.messages and queue in before
            self._factors[queue] = min(_MAX_FACTOR, 2 * max(1, self._factors[queue])) if is_short else 1
        want = wanted(found, before, self._factors)
        self._write(want if self._has_arrived or want.keys() != before.keys() else before)
        is_busy = any(load.messages for load in found.values())
        self._looks.end(found=is_busy or is_lent_to or self._doc is None)

    def close(self) -> None:
        """Say that this region wants nothing."""
        self._read()
        self._write({})

    def _read(self) -> Document:
        """Return the document as it was written last; {} if there is none."""
        if self._doc is None or time.monotonic() >= self._read_at:
            [found] = self._regions.find([region.region_id(self._own)])
            self._doc, self._read_at = found or {}, time.monotonic() + _RARELY_SECONDS
        return self._doc

    def _write(self, want: dict[str, int]) -> None:
        """Write the document unless it says this already, and no lent tasks have arrived since."""
        doc = self._doc or {}
        new: Document = {'_id': region.region_id(self._own), 'type': 'Region', 'want': want, 'errors': self._errors}
        if new.items() <= doc.items() and not (want and self._has_arrived):
            return
        self._doc, self._has_arrived = None, False  # if the write fails, the document is read again
        new |= {'date': self._regions.clock.now(), **({'_rev': doc['_rev']} if doc else {})}
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
    now, workers = client.clock.now(), Counter[str]()
    rows = client.id_range(PAUSE, to=CONSUMER, docs=True)
    for doc in (row['doc'] for row in rows):
        if isinstance(doc.get('worker'), str) and ends_at(doc) > now:
            workers.update(queue for queue in queues_of(doc) if not queue.endswith(_MAILBOX))
    messages = waiting(client)
    claims = client.view(design.NAME, 'leases', _CLAIMS, startkey=['claim'], endkey=['claim', {}], group_level=3)
    for claim in map(ClaimCount.of, claims):
        messages[str(claim.queue)] += claim.total
    return {queue: Load(workers[queue] * concurrency, messages[queue]) for queue in workers.keys() - paused(rows)}


def paused(rows: Iterable[Row]) -> set[str]:
    """Return the queues that are paused, given rows of a range of ids."""
    return {row['id'].removeprefix(PAUSE) for row in rows if row['id'].startswith(PAUSE)}


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
    """Lends messages of this region to another one, for the leader. Use it in one thread."""

    def __init__(
        self,
        broker: Client,
        regions: Client,
        own: str,
        other: str,
        lend_after: float,
        content: Collection[str],
        looks: Looks,
    ) -> None:
        """Lend messages that wait for `lend_after` seconds to region `other`. `content` is the app's `accept_content`.

        `regions` is a client for the database of regions of this region, `own`.
        """
        self._broker, self._regions, self._own, self._other = broker, regions, own, other
        self._lend_after, self._content, self._looks = lend_after, content, looks
        self.reset()

    def reset(self) -> None:
        """Forget everything: another process may have been the leader."""
        self._want: dict[str, int] = {}  # by queue, what is not lent yet
        self._seen = ''  # the revision of the other region's document
        self._looks.reset()
        self._finish_at = 0.0

    @property
    def next_at(self) -> float:
        """The monotonic time of the next step; infinite if only a change makes one useful."""
        return min(self._looks.next_at if any(self._want.values()) else inf, self._finish_at)

    def set_wants(self, doc: Mapping[str, Any] | None) -> None:
        """Note what the other region's document asks for, which is lent once; None if it cannot be read."""
        rev = doc['_rev'] if doc else ''
        if rev != self._seen:
            self._seen, self._want = rev, region.wants_of(doc or {})
            self._looks.soon(0.0)

    def note_activity(self) -> None:
        """Note that a message may wait now: it can be lent `lend_after` seconds after it was published."""
        self._looks.soon(min(_LOOK_SECONDS, self._lend_after))

    def step(self) -> None:
        """Finish what was begun, and lend what the other region wants, if it is time."""
        if time.monotonic() >= self._finish_at:
            self._finish_at = time.monotonic() + SYNC
            if self._finish():
                self._finish_at = inf
        if time.monotonic() >= self.next_at:
            self._looks.begin(max(_LOOK_SECONDS, self._lend_after))
            found = {queue for queue, count in self._want.items() if count} & waiting(self._broker).keys()
            if found:
                found -= paused(self._broker.id_range(PAUSE))
            for queue in sorted(found):
                self._lend(queue)
            self._looks.end(found=bool(found))

    def _lend(self, queue: str) -> None:
        """Lend the messages of a queue that have waited longest; those that must stay here name no region any more."""
        before, key = self._broker.clock.now() - self._lend_after, design.key_of(queue)
        rows = self._broker.view(
            region.LENDING,
            'lendable',
            startkey=[key],
            endkey=[key, before],
            limit=min(_BATCH_DOCS, 2 * self._want[queue] + _MORE_DOCS),
            # The index is updated afterwards: a long queue delays nothing. Each document is read and checked.
            update='lazy',
        )
        now, size = self._broker.clock.now(), 0
        leaving, staying = list[tuple[Document, Parcel]](), list[Document]()
        for doc in self._broker.fetch([row['id'] for row in rows]):
            if not doc or not region.is_lendable(doc, before) or headers_of(doc).get('id') in state.revoked:
                continue  # a worker here ends a task that was revoked: the other region does not know of it
            if len(leaving) == self._want[queue] or (leaving and size + _size(doc) > _BATCH_BYTES):
                break
            lent = region.lent(doc, self._other, now)
            if record := self._record_of(lent, is_marked=False):
                leaving.append((lent, record))
                size += _size(doc)
            else:
                staying.append(region.not_lent(doc))
        self._finish_at = time.monotonic() + SYNC  # if a request fails
        results = self._broker.bulk([*(lent for lent, _ in leaving), *staying])[: len(leaving)]
        marked = [
            ({**lent, '_rev': result.rev}, record)
            for (lent, record), result in zip(leaving, results, strict=True)
            if result.is_proven
        ]
        self._want[queue] -= len(marked)
        self._send(marked)
        if not any(result.is_unproven for result in results):
            self._finish_at = inf

    def _finish(self) -> bool:
        """Send the messages that a killed leader, or a failed request, has left; return whether none is left."""
        rows = self._broker.view(region.LENDING, 'lendable', startkey=[None], endkey=[None, {}], limit=_BATCH_DOCS)
        settled = SYNC if rows and self._broker.is_cluster() else 0.0
        now, found = self._broker.clock.now(), list[Document]()
        for leaves in self._broker.fetch_leaves([row['id'] for row in rows]):
            rivals = [leaf for leaf in leaves if not (leaf.get('_deleted') and leaf.get('void'))]
            if len(rivals) == 1 and _is_lent(rivals[0]) and abs(now - rivals[0]['lent']) >= settled:
                found += rivals
        self._send([(doc, self._record_of(doc, is_marked=True)) for doc in found])
        return len(found) == len(rows) < _BATCH_DOCS

    def _send(self, lending: Sequence[tuple[Document, Parcel | None]]) -> None:
        """Store the records of LentItems, and delete the items; those without a record stay at home."""
        results = iter(self._regions.create_once([record for _, record in lending if record]))
        changes = list[Mapping[str, Any]]()
        for doc, record in lending:
            result = next(results) if record else None
            if result and result.is_stored:
                changes.append(deletion(doc))
                logger.debug('message %s of queue %s was lent: record %s', doc['_id'], doc['queue'], result.id)
            else:
                changes.append(region.not_lent(doc))
                if result:
                    logger.warning('message %s of queue %s cannot be lent: %s', doc['_id'], doc['queue'], result.reason)
        self._broker.bulk(changes)

    def _record_of(self, doc: Document, *, is_marked: bool) -> Parcel | None:
        """Return the record of a LentItem, the same in each try; None if its message has to stay at home.

        One that is marked as lent must leave if it can: its record may be stored already.
        """
        try:
            body = attached_body(self._broker, doc)
            is_counted = not is_marked and may_be_in_header(doc['message'], body, self._content)
            if is_counted or workitem.task_id(doc) is None:
                return None
            return region.lent_parcel(doc, self._own, doc['region'], body, doc['lent'])
        except CouchDBError:
            raise
        except Exception as exc:  # somebody may have written anything into the document
            logger.warning('message %s is not lent: %r', doc['_id'], exc)
            return None


def _is_lent(doc: Mapping[str, Any]) -> bool:
    is_valid = doc.get('type') == 'LentItem' and is_number(doc.get('lent')) and isinstance(doc.get('region'), str)
    return is_valid and validation.malformed_reason(doc) is None


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
