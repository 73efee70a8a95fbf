"""The slots of concurrency keys that one consumer holds, and the messages that wait for slots.

A consumer takes a slot before it claims a message with a concurrency key, and frees it in the request that writes the
decision about the message, or uses it for the next message of the key. A message without a slot is parked.

No wakeup is lost between two consumers: who parks a message looks for free slots afterwards, and who frees a slot looks
for parked messages afterwards. One of them sees what the other has written. (In a cluster a read may be older; the
sweep finds the message then, see `leases.freed_slots`.)
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document
from ..couchdb.conflicts import SYNC
from ..couchdb.write_result import WriteResult
from ..documents import concurrency
from ..documents.concurrency import Concurrency
from ..leases.lease import Lease
from ..log import get_logger
from ..queues import slots
from .pending_writes import PendingWrite
from .refusals import Refusals
from .unacked import Unacked

__all__ = ['Slots']

logger = get_logger(__name__)

#: In a cluster, how long a consumer waits before it looks for a free slot again, in seconds.
_CLUSTER_PAUSE_SECONDS = 1.0

#: A message that needs a slot, and its limit.
_Wanted = tuple[Document, Concurrency]


@dataclass
class _Slot:
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

    def __init__(self, client: Client, lease: Lease, unacked: Unacked) -> None:
        self._client, self._lease, self._unacked = client, lease, unacked
        self._requests = slots.Slots(client)
        self._slots: dict[str, _Slot] = {}  # by id
        #: The ids of the messages that get a claim in this cycle.
        self._claiming: set[str] = set()
        self._held: set[str] = set()
        #: By key: the highest limit of the messages that found no slot in this cycle.
        self._full: dict[str, int] = {}
        self._refusals = Refusals(client, 'the concurrency slot')
        #: By key: the slots that have become free since this consumer looked for messages that wait for them.
        self._freed: dict[str, set[int]] = defaultdict(set)
        #: By key of messages that were parked: their limit, and the monotonic time to look for a free slot.
        self._parked: dict[str, tuple[int, float]] = {}
        #: By key and slot: the monotonic time to look for such messages because it was not freed for certain.
        self._look_at: dict[tuple[str, int], float] = {}
        self._woken: list[Document] = []

    @property
    def used(self) -> bool:
        """Whether there is anything to do; False in a consumer that never met a message with a concurrency key."""
        return bool(self._slots or self._freed or self._parked or self._look_at)

    @property
    def due(self) -> float:
        """The monotonic time of the next cycle that this object needs; infinite if it needs none."""
        if not self.used:
            return inf
        looks = [*self._look_at.values(), *(at for _, at in self._parked.values())]
        return min([*looks, *self._unacked.may_run().values()], default=inf)

    @property
    def _pause(self) -> float:
        """How many seconds this consumer waits before it looks again: a node of a cluster may be behind the others."""
        return _CLUSTER_PAUSE_SECONDS if self._client.replicas > 1 else 0.0

    def revisions(self) -> dict[str, str]:
        """Return the revisions of the slots, by id."""
        return {each.id: each.rev for each in self._slots.values()}

    # -- take

    def begin(self) -> None:
        """Begin a cycle, before its decisions are taken: a slot is freed together with the decision, not before it."""
        self._full.clear()
        self._held = self._unacked.held_ids()

    def admit(self, taken: dict[str, list[Document]], writes: list[PendingWrite]) -> dict[str, list[Document]]:
        """Return those of the messages to be claimed, by queue, that need no slot or get one.

        Add to `writes` the changes that park the others. *Raises* the errors of `Client`.
        """
        wanted = [(doc, limit) for docs in taken.values() for doc in docs if (limit := concurrency.limit_of(doc))]
        if not wanted:
            return taken
        without = {doc['_id'] for doc, _ in self._take(wanted)}
        self._claiming |= {doc['_id'] for doc, _ in wanted} - without
        writes += [
            self._refusals.set_aside(doc) or self._park(doc, limit) for doc, limit in wanted if doc['_id'] in without
        ]
        return {queue: [doc for doc in docs if doc['_id'] not in without] for queue, docs in taken.items()}

    def withdraw(self, ids: Collection[str]) -> None:
        """Note that these messages get no claim in this cycle although they got a slot."""
        self._claiming.difference_update(ids)

    def _take(self, wanted: list[_Wanted]) -> list[_Wanted]:
        """Take slots for these messages; return the messages for which there is none."""
        spare = self._spare()
        full, others = list[_Wanted](), list[_Wanted]()
        for each in wanted:
            key, most = each[1]
            (full if most <= self._full.get(key, 0) or self._refusals.waits(key) else others).append(each)
        untried = [each for each in others if not self._reuse(spare, *each)]
        left, again = list[_Wanted](), list[_Wanted]()
        for doc, limit in self._create(untried, {}):
            # A slot that was chosen at random may be taken while others are free.
            is_final = limit.limit == 1 or self._refusals.concerns(doc, limit.key)
            (left if is_final else again).append((doc, limit))
        left += self._create(again, {key: self._requests.taken(key) for key in {limit.key for _, limit in again}})
        for _, limit in left:
            self._full[limit.key] = max(limit.limit, self._full.get(limit.key, 0))
        return full + left

    def _spare(self) -> list[_Slot]:
        """Return the slots that no message of this consumer uses any more."""
        in_use = self._claiming | self._held | self._unacked.held_ids() | self._unacked.may_run().keys()
        return [each for each in self._slots.values() if each.item not in in_use]

    def _reuse(self, spare: list[_Slot], doc: Document, limit: Concurrency) -> bool:
        for each in spare:
            usable = each.item is not None and each.lease == self._lease.id
            if usable and each.key == limit.key and each.number < limit.limit:
                spare.remove(each)
                each.item = doc['_id']
                return True
        return False

    def _create(self, wanted: list[_Wanted], taken: Mapping[str, set[int]]) -> list[_Wanted]:
        """Create a slot for each of these messages, where one may be free; return the messages without one.

        `taken` has, by key, the numbers of slots that are taken; without it, a slot is chosen at random.
        """
        known: dict[str, set[int]] = defaultdict(set)
        for each in self._slots.values():
            known[each.key].add(each.number)  # it is taken, or freed with the next request
        left, tried, docs = list[_Wanted](), list[_Wanted](), list[Document]()
        for doc, limit in wanted:
            numbers = [n for n in range(limit.limit) if n not in known[limit.key] and n not in taken.get(limit.key, ())]
            if not numbers:
                left.append((doc, limit))
                continue
            number = random.choice(numbers)
            known[limit.key].add(number)
            tried.append((doc, limit))
            docs.append({**concurrency.slot(limit.key, number, self._lease.id, self._client.clock.now())})
        for (doc, limit), made, result in zip(tried, docs, self._client.bulk(docs) if docs else (), strict=True):
            if result.is_refused:
                self._refusals.note(limit.key, [doc['_id']], result)
            if result.is_stored:
                # Another consumer may hold a slot whose creation is unproven: it is freed in this cycle.
                number = int(made['_id'].rpartition(':')[2])
                item = doc['_id'] if result.is_proven else None
                self._slots[made['_id']] = _Slot(made['_id'], result.rev, limit.key, number, self._lease.id, item)
            if not result.is_proven:
                left.append((doc, limit))
        return left

    def _park(self, doc: Document, limit: Concurrency) -> PendingWrite:
        def on_result(result: WriteResult) -> None:
            if result.is_stored:
                logger.debug('message %s waits for a slot of concurrency key %r', doc['_id'], limit.key)
            if not result.is_conflict:  # in conflict, another consumer has parked or claimed it
                most, _ = self._parked.get(limit.key, (0, 0.0))
                at = max(time.monotonic() + self._pause, self._refusals.until(limit.key))
                self._parked[limit.key] = max(limit.limit, most), at
                self._unacked.wakeup.set(self._pause)

        return concurrency.park(doc, limit.key, self._client.clock.now()), on_result

    # -- free

    def free(self, writes: list[PendingWrite]) -> None:
        """Add to `writes` what frees the slots that no message uses, and what wakes messages for freed slots.

        Call this in every cycle after `admit`. *Raises* the errors of `Client`.
        """
        if not self.used:
            return
        self._look_for_free_slots()
        now = time.monotonic()
        for key, number in [each for each, at in self._look_at.items() if at <= now]:
            del self._look_at[key, number]
            self._freed[key].add(number)
        if self._freed:
            found = self._requests.parked_for_slots(self._freed)
            self._freed.clear()
            writes += [self._wake(doc, number) for _, number, doc in found if doc]
            # Another consumer was faster, for a slot that it has freed: look for the next message.
            self._look_at.update({(key, n): now + self._pause for key, n, doc in found if not doc and n is not None})
        writes += [self._free(each) for each in self._spare()]

    def settle(self) -> list[Document]:
        """Prepare the next cycle; return the messages that were woken, to be claimed again."""
        self._claiming.clear()
        if self._slots and self._spare():
            self._unacked.wakeup.set()  # the claims that slots were taken for have failed
        woken, self._woken = self._woken, []
        return woken

    def _look_for_free_slots(self) -> None:
        """Find out whether slots were freed before messages were parked: nobody would wake these messages."""
        now = time.monotonic()
        for key, limit in [(key, limit) for key, (limit, at) in self._parked.items() if at <= now]:
            own = {each.number for each in self._slots.values() if each.key == key}
            if len(own) < limit and (free := set(range(limit)) - own - self._requests.taken(key)):
                self._freed[key] |= free
            del self._parked[key]  # if this consumer holds all slots, it looks when it frees one

    def _free(self, slot: _Slot) -> PendingWrite:
        def on_result(result: WriteResult) -> None:
            # Without a response the sweep finds the slot, if it still exists.
            if self._slots.get(slot.id) is slot:
                del self._slots[slot.id]
            if result.is_unproven:
                # Other nodes may show the slot as taken until then.
                self._look_at[slot.key, slot.number] = time.monotonic() + SYNC
                return
            self._freed[slot.key].add(slot.number)
            self._unacked.wakeup.set()

        return deletion({'_id': slot.id, '_rev': slot.rev}), on_result

    def _wake(self, doc: Document, number: int | None) -> PendingWrite:
        """Return the write that wakes a message for a slot, or without one."""
        woken = concurrency.unpark(doc)

        def on_result(result: WriteResult) -> None:
            if result.is_stored:
                logger.debug('message %s can be claimed again', doc['_id'])
                self._woken.append({**woken, '_rev': result.rev})
                again = str(doc.get('queue')) in self._unacked.paused  # nobody claims it now: wake the next one, too
            else:
                again = not result.is_refused  # another consumer was faster: look for the next one
            if again and number is not None:
                self._freed[str(concurrency.parked_key(doc))].add(number)
            self._unacked.wakeup.set()

        return woken, on_result

    # -- the end

    def finish(self, writes: list[PendingWrite]) -> bool:
        """Add to `writes` what frees all slots but those of tasks that may be running; tell whether there are such."""
        self._claiming.clear()
        spare = self._spare()
        writes += [self._free(each) for each in spare]
        return len(spare) < len(self._slots)

    def wake_last(self) -> list[PendingWrite]:
        """Return the writes that wake messages for the slots that were freed last; *raises* the errors of `Client`."""
        found = self._requests.parked_for_slots(self._freed) if self._freed else []
        return [self._wake(doc, number) for _, number, doc in found if doc]
