"""The permits that one consumer takes from CouchDB: slots of concurrency keys, and starts of rate keys.

A consumer takes a slot before it claims a message with a concurrency key, and frees it in the request that writes the
decision about the message, or uses it for the next message of the key. It takes a start before it claims a message with
a rate key, by a write of the key's document in the revision that it knows.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from .. import design
from ..couchdb.client import Client, Document
from ..couchdb.conflicts import delete_docs
from ..couchdb.shapes import members, text
from ..couchdb.write_result import WriteResult
from ..documents import concurrency, rates
from ..documents.concurrency import Concurrency
from ..documents.rates import BURST_SECONDS, RateLimit
from ..fleet.attention import Peers
from ..leases.lease import Lease
from ..log import get_logger
from ..queues.store import LeaseStats

logger = get_logger(__name__)

#: How long the messages of a key wait after CouchDB has refused to store a permit, in seconds.
REFUSED_SECONDS = 30.0

#: In a cluster, how long a consumer waits before it looks for a free slot again, in seconds: a node may be behind the
#: others.
_CLUSTER_PAUSE_SECONDS = 1.0

#: How often a consumer tries to take starts that other consumers take at the same time; then it waits for the next.
_TRIES = 3

#: How much later than the consumer that took the last start the others look at most: in seconds, and, if that is less,
#: in intervals of the rate for each consumer of the queue. So they read the document once for each two starts together,
#: however many they are.
_MAX_LATER_SECONDS, _MAX_LATER_INTERVALS = 1.0, 4.0

#: The most rate keys whose documents this consumer remembers.
_MAX_KNOWN = 10_000

_IDS = members(id=text)


class _Refusals:
    """The keys for which CouchDB refuses to store a permit, for example in a `validate_doc_update` function.

    Each refusal is logged, and one message of the key is tried again after `REFUSED_SECONDS`. Other keys go on.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        #: By key: the monotonic time of the next attempt.
        self._until: dict[str, float] = {}
        self._logged_at = -inf

    def note(self, key: str, result: WriteResult) -> None:
        """Note that CouchDB refused a permit of a key."""
        now = time.monotonic()
        self._until = {name: at for name, at in self._until.items() if at > now}
        self._until[key] = now + REFUSED_SECONDS
        if now - self._logged_at >= REFUSED_SECONDS:
            self._logged_at = now
            logger.error(
                '%s of key %r was not stored, and its messages wait: CouchDB refuses it (%s); trying again every %d s',
                self._what,
                key,
                result.reason,
                REFUSED_SECONDS,
            )

    def until(self, key: str) -> float:
        """Return the monotonic time until which the messages of a key wait; in the past if they need not wait."""
        return self._until.get(key, -inf)

    def waits(self, key: str) -> bool:
        """Whether the messages of a key wait."""
        return self.until(key) > time.monotonic()


# -- slots


@dataclass
class HeldSlot:
    """A slot that this consumer holds, or may hold: its creation may be unproven."""

    id: str
    rev: str
    key: str
    number: int
    #: The id of the lease under which it was taken: if that has ended, another consumer may have the slot.
    lease: str
    #: The id of the message that it was taken for; None if no message may use it.
    item: str | None


class Slots:
    """The slots of one consumer; for its I/O thread alone."""

    def __init__(self, client: Client, lease: Lease) -> None:
        self._client, self._lease = client, lease
        self._slots: dict[str, HeldSlot] = {}  # by id
        #: The ids of the messages that used slots when the cycle began, and the slots that no message uses any more.
        self._in_use: set[str] = set()
        self.spare: list[HeldSlot] = []
        #: By key: the highest limit of the messages that found no slot in this cycle.
        self._full: dict[str, int] = {}
        self._refusals = _Refusals('the concurrency slot')

    def __len__(self) -> int:
        return len(self._slots)

    def begin(self, in_use: set[str]) -> None:
        """Begin a cycle, before its decisions are taken: a slot is freed together with the decision, not before it."""
        self._full.clear()
        self._in_use = in_use
        self.spare = [each for each in self._slots.values() if each.item not in in_use]

    @property
    def pause(self) -> float:
        """How many seconds this consumer waits before it looks again after it has parked a message."""
        return _CLUSTER_PAUSE_SECONDS if self._client.replicas > 1 else 0.0

    def look_at(self, key: str) -> float:
        """Return the monotonic time to look for a free slot for a message that is parked now."""
        return max(time.monotonic() + self.pause, self._refusals.until(key))

    def free_numbers(self, key: str, most: int) -> set[int]:
        """Return which of the first `most` slots of a key nobody holds; at most one request."""
        others = set(range(most)) - {each.number for each in self._slots.values() if each.key == key}
        return others - self._taken(key) if others else others

    def acquire(self, wanted: Mapping[str, Concurrency]) -> set[str]:
        """Take slots for the messages with these ids and limits; return the ids of those for which there is none."""
        left = {
            doc_id: limit
            for doc_id, limit in wanted.items()
            if limit.limit > self._full.get(limit.key, 0) and not self._refusals.waits(limit.key)
        }
        without = wanted.keys() - left.keys()
        left = {doc_id: limit for doc_id, limit in left.items() if not self._reuse(doc_id, limit)}
        left = self._create(left, {})
        # A slot that was chosen at random may be taken while others are free.
        keys = {each.key for each in left.values() if each.limit > 1 and not self._refusals.waits(each.key)}
        again = {doc_id: limit for doc_id, limit in left.items() if limit.key in keys and limit.limit > 1}
        failed = self._create(again, {key: self._taken(key) for key in keys})
        left = {doc_id: limit for doc_id, limit in left.items() if doc_id not in again or doc_id in failed}
        for limit in left.values():
            self._full[limit.key] = max(limit.limit, self._full.get(limit.key, 0))
        return without | left.keys()

    def withdraw(self, ids: Collection[str]) -> None:
        """Note that these messages get no claim in this cycle although they got a slot."""
        self.spare += [each for each in self._slots.values() if each.item in ids and each.item not in self._in_use]

    def _reuse(self, doc_id: str, limit: Concurrency) -> bool:
        # A message that this consumer has claimed already may be admitted again, as it was read before the claim: that
        # claim is a conflict, and a second slot would not be freed before the message ends.
        own = [each for each in self._slots.values() if each.item == doc_id]
        for each in own + self.spare:
            usable = each.item is not None and each.lease == self._lease.id
            if usable and each.key == limit.key and each.number < limit.limit:
                if each in self.spare:
                    self.spare.remove(each)
                each.item = doc_id
                return True
        return False

    def _create(self, wanted: Mapping[str, Concurrency], taken: Mapping[str, set[int]]) -> dict[str, Concurrency]:
        """Create a slot for each of these messages, where one may be free; return the messages without one.

        `taken` has, by key, the numbers of slots that are taken; without it, a slot is chosen at random.
        """
        known: dict[str, set[int]] = defaultdict(set)
        for each in self._slots.values():
            known[each.key].add(each.number)  # it is taken, or freed with the next request
        chosen: dict[str, int] = {}
        for doc_id, limit in wanted.items():
            numbers = [n for n in range(limit.limit) if n not in known[limit.key] and n not in taken.get(limit.key, ())]
            if numbers:
                chosen[doc_id] = random.choice(numbers)
                known[limit.key].add(chosen[doc_id])
        now = self._client.clock.now()
        docs = [concurrency.slot(wanted[name].key, number, self._lease.id, now) for name, number in chosen.items()]
        without = dict(wanted)
        for (doc_id, number), result in zip(chosen.items(), self._client.bulk(docs) if docs else (), strict=True):
            key = wanted[doc_id].key
            if result.is_refused:
                self._refusals.note(key, result)
            if result.is_stored:
                slot = HeldSlot(result.id, result.rev, key, number, self._lease.id, doc_id)
                self._slots[result.id] = slot
                if result.is_proven:
                    del without[doc_id]
                else:  # another consumer may hold it, too: it is freed in this cycle
                    slot.item = None
                    self.spare.append(slot)
        return without

    def freed(self, slot: HeldSlot) -> None:
        """Note that a slot was freed, or may have been."""
        # Without a response the sweep finds the slot, if it still exists.
        if self._slots.get(slot.id) is slot:
            del self._slots[slot.id]

    def sweep(
        self, leases: LeaseStats, own: str, expired: Collection[str], alive: Callable[[list[str]], set[str]]
    ) -> None:
        """Free the slots of consumers that are gone; no request if `leases` shows no slots of other consumers.

        `expired` are the consumers whose leases have just ended, and `alive` tells which consumers have a heartbeat.
        """
        holders = leases['slot'].keys() - {own}
        unknown = [name for name in holders if name not in leases['consumer']]
        living = alive(unknown) if unknown else set()
        for name in [name for name in holders if name in expired or (name in unknown and name not in living)]:
            if count := delete_docs(self._client, self._of(name)):
                logger.info('%d concurrency slots of consumer %s, which has no lease any more, were freed', count, name)
        if leases['slot'].get(own, {}).get('count', 0) > len(self._slots):
            # The responses to these creations were lost, or a cluster did not prove them.
            known = {each.id: each.rev for each in self._slots.values()}
            delete_docs(self._client, [doc for doc in self._of(own) if known.get(doc['_id']) != doc['_rev']])

    def _taken(self, key: str) -> set[int]:
        """Return the numbers of a key's slots that are taken; one request."""
        start = concurrency.prefix(key)
        numbers = (row['id'].removeprefix(start) for row in self._client.id_range(start))
        return {int(number) for number in numbers if number.isdecimal()}

    def _of(self, consumer: str) -> list[Document]:
        """Return the slots that a consumer has taken."""
        keys = {'startkey': ['slot', consumer], 'endkey': ['slot', consumer]}
        rows = self._client.view(design.NAME, 'leases', _IDS, **keys, reduce=False)
        docs = self._client.fetch([row['id'] for row in rows]) if rows else []
        return [doc for doc in docs if doc and doc.get('type') == 'Slot' and doc.get('by') == consumer]


# -- starts


class _Known(NamedTuple):
    """What this consumer knows of the document of a rate key."""

    doc: Document | None
    next: float


class Starts:
    """The starts of rate keys that one consumer takes; for its I/O thread alone."""

    def __init__(self, client: Client, lease: Lease, peers: Peers) -> None:
        self._client, self._lease, self._peers = client, lease, peers
        self._refusals = _Refusals('the next start')
        self._known: dict[str, _Known] = {}  # by rate key

    # -- messages that wait

    def look_at(self, parked: str, rate: RateLimit | None) -> float:
        """Return the monotonic time to look for messages under a `parked_key`: when a start can be taken.

        The consumer that took the last start looks at once when the next one is due, with time to spare, the others a
        moment later: usually its messages are claimed by then, and the others find a later date.
        """
        queue, key = rates.queue_and_key(parked) or ('', '')
        if self._refusals.waits(key):
            return self._refusals.until(key)
        known = self._known.get(key)
        wait = max(0.0, known.next - BURST_SECONDS / 2 - self._client.clock.now()) if known else 0.0
        if not (known and known.doc and known.doc.get('by') == self._lease.id):
            consumers = len(self._peers.consumers_of(queue, self._lease.id))
            intervals = _MAX_LATER_INTERVALS * consumers * rate.interval if rate else inf
            wait += random.uniform(0.0, min(_MAX_LATER_SECONDS, intervals))
        return time.monotonic() + wait

    def read(self, keys: Collection[str]) -> None:
        """Read the documents of these rate keys."""
        names, now = sorted(keys), self._client.clock.now()
        found = self._client.find([rates.document_id(key) for key in names]) if names else []
        for key, doc in zip(names, found, strict=True):
            if doc and self._client.replicas > 1:
                # All consumers continue with the same leaf. The sweep deletes the others.
                leaves = [leaf for leaf in self._client.leaves(doc['_id']) if not leaf.get('_deleted')]
                doc = max(leaves, key=rates.order, default=None)
            self._known[key] = _Known(doc, rates.next_of(doc, now))

    def available(self, key: str, rate: RateLimit | None, most: int) -> int:
        """Return how many messages can start when they have been read, up to `most`; 0 if none can start now."""
        now = self._client.clock.now()
        next_ = self._known[key].next
        if not rates.has_start(next_, now):
            return 0
        later = int((now + 2 * BURST_SECONDS - max(next_, now)) / rate.interval) if rate else 0
        return min(most, 1 + later)

    # -- messages to be claimed

    def surplus(self, wanted: Mapping[str, RateLimit]) -> set[str]:
        """Return the ids of the messages for which there is no start, as far as this consumer knows: no request."""
        return wanted.keys() - self._share(wanted)[0]

    def acquire(self, wanted: Mapping[str, RateLimit]) -> set[str]:
        """Take starts for the messages with these ids and rates; return the ids of those for which there is none."""
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        left, without = dict(wanted), set[str]()
        self.read({rate.key for rate in left.values()} - self._known.keys())
        for _ in range(_TRIES):
            starting, later = self._share(left)
            without |= left.keys() - starting
            left = {doc_id: left[doc_id] for doc_id in starting}
            unproven = self._write(later) if left else set()
            left = {doc_id: rate for doc_id, rate in left.items() if rate.key in unproven}
            if not left:
                break
            self.read(unproven)
        return without | left.keys()

    def _share(self, wanted: Mapping[str, RateLimit]) -> tuple[set[str], dict[str, float]]:
        """Return the ids of the messages that can start now, and by rate key the time of the start after these."""
        now = self._client.clock.now()
        starting, next_ = set[str](), dict[str, float]()
        for doc_id, rate in wanted.items():
            at = next_.get(rate.key, self._known[rate.key].next if rate.key in self._known else now)
            if rates.has_start(at, now) and not self._refusals.waits(rate.key):
                next_[rate.key] = rates.after(at, rate, now)
                starting.add(doc_id)
        return starting, next_

    def _write(self, next_: Mapping[str, float]) -> set[str]:
        """Write the documents of these keys, with the time of the next start; return the keys that are not proven."""
        now = self._client.clock.now()
        docs = [rates.document(self._known[key].doc, key, at, self._lease.id, now) for key, at in next_.items()]
        # If a request fails, the documents are read again.
        self._known = {key: known for key, known in self._known.items() if key not in next_}
        for doc, result in zip(docs, self._client.bulk(docs), strict=True):
            if result.is_refused:
                self._refusals.note(doc['key'], result)
            if result.is_proven:
                self._known[doc['key']] = _Known({**doc, '_rev': result.rev}, doc['next'])
        return next_.keys() - self._known.keys()
