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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from .. import design
from ..couchdb.bulk import deletion
from ..couchdb.client import LAST, Client, Document
from ..couchdb.conflicts import SYNC
from ..couchdb.shapes import members, text
from ..couchdb.write_result import PendingWrite, WriteResult
from ..documents import concurrency, rates, workitem
from ..documents.ids import RATE
from ..documents.rates import RateLimit
from ..fleet.attention import Peers
from ..leases.lease import Lease
from ..log import get_logger
from ..queues import waiting
from ..queues.store import LeaseStats, Store
from ..queues.topology import Topology
from .permits import HeldSlot, Slots, Starts

logger = get_logger(__name__)

#: How often a consumer looks for messages that changed while it read them, or that it could not claim, in seconds.
_AGAIN_SECONDS = 0.1

#: The most keys whose slots one sweep counts, or whose parked messages one request reads, and the most parked messages
#: that a sweep reads for them.
_MAX_KEYS, _MAX_DOCS = 50, 200

_IDS = members(id=text)

#: The most rate keys that one request lists.
_MAX_RATES = 1000

#: How many parked messages of a key are read for its free slots at least: first, and then if none of those has a limit
#: that is high enough.
_DEPTHS = (1, 40, 500)


@dataclass
class _Look:
    """When to look for permits for the messages that are parked under a key: a monotonic time."""

    at: float
    #: The highest limit of those that wait for slots, and the rate of those that wait for starts, if it is known.
    most: int = 0
    rate: RateLimit | None = None


class ParkedMessages:
    """The parked messages of one database. *Every* method raises the errors of `Client`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def keys(self, limit: int, after: str | None) -> list[str]:
        """Return up to `limit` keys that messages wait for, those that come after the key `after` first."""
        return self._keys(limit, *([] if after is None else [design.key_of(after), LAST]))

    def rate_keys(self) -> list[str]:
        """Return the keys under which messages wait for starts of rate keys, up to 1,000; see `documents.rates`."""
        first = design.key_of(RATE)
        return self._keys(_MAX_RATES, first, end=f'{first}\ufff0')

    def _keys(self, limit: int, *start: Any, end: Any = LAST) -> list[str]:
        # In the body of a request: in a URL, an encoded key could be too long.
        keys = {'startkey': ['parked', None, *start], 'endkey': ['parked', None, end], 'group_level': 3, 'limit': limit}
        [rows] = waiting.query(self._client, [keys], members(), view='leases')
        return [key for row in rows if (key := design.queue_of(row['key'][2])) is not None]

    def first(self, counts: Mapping[str, int]) -> list[tuple[str, Document | None]]:
        """Return the first messages that are parked under these keys: as many of each key as `counts` says.

        The highest priority is first, then the oldest message. Each comes with its key; it is None if it was changed
        since the view read it, and does not wait any more. Two requests for each 50 keys.
        """
        keys, found = list(counts), list[tuple[str, str]]()
        for start in range(0, len(keys), _MAX_KEYS):
            queries = [
                {**_rows_of(key), 'limit': counts[key], 'reduce': False} for key in keys[start : start + _MAX_KEYS]
            ]
            results = waiting.query(self._client, queries, _IDS, view='leases')
            found += [(key, row['id']) for key, rows in zip(keys[start:], results, strict=False) for row in rows]
        docs = self._client.fetch([doc_id for _, doc_id in found]) if found else []
        return [
            (key, doc if doc and workitem.is_waiting(doc) and concurrency.parked_key(doc) == key else None)
            for (key, _), doc in zip(found, docs, strict=True)
        ]

    def for_slots(self, free: Mapping[str, Collection[int]]) -> list[tuple[str, int | None, Document | None]]:
        """Return the messages that may go on with these free slots, by key: see `concurrency.assign`.

        Each comes with its key and its slot. (key, slot, None) says that other consumers changed messages of the key
        meanwhile: look again for one for this slot. Two requests for each 50 keys, and up to four more if the messages
        of a key have different limits.
        """
        found = list[tuple[str, int | None, Document | None]]()
        left = {key: set(numbers) for key, numbers in free.items()}
        for depth in _DEPTHS:
            counts = {key: max(depth, len(numbers)) for key, numbers in left.items()}
            read: dict[str, list[Document | None]] = {key: [] for key in left}
            for key, doc in self.first(counts):
                read[key].append(doc)
            for key, docs in read.items():
                given = concurrency.assign([doc for doc in docs if doc], left[key])
                idle = left[key] - {number for number, _ in given}
                if idle and len(docs) == counts[key] and depth != _DEPTHS[-1]:
                    continue
                found += [(key, number, doc) for number, doc in given]
                found += [(key, number, None) for number in idle if None in docs]
                del left[key]
            if not left:
                break
        return found


class Gate:
    """The gate of one consumer; for its I/O thread alone. In each cycle its methods are called in the order here.

    Until `is_used` is true, only `saw`, `admit` and `sweep` need to be called: there is nothing else to do.
    """

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
        #: Whether this consumer knows of messages with limits.
        self.is_used = False

    def due(self, credit: Mapping[str, int]) -> float:
        """Return the monotonic time of the next cycle that the gate needs, with this credit by queue; or infinity."""
        if self._is_due:
            return -inf
        return min((look.at for key, look in self._looks.items() if _is_served(key, credit)), default=inf)

    def begin(self, in_use: Callable[[], set[str]]) -> None:
        """Begin a cycle. `in_use` returns the ids of the messages that are held, or whose tasks may still run."""
        self._began = time.monotonic()
        self._slots.begin(in_use() if len(self._slots) else set())

    def saw(self, key: str) -> None:
        """Note that messages are parked under a key, perhaps by another consumer."""
        self.is_used = True
        if key not in self._looks and rates.queue_and_key(key):
            self._looks[key] = _Look(self._starts.look_at(key, None))

    def ready(self, credit: Mapping[str, int]) -> list[Document]:
        """Return parked messages of the queues with credit that can be claimed now, if it is time to look.

        They still have to be admitted. *Raises* the errors of `Client`.
        """
        if not self._looks:
            return []
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
        self, taken: dict[str, list[Document]], writes: list[PendingWrite], *, needs_slot: bool = True
    ) -> dict[str, list[Document]]:
        """Return those of the messages to be claimed, by queue, that have the start and the slot that they need.

        Add to `writes` the changes that park the others. *Raises* the errors of `Client`.
        """
        docs, now = {doc['_id']: doc for docs in taken.values() for doc in docs}, self._clock.now()
        # The worker does not run a task that has expired: it would waste a start.
        running = {name: doc for name, doc in docs.items() if not workitem.has_expired(doc, now)}
        rated = {name: rate for name, doc in running.items() if (rate := rates.rate_of(doc))}
        limited = {name: limit for name, doc in docs.items() if needs_slot and (limit := concurrency.limit_of(doc))}
        if not rated and not limited:
            return taken
        self.is_used = True
        late = self._starts.surplus(rated)  # a slot is not taken in vain
        full = self._slots.acquire({name: each for name, each in limited.items() if name not in late})
        late |= self._starts.acquire({name: each for name, each in rated.items() if name not in late | full})
        self._slots.withdraw(late)
        for name, limit in limited.items():
            if name in full:
                self._look(limit.key, limit.limit, self._slots.look_at(limit.key))
                writes += self._park(docs[name], limit.key, f'a slot of concurrency key {limit.key!r}')
        for name, rate in rated.items():
            key = rates.parked_key(rate.key, str(docs[name]['queue']))
            if name in late:
                writes += self._park(docs[name], key, f'a start of rate key {rate.key!r}')
            if name in late or (key in self._looks and name not in full):  # this consumer has taken the last start
                self._looks[key] = _Look(self._starts.look_at(key, rate), rate=rate)
        return {queue: [doc for doc in docs if doc['_id'] not in late | full] for queue, docs in taken.items()}

    def wake(self, writes: list[PendingWrite]) -> None:
        """Add to `writes` what wakes messages for slots that have become free.

        *Raises* the errors of `Client`.
        """
        # What was parked in this cycle is not stored yet: look for free slots afterwards.
        due = [key for key, look in self._looks.items() if look.at <= self._began and not rates.queue_and_key(key)]
        for key in due:
            most = self._looks[key].most
            if (numbers := self._slots.free_numbers(key, most)) or not most:
                self._freed[key] |= numbers
            del self._looks[key]  # if this consumer holds all slots, it looks when it frees one
        found = self._parked.for_slots(self._freed) if self._freed else []
        self._freed.clear()
        for key, number, doc in found:
            if doc:
                writes.append(Wake(self, doc, key, number))
            elif number is not None:
                # Another consumer was faster, for a slot that it has freed: look for the next message.
                self._look(key, number + 1, time.monotonic() + self._slots.pause)

    def free(self, writes: list[PendingWrite]) -> None:
        """Add to `writes` what frees the slots that no message uses."""
        writes += [FreeSlot(self, slot) for slot in self._slots.spare]

    def holds_slots(self) -> bool:
        """Tell whether messages of this consumer use slots: they end with its lease."""
        return len(self._slots.spare) < len(self._slots)

    def settle(self, in_use: Callable[[], set[str]]) -> list[Document]:
        """End a cycle, after its writes; return the messages that were woken, to be claimed again."""
        self._slots.begin(in_use() if len(self._slots) else set())
        woken, self._woken = self._woken, []
        # There is a spare slot if the claim that it was taken for has failed.
        self._is_due = bool(woken or self._freed or self._slots.spare)
        return woken

    # -- besides the cycles

    def sweep(self, leases: LeaseStats, own: str, expired: Collection[str]) -> None:
        """Free the slots of consumers that are gone, and look for messages that nobody has woken.

        No request if `leases` shows neither slots of other consumers nor parked messages. `expired` are the consumers
        whose leases have just ended. *Raises* the errors of `Client`.
        """
        self.is_used |= bool(leases['parked'])
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

    # -- parked messages

    def _look(self, key: str, most: int, at: float) -> None:
        """Look for free slots at a monotonic time, for messages with limits up to `most`."""
        look = self._looks.setdefault(key, _Look(at))
        look.at, look.most = max(look.at, at), max(look.most, most)

    def _park(self, doc: Document, key: str, what: str) -> list[PendingWrite]:
        """Return the write that parks a message, which waits for `what`; none if it is parked already."""
        if concurrency.parked_key(doc) == key:
            return []
        return [Park(concurrency.park(doc, key, self._clock.now()), what)]

    # -- results of writes

    def on_woken(self, doc: Document) -> bool:
        """Note that a message can be claimed again; tell whether somebody claims it now."""
        self._woken.append(doc)
        return str(doc.get('queue')) not in self._topology.paused

    def on_free(self, key: str, number: int) -> None:
        """Note that a slot is free: the next cycle looks for a message for it."""
        self._freed[key].add(number)

    def on_freed(self, slot: HeldSlot, *, proven: bool) -> None:
        """Note that this consumer holds a slot no more. Unproven: other nodes may show it as taken for a while."""
        self._slots.freed(slot)
        if proven:
            self.on_free(slot.key, slot.number)
        else:
            self._look(slot.key, slot.number + 1, time.monotonic() + SYNC)


class Park(PendingWrite):
    """Parks a message. If that is not stored, a later cycle tries to claim or park it again."""

    def __init__(self, doc: Mapping[str, Any], what: str) -> None:
        super().__init__(doc)
        self._what = what

    def stored(self, result: WriteResult) -> None:
        """Log what the message waits for."""
        logger.debug('message %s waits for %s', result.id, self._what)


class Wake(PendingWrite):
    """Wakes a parked message for a slot that has become free; `number` is None if it needs none."""

    def __init__(self, gate: Gate, doc: Document, key: str, number: int | None) -> None:
        super().__init__(concurrency.unpark(doc))
        self._gate, self._key, self._number = gate, key, number

    def stored(self, result: WriteResult) -> None:
        """Offer the message to this consumer. If nobody claims it now, the slot wakes the next one, too."""
        logger.debug('message %s can be claimed again', result.id)
        if not self._gate.on_woken({**self.doc, '_rev': result.rev}):
            self._wake_next()

    def conflict(self, result: WriteResult) -> None:
        """Look for the next message: another consumer was faster."""
        self._wake_next()

    def unknown(self, result: WriteResult) -> None:
        """Look again."""
        self._wake_next()

    def _wake_next(self) -> None:
        if self._number is not None:
            self._gate.on_free(self._key, self._number)


class FreeSlot(PendingWrite):
    """Deletes a slot that no message uses. Whatever the result is, this consumer does not use the slot any more."""

    def __init__(self, gate: Gate, slot: HeldSlot) -> None:
        super().__init__(deletion({'_id': slot.id, '_rev': slot.rev}))
        self._gate, self._slot = gate, slot

    def settle(self, result: WriteResult) -> None:
        """Forget the slot."""
        self._gate.on_freed(self._slot, proven=not result.is_unproven)


def _is_served(key: str, credit: Mapping[str, int]) -> bool:
    """Tell whether this consumer looks for permits for a key: for starts only of queues with credit."""
    queue_and_key = rates.queue_and_key(key)
    return queue_and_key is None or credit.get(queue_and_key[0], 0) > 0


def _rows_of(key: str) -> Document:
    name = design.key_of(key)
    return {'startkey': ['parked', None, name], 'endkey': ['parked', None, name, {}]}
