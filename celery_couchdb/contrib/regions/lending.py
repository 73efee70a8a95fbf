"""Lending: messages that may run in any region are moved from their home to regions that want them.

Each message is moved in three writes: its item becomes a LentItem, by revision, so that no consumer can claim it; its
record is stored under an id that is derived from the item's id and the region; the item is deleted. The next leader
finishes what a killed one has begun. A message that its region does not take in time comes back, see `region.decide`,
and is not lent again.

The *demand* of a region says how many lent tasks of each queue it would have at the same time, and until when. Its
Region document has it. Home lends the difference to what it has lent already, so whatever happens to a lent task, its
place is free when its record is gone. The demand follows from the load of the queues: waiting and claimed messages
without those that were lent, how many tasks the workers can run at once, and how many lent tasks end in a second. While
a region has room, it writes the document again before the time has come; while it has none, it writes nothing.

A look at the load is a few requests. After one at a region without messages, the next one is made when CouchDB's
changes feed reports a message, a pause, or a worker that has come or gone: until then, one waiting request takes their
place. While there are messages nothing is followed, because the feed costs the server something for each change.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil, inf
from typing import Any, NamedTuple

from celery.worker import state
from kombu.exceptions import KombuError

from kombu_couchdb import design
from kombu_couchdb.contrib.parcels.parcel import Parcel
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.couchdb.shapes import members, number
from kombu_couchdb.design.rows import QueueCount
from kombu_couchdb.documents import validation, workitem
from kombu_couchdb.documents.ids import CONSUMER, PAUSE
from kombu_couchdb.documents.task_message import HIGHEST, headers_of
from kombu_couchdb.documents.types import Document
from kombu_couchdb.errors import CouchDBError, Unstorable
from kombu_couchdb.leases.lease import ends_at, queues_of
from kombu_couchdb.log import get_logger
from kombu_couchdb.queues.store import Store
from kombu_couchdb.values import is_number

from ..parcels.messages import attached_body, embedded_in, in_parts
from ..parcels.parcel_checks import UNSAFE_CONTENT

logger = get_logger(__name__)

#: While the feed is followed, it is looked this often nevertheless: a consumer whose lease has ended, for example, is
#: not a change, and a node of a cluster may not report what another one has stored before. A demand is written again
#: when less than this is left of its time, which is twice as long.
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

#: The interval at which the load is read, unless nothing happens; and while tasks are lent from here or to here.
LOAD_SECONDS, LENT_SECONDS = 5.0, 1.0

#: When there is room again for a task that waits here, it is looked after so many seconds: others end then, too.
ROOM_SECONDS = 0.3

#: The maximum number of tasks of a queue that a region wants, and how many seconds of work it wants in advance: about
#: as long as it takes until a task that has ended is replaced.
_MAX_TASKS, _AHEAD_SECONDS = 100, 1.5

#: The end of the names of the queues through which workers receive remote control (in kombu.pidbox).
_MAILBOX = '.pidbox'

_COUNT = members(value=number)

#: The maximum number of messages that are lent together.
_BATCH_DOCS = 100

#: How many more messages are read: some cannot be lent.
_MORE_DOCS = 10


class Looks:
    """The times of looks at the load of a broker's database. Use it in one thread."""

    def __init__(self, broker: Client, wake: Callable[[], None]) -> None:
        """Another thread calls `wake()` when something has happened that matters to regions."""
        self._broker = broker
        self._since: Any = None
        self._follower = Follower(broker, 'celery-couchdb-region-feed', wake)
        self.reset()

    def reset(self) -> None:
        """Forget earlier looks, and follow nothing: the next look is due."""
        self._follower.pause()
        #: The monotonic times of the next look, and of the last one.
        self.next_at, self._last_at = 0.0, 0.0

    def close(self) -> None:
        """End the thread of the feed."""
        self._follower.close()

    def soon(self, seconds: float) -> None:
        """Look in so many seconds, or when the next look is due if that is earlier."""
        self.next_at = min(self.next_at, time.monotonic() + seconds)

    def begin(self, seconds: float) -> bool:
        """Tell whether a look is due, and begin it; something that the feed reports is due after so many seconds."""
        if self._follower.take() is not None:
            self.soon(max(seconds, self._last_at + LOAD_SECONDS - time.monotonic()))
        if time.monotonic() < self.next_at:
            return False
        self._last_at = time.monotonic()
        self._since = self._broker.sequence()  # before the look: a later change is reported
        return True

    def end(self, seconds: float, *, found: bool) -> None:
        """Note whether the look has found something to do; the next one follows after so many seconds if so."""
        self.next_at = time.monotonic() + (seconds if found else _RARELY_SECONDS)
        if not found:
            self._follower.follow(self._since, _SELECTOR)


# -- demand


class Load(NamedTuple):
    """The load of one queue."""

    #: How many tasks the workers of the queue can run at once.
    capacity: int
    #: How many messages wait and are due, and how many are claimed.
    waiting: int
    claimed: int
    is_paused: bool


class Demand:
    """Writes the Region document of this region, for the leader. Use it in one thread."""

    def __init__(self, regions: Client, own: str) -> None:
        """`regions` is a client for the database of regions of this region, `own`."""
        self._regions, self._own = regions, own
        self.reset()

    def reset(self) -> None:
        """Forget what was written: another process may have been the leader. The document is written again."""
        self._doc: Document | None = None
        #: How many lent tasks of each queue had ended at the last look, and when that was.
        self._done, self._done_at = Counter[str](), time.monotonic()
        self._want: dict[str, int] = {}

    def update(
        self, loads: Mapping[str, Load], lent: Mapping[str, int], done: Counter[str], errors: Mapping[str, str]
    ) -> None:
        """Write the document if it has to change.

        `lent` are the tasks that were lent to this region, by queue, and `done` how many of them have ended since the
        process was started. `errors` says why other regions cannot be read.
        """
        now, before = time.monotonic(), self._want
        seconds = max(LENT_SECONDS, now - self._done_at)
        rates = {queue: max(0, count - self._done[queue]) / seconds for queue, count in done.items()}
        self._done, self._done_at = done, now
        self._want = wanted(loads, lent, rates, before)
        self._write(self._want, errors)

    def close(self, errors: Mapping[str, str]) -> None:
        """Say that this region wants nothing."""
        self._write({}, errors)

    def _write(self, want: Mapping[str, int], errors: Mapping[str, str]) -> None:
        """Write the document unless it says this already, and has not to be renewed."""
        doc, now = self._doc or {}, self._regions.clock.now()
        new: Document = {'_id': region.region_id(self._own), 'type': 'Region', 'want': want, 'errors': errors}
        if new.items() <= doc.items() and (not want or doc['until'] - now > _RARELY_SECONDS):
            return
        new |= {'date': now, 'until': now + 2 * _RARELY_SECONDS}
        stored = self._regions.find([new['_id']])[0] or {}
        self._doc = None  # if the write fails, it is written again
        [result] = self._regions.bulk([{**new, '_rev': stored['_rev']} if stored else new])
        if result.is_stored:
            self._doc = new
            logger.debug('region %s wants %s', self._own, want or 'nothing')


def wanted(
    loads: Mapping[str, Load], lent: Mapping[str, int], rates: Mapping[str, float], before: Collection[str]
) -> dict[str, int]:
    """Return how many lent tasks of each queue a region would have, given the queues of which it wanted some `before`.

    A queue begins to want tasks when its own ones occupy less than half of its workers, and ceases when they occupy
    all. The number is that of the free processes, and the work of a moment more, see `rates`: tasks a second.
    """
    found = dict[str, int]()
    for queue, load in loads.items():
        own = max(0, load.waiting + load.claimed - lent.get(queue, 0))
        if not load.is_paused and own < (load.capacity if queue in before else load.capacity / 2):
            found[queue] = min(_MAX_TASKS, load.capacity - own + ceil(_AHEAD_SECONDS * rates.get(queue, 0.0)))
    return found


def loads_of(client: Client, concurrency: int) -> dict[str, Load]:
    """Return the load of each queue that has messages, or that Celery workers serve; three requests.

    No document says how many tasks another worker runs at once: each worker counts as `concurrency`.
    """
    now, workers = client.clock.now(), Counter[str]()
    rows = client.id_range(PAUSE, to=CONSUMER, docs=True)
    for doc in (row['doc'] for row in rows):
        if isinstance(doc.get('worker'), str) and ends_at(doc) > now:
            workers.update(queue for queue in queues_of(doc) if not queue.endswith(_MAILBOX))
    waiting, claimed = Counter[str](), Counter[str]()
    for count in map(QueueCount.from_row, client.view(design.NAME, 'waiting', _COUNT, group_level=2)):
        if 0 <= count.rank <= HIGHEST:  # the others are not due
            waiting[str(count.queue)] += count.total
    for claim in Store(client).claim_counts():
        claimed[str(claim.queue)] += claim.total
    paused = {row['id'].removeprefix(PAUSE) for row in rows if row['id'].startswith(PAUSE)}
    return {
        queue: Load(workers[queue] * concurrency, waiting[queue], claimed[queue], queue in paused)
        for queue in {*workers, *waiting, *claimed}
    }


# -- lending


class Lender:
    """Lends messages of this region to other ones, for the leader. Use it in one thread."""

    def __init__(
        self,
        broker: Client,
        regions: Client,
        own: str,
        lend_after: float,
        content: Collection[str],
        note: Callable[[Sequence[Parcel]], None],
    ) -> None:
        """Lend messages that wait for `lend_after` seconds. `content` is the app's `accept_content`.

        `regions` is a client for the database of regions of this region, `own`. `note` gets the records of new loans.
        """
        self._broker, self._regions, self._own = broker, regions, own
        self.lend_after, self._note = lend_after, note
        self._content = {*content} - UNSAFE_CONTENT
        self.reset()

    def reset(self) -> None:
        """Forget everything: another process may have been the leader."""
        self._finish_at = 0.0

    def finish(self) -> None:
        """Finish what a killed leader, or a failed request, has begun, if there may be something."""
        if time.monotonic() >= self._finish_at:
            self._finish_at = time.monotonic() + SYNC
            if self._finish():
                self._finish_at = inf

    def lend(self, other: str, want: Mapping[str, int], loads: Mapping[str, Load]) -> None:
        """Lend region `other` as many messages of each queue as it wants beside those that it has, if they wait."""
        for queue, count in sorted(want.items()):
            if count > 0 and (load := loads.get(queue)) and load.waiting and not load.is_paused:
                self._lend(other, queue, count)

    def _lend(self, other: str, queue: str, wanted: int) -> None:
        """Lend the messages of a queue that have waited longest; those that must stay here name no region any more."""
        before, key = self._broker.clock.now() - self.lend_after, design.key_of(queue)
        rows = self._broker.view(
            region.LENDING,
            'lendable',
            startkey=[key],
            endkey=[key, before],
            limit=min(_BATCH_DOCS, 2 * wanted + _MORE_DOCS),
            # The index is updated afterwards: a long queue delays nothing. Each document is read and checked.
            update='lazy',
        )
        now, leaving, staying = self._broker.clock.now(), list[tuple[Document, Parcel]](), list[Document]()
        docs = [doc for doc in self._broker.fetch([row['id'] for row in rows]) if doc]
        # A worker here ends a task that was revoked: the other region does not know of it.
        lendable = [
            doc for doc in docs if region.is_lendable(doc, before) and headers_of(doc).get('id') not in state.revoked
        ]
        for doc in next(in_parts(lendable), []):
            if len(leaving) == wanted:
                break
            lent = region.lent(doc, other, now)
            if record := self._record_of(lent, is_marked=False):
                leaving.append((lent, record))
            else:
                staying.append(region.not_lent(doc))
        self._finish_at = time.monotonic() + SYNC  # if a request fails
        results = self._broker.bulk([*(lent for lent, _ in leaving), *staying])[: len(leaving)]
        marked = [
            ({**lent, '_rev': result.rev}, record)
            for (lent, record), result in zip(leaving, results, strict=True)
            if result.is_proven
        ]
        if self._send(marked) and not any(result.is_unproven for result in results):
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
        is_sent = self._send([(doc, self._record_of(doc, is_marked=True)) for doc in found])
        return is_sent and len(found) == len(rows) < _BATCH_DOCS

    def _send(self, lending: Sequence[tuple[Document, Parcel | None]]) -> bool:
        """Store the records of LentItems, and delete the items; those without a record stay at home.

        Return whether all items are known to be written.
        """
        records = [record for _, record in lending if record]
        self._note(records)  # before: a request that fails may have stored them
        results = iter(self._regions.create_once(records))
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
        return all(result.is_proven for result in self._broker.bulk(changes))

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


def may_be_in_header(message: Mapping[str, Any], body: bytes | None, content: Collection[str]) -> bool:
    """Tell whether a task, or a later step of its chain, is in the header of a chord; True if it cannot be decoded.

    Messages of the header of a chord stay in the region where their results are counted.

    `body` is the attached body, or None; `content` are the accepted content types, without pickle and YAML.
    """
    try:
        embedded = embedded_in(message, body, content)
        steps = embedded.get('chain') or []
        return bool(embedded.get('chord') or any((step.get('options') or {}).get('chord') for step in steps))
    except (KombuError, Unstorable, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return True
