"""The gate: admits messages to be claimed, or parks them under a key until there are permits for them.

A message may need two permits: a slot of its concurrency key, and a start of its rate key (see `permits`). One write
parks a message without a permit: it moves the message to another part of the view, so no consumer reads it again. A
message that waits for a slot is *woken* by another write. A message that waits for a start is claimed as it is.

No wakeup is lost between two consumers: who parks a message looks for free slots afterwards, and who frees a slot looks
for parked messages afterwards. One of them sees what the other has written. In a cluster a read may be older. The sweep
finds the message then, and what a killed consumer left.

If CouchDB refuses to store a permit, the messages of its key are parked, and one of them is tried again later.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from ..consumer.gate import Write
from ..couchdb.bulk import deletion
from ..couchdb.client import Document
from ..couchdb.conflicts import SYNC
from ..couchdb.write_result import WriteResult
from ..documents import concurrency, rates
from ..documents.rates import RateLimit
from ..fleet.attention import Peers
from ..leases.lease import Lease
from ..log import get_logger
from ..queues.store import LeaseStats, Store
from ..queues.topology import Topology
from .parked import ParkedMessages
from .permits import HeldSlot, Slots, Starts

logger = get_logger(__name__)

#: How often a consumer looks for messages that changed while it read them, or that it could not claim, in seconds.
_AGAIN_SECONDS = 0.1

#: The most keys whose slots one sweep counts, and the most parked messages that it reads for them.
_MAX_KEYS, _MAX_DOCS = 50, 200


@dataclass
class _Look:
    """When to look for permits for the messages that are parked under a key: a monotonic time."""

    at: float
    #: The highest limit of those that wait for slots, and the rate of those that wait for starts, if it is known.
    most: int = 0
    rate: RateLimit | None = None


class LimitsGate:
    """The gate of one consumer: see `consumer.gate.Gate`, which says in which order its methods are called."""

    def __init__(self, store: Store, lease: Lease, topology: Topology, peers: Peers) -> None:
        self._store, self._clock, self._topology = store, store.client.clock, topology
        self._parked = ParkedMessages(store.client)
        self._slots, self._starts = Slots(store.client, lease), Starts(store.client, lease, peers)
        self._looks: dict[str, _Look] = {}  # by key of parked messages
        #: By key: the slots that have become free since this consumer looked for messages that wait for them.
        self._freed: dict[str, set[int]] = defaultdict(set)
        self._woken: list[Document] = []
        self._began, self._is_due = time.monotonic(), False
        self._last_key: str | None = None  # of the last sweep

    @property
    def holds_slots(self) -> bool:
        """Whether this consumer holds slots: they end with its lease."""
        return len(self._slots) > 0

    def due(self, credit: Mapping[str, int]) -> float:
        """Return the monotonic time of the next cycle that the gate needs, with this credit by queue; or infinity."""
        if self._is_due:
            return -inf
        return min((look.at for key, look in self._looks.items() if _is_served(key, credit)), default=inf)

    def begin(self, in_use: set[str]) -> None:
        """Begin a cycle. `in_use` has the ids of the messages that are held, or whose tasks may still be running."""
        self._began = time.monotonic()
        self._slots.begin(in_use)

    def saw(self, key: str) -> None:
        """Note that messages are parked under a key, perhaps by another consumer."""
        if key not in self._looks and rates.queue_and_key(key):
            self._looks[key] = _Look(self._starts.look_at(key, None))

    def ready(self, credit: Mapping[str, int]) -> list[Document]:
        """Return parked messages of the queues with credit that can be claimed now, if it is time to look.

        They still have to be admitted. *Raises* the errors of `Client`.
        """
        now = time.monotonic()
        due = {
            parked: (look, *queue_and_key)
            for parked, look in self._looks.items()
            if look.at <= now and _is_served(parked, credit) and (queue_and_key := rates.queue_and_key(parked))
        }
        self._starts.read({key for _, _, key in due.values()})
        counts = {}
        for parked, (look, queue, key) in due.items():
            if starts := self._starts.available(key, look.rate, credit[queue]):
                counts[parked] = starts
            look.at = now + _AGAIN_SECONDS if starts else self._starts.look_at(parked, look.rate)
        found = self._parked.first(counts) if counts else []
        for parked in counts.keys() - {parked for parked, _ in found}:
            del self._looks[parked]  # nothing waits any more
        for parked, doc in found:
            if doc and (rate := rates.rate_of(doc)):
                self._looks[parked].rate = rate
        return [doc for _, doc in found if doc]

    def admit(
        self, taken: dict[str, list[Document]], writes: list[Write], *, needs_slot: bool = True
    ) -> dict[str, list[Document]]:
        """Return those of the messages to be claimed, by queue, that have the start and the slot that they need.

        Add to `writes` the changes that park the others. *Raises* the errors of `Client`.
        """
        docs = {doc['_id']: doc for docs in taken.values() for doc in docs}
        rated = {name: (doc, rate) for name, doc in docs.items() if (rate := rates.rate_of(doc))}
        limited = {
            name: (doc, limit) for name, doc in docs.items() if needs_slot and (limit := concurrency.limit_of(doc))
        }
        if not rated and not limited:
            return taken
        late = self._starts.surplus(rated)  # a slot is not taken in vain
        full = self._slots.take({name: each for name, each in limited.items() if name not in late})
        late |= self._starts.take({name: each for name, each in rated.items() if name not in late | full})
        self._slots.withdraw(late)
        for name, (doc, limit) in limited.items():
            if name in full:
                self._look(limit.key, limit.limit, self._slots.look_at(limit.key))
                writes += self._park(doc, limit.key, f'a slot of concurrency key {limit.key!r}')
        for name, (doc, rate) in rated.items():
            key = rates.parked_key(rate.key, str(doc['queue']))
            if name in late:
                writes += self._park(doc, key, f'a start of rate key {rate.key!r}')
            if name in late or (key in self._looks and name not in full):  # this consumer has taken the last start
                self._looks[key] = _Look(self._starts.look_at(key, rate), rate=rate)
        return {queue: [doc for doc in docs if doc['_id'] not in late | full] for queue, docs in taken.items()}

    def free(self, writes: list[Write]) -> None:
        """Add to `writes` what frees the slots that no message uses, and what wakes messages for freed slots.

        *Raises* the errors of `Client`.
        """
        # What was parked in this cycle is not stored yet: look for free slots afterwards.
        due = [key for key, look in self._looks.items() if look.at <= self._began and not rates.queue_and_key(key)]
        for key in due:
            most = self._looks[key].most
            if (numbers := self._slots.free_numbers(key, most)) or not most:
                self._freed[key] |= numbers
            del self._looks[key]  # if this consumer holds all slots, it looks when it frees one
        writes += self._wake_for_freed()
        writes += [self._free(slot) for slot in self._slots.spare()]

    def settle(self, in_use: set[str]) -> list[Document]:
        """End a cycle, after its writes; return the messages that were woken, to be claimed again."""
        self._slots.begin(in_use)
        woken, self._woken = self._woken, []
        # There is a spare slot if the claim that it was taken for has failed.
        self._is_due = bool(woken or self._freed or self._slots.spare())
        return woken

    # -- besides the cycles

    def sweep(self, leases: LeaseStats, own: str, expired: Collection[str]) -> None:
        """Free the slots of consumers that are gone, and look for messages that nobody has woken.

        No request if `leases` shows neither slots of other consumers nor parked messages. `expired` are the consumers
        whose leases have just ended. *Raises* the errors of `Client`.
        """
        self._slots.sweep(leases, own, expired, self._store.alive)
        if not leases['parked']:
            return
        for key in self._parked.rate_keys():
            self.saw(key)
        keys = self._parked.keys(_MAX_KEYS, self._last_key)
        self._last_key = keys[-1] if len(keys) == _MAX_KEYS else None
        keys = [key for key in keys if not rates.queue_and_key(key)]
        for key, doc in self._parked.first(dict.fromkeys(keys, max(1, _MAX_DOCS // max(1, len(keys))))):
            if doc:
                limit = concurrency.limit_of(doc)
                self._look(key, limit.limit if limit and limit.key == key else 0, self._began)

    def finish(self, writes: list[Write]) -> bool:
        """Add to `writes` what frees all slots but those of tasks that may be running; tell whether there are such."""
        spare = self._slots.spare()
        writes += [self._free(slot) for slot in spare]
        return len(spare) < len(self._slots)

    def wake_last(self) -> list[Write]:
        """Return the writes that wake messages for the slots that were freed last; *raises* the errors of `Client`."""
        return self._wake_for_freed()

    # -- parked messages

    def _look(self, key: str, most: int, at: float) -> None:
        """Look for free slots at a monotonic time, for messages with limits up to `most`."""
        look = self._looks.setdefault(key, _Look(at))
        look.at, look.most = max(look.at, at), max(look.most, most)

    def _park(self, doc: Document, key: str, what: str) -> list[Write]:
        """Return the write that parks a message, which waits for `what`; none if it is parked already."""

        def on_result(result: WriteResult) -> None:
            if result.is_stored:
                logger.debug('message %s waits for %s', doc['_id'], what)

        if concurrency.parked_key(doc) == key:
            return []
        return [(concurrency.park(doc, key, self._clock.now()), on_result)]

    def _wake_for_freed(self) -> list[Write]:
        """Return the writes that wake messages for the slots that have become free."""
        found = self._parked.for_slots(self._freed) if self._freed else []
        self._freed.clear()
        for key, number, doc in found:
            if number is not None and not doc:
                # Another consumer was faster, for a slot that it has freed: look for the next message.
                self._look(key, number + 1, time.monotonic() + self._slots.pause)
        return [self._wake(key, doc, number) for key, number, doc in found if doc]

    def _wake(self, key: str, doc: Document, number: int | None) -> Write:
        """Return the write that wakes a message for a slot, or without one."""
        woken = concurrency.unpark(doc)

        def on_result(result: WriteResult) -> None:
            if result.is_stored:
                logger.debug('message %s can be claimed again', doc['_id'])
                self._woken.append({**woken, '_rev': result.rev})
                again = str(doc.get('queue')) in self._topology.paused  # nobody claims it now: wake the next one, too
            else:
                again = not result.is_refused  # another consumer was faster: look for the next one
            if again and number is not None:
                self._freed[key].add(number)

        return woken, on_result

    def _free(self, slot: HeldSlot) -> Write:
        def on_result(result: WriteResult) -> None:
            self._slots.freed(slot)
            if result.is_unproven:  # other nodes may show the slot as taken until then
                self._look(slot.key, slot.number + 1, time.monotonic() + SYNC)
            else:
                self._freed[slot.key].add(slot.number)

        return deletion({'_id': slot.id, '_rev': slot.rev}), on_result


def _is_served(key: str, credit: Mapping[str, int]) -> bool:
    """Tell whether this consumer looks for permits for a key: for starts only of queues with credit."""
    queue_and_key = rates.queue_and_key(key)
    return queue_and_key is None or credit.get(queue_and_key[0], 0) > 0
