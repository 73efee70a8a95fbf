"""The starts of rate keys that one consumer takes, and the messages that wait for starts.

A consumer takes a start before it claims a message with a rate key, by a write of the key's document in the revision
that it knows. A message without a start is parked. Every consumer of its queue that knows about it reads the document
again when the next start is due. The consumer that took the last start does so at once, the others a moment later:
usually its messages are claimed by then, and the others find a later date. Parked messages are claimed without being
woken, by one write.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document
from ..couchdb.write_result import WriteResult
from ..documents import concurrency, rates
from ..documents.rates import BURST_SECONDS, Rate
from ..leases.lease import Lease
from ..log import get_logger
from ..queues.slots import Slots as Requests
from .pending_writes import PendingWrite
from .refusals import Refusals
from .slots import Slots

__all__ = ['Rates']

logger = get_logger(__name__)

#: How often a consumer tries to take starts that other consumers take at the same time; then it waits for the next.
_TRIES = 3

#: How much later than the consumer that took the last start the others look at most: in seconds, and, if that is less,
#: in intervals of the rate for each consumer of the queue. So they read the document once for each two starts together,
#: however many they are.
_MAX_LATER_SECONDS, _MAX_LATER_INTERVALS = 1.0, 4.0

#: How often a consumer looks for messages that changed while it read them, or that it could not claim, in seconds.
_AGAIN_SECONDS = 0.1


#: The most rate keys whose documents this consumer remembers.
_MAX_KNOWN = 10_000


class _Known(NamedTuple):
    """What this consumer knows of the document of a rate key."""

    doc: Document | None
    next: float
    #: Other leaf revisions, which a cluster left: they are deleted with the next write.
    others: list[Document]


class Rates:
    """The starts of one consumer; for its I/O thread alone."""

    def __init__(self, client: Client, lease: Lease, slots: Slots) -> None:
        self._client, self._lease, self._slots = client, lease, slots
        self._requests = Requests(client)
        self._refusals = Refusals(client, 'the next start')
        self._known: dict[str, _Known] = {}  # by rate key
        #: By `parked_key`: the monotonic time to look for messages that wait, and their rate if it is known.
        self._look_at: dict[str, float] = {}
        self._rates: dict[str, Rate] = {}
        #: Returns the number of consumers of a queue, with this one.
        self.consumers: Callable[[str], int] = lambda queue: 1

    def due(self, credit: Mapping[str, int]) -> float:
        """Return the monotonic time of the next cycle that this object needs; infinite if it needs none."""
        return min((at for parked, at in self._look_at.items() if _is_free(parked, credit)), default=inf)

    def saw(self, parked: str | None) -> None:
        """Note that messages wait under a `parked_key`, which another consumer may have parked."""
        if parked is not None and parked not in self._look_at and rates.queue_and_key(parked):
            self._look_at[parked] = time.monotonic() + self._later(parked)

    # -- messages that wait

    def ready(self, credit: Mapping[str, int]) -> list[Document]:
        """Return the parked messages of the queues with credit for which there are starts now, if it is time to look.

        *Raises* the errors of `Client`.
        """
        now = time.monotonic()
        due = {
            parked: queue_and_key
            for parked, at in self._look_at.items()
            if at <= now and _is_free(parked, credit) and (queue_and_key := rates.queue_and_key(parked))
        }
        if not due:
            return []
        self._read({key for _, key in due.values()})
        counts = {}
        for parked, (queue, key) in due.items():
            if starts := self._starts(key, self._rates.get(parked), credit[queue]):
                counts[parked] = starts
                self._look_at[parked] = now + _AGAIN_SECONDS
            else:
                self._schedule(parked, key)
        found = self._requests.first_parked(counts) if counts else []
        for parked in counts.keys() - {parked for parked, _ in found}:
            del self._look_at[parked]  # nothing waits any more
            self._rates.pop(parked, None)
        docs = []
        for parked, doc in found:
            if doc and (rate := rates.rate_of(doc)):
                self._rates[parked] = rate
            docs += [doc] if doc else []
        return docs

    def _starts(self, key: str, rate: Rate | None, most: int) -> int:
        """Return how many messages can start when they have been read, up to `most`; 0 if none can start now."""
        now = self._client.clock.now()
        next_ = self._known[key].next
        if not rates.has_start(next_, now):
            return 0
        if rate is None:
            return 1
        starts = 0
        while starts < most and rates.has_start(next_, now + BURST_SECONDS):
            starts += 1
            next_ = rates.after(next_, rate, now)
        return starts

    def _schedule(self, parked: str, key: str) -> None:
        """Set the time to look for messages that wait: when a start can be taken, with time to spare."""
        if self._refusals.waits(key):
            self._look_at[parked] = self._refusals.until(key)
            return
        known = self._known.get(key)
        wait = max(0.0, known.next - BURST_SECONDS / 2 - self._client.clock.now()) if known else _AGAIN_SECONDS
        if not (known and known.doc and known.doc.get('by') == self._lease.id):
            wait += self._later(parked)
        self._look_at[parked] = time.monotonic() + wait

    def _later(self, parked: str) -> float:
        """Return how much later this consumer looks than the one that took the last start, in seconds: at random."""
        found, rate = rates.queue_and_key(parked), self._rates.get(parked)
        intervals = _MAX_LATER_INTERVALS * self.consumers(found[0]) if found else 0.0
        return random.uniform(0.0, min(_MAX_LATER_SECONDS, intervals * rate.interval if rate else inf))

    def _read(self, keys: set[str]) -> None:
        if not keys:
            return
        names = sorted(keys)
        now = self._client.clock.now()
        for key, doc in zip(names, self._client.find([rates.document_id(key) for key in names]), strict=True):
            others = list[Document]()
            if doc and self._client.replicas > 1:
                leaves = [leaf for leaf in self._client.leaves(doc['_id']) if not leaf.get('_deleted')]
                # All consumers continue with the same leaf.
                rest = {leaf['_rev'] for leaf in rates.resolve(leaves)}
                others = [leaf for leaf in leaves if leaf['_rev'] in rest]
                doc = next((leaf for leaf in leaves if leaf['_rev'] not in rest), None)
            self._known[key] = _Known(doc, rates.next_of(doc, now), others)

    # -- messages to be claimed

    def admit(
        self, taken: dict[str, list[Document]], writes: list[PendingWrite], *, needs_slot: bool = True
    ) -> dict[str, list[Document]]:
        """Return those of the messages to be claimed, by queue, that have the start and the slot that they need.

        Add to `writes` the changes that park the others. *Raises* the errors of `Client`.
        """
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        wanted = {doc['_id']: (doc, rate) for docs in taken.values() for doc in docs if (rate := rates.rate_of(doc))}
        without = self._surplus(wanted)  # a slot is not taken in vain
        taken = {queue: [doc for doc in docs if doc['_id'] not in without] for queue, docs in taken.items()}
        if needs_slot:
            taken = self._slots.admit(taken, writes)
        left = {doc['_id'] for docs in taken.values() for doc in docs}
        late = self._take({doc_id: each for doc_id, each in wanted.items() if doc_id in left})
        if late:
            self._slots.withdraw(late)
            taken = {queue: [doc for doc in docs if doc['_id'] not in late] for queue, docs in taken.items()}
        for doc_id, (doc, rate) in wanted.items():
            parked = rates.parked_key(rate.key, str(doc['queue']))
            if doc_id in without | late:
                refused = self._refusals.set_aside(doc)
                writes += [refused] if refused else self._park(doc, rate, parked)
            elif parked in self._look_at:
                self._schedule(parked, rate.key)  # this consumer has taken the last start
        return taken

    def _surplus(self, wanted: Mapping[str, tuple[Document, Rate]]) -> set[str]:
        """Return the ids of the messages for which there is no start, as far as this consumer knows: no request."""
        now = self._client.clock.now()
        next_ = {key: known.next for key, known in self._known.items()}
        surplus = set()
        for doc_id, (_, rate) in wanted.items():
            at = next_.get(rate.key, now)
            if rates.has_start(at, now) and not self._refusals.waits(rate.key):
                next_[rate.key] = rates.after(at, rate, now)
            else:
                surplus.add(doc_id)
        return surplus

    def _take(self, wanted: Mapping[str, tuple[Document, Rate]]) -> set[str]:
        """Take a start for each of these messages; return the ids of the messages for which there is none."""
        left, without = dict(wanted), set[str]()
        self._read({rate.key for _, rate in left.values()} - self._known.keys())
        for _ in range(_TRIES):
            surplus = self._surplus(left)
            without |= surplus
            for doc_id in surplus:
                del left[doc_id]
            if not left:
                return without
            left = self._write(left)
            if not left:
                return without
            self._read({rate.key for _, rate in left.values()})
        return without | left.keys()

    def _write(self, wanted: dict[str, tuple[Document, Rate]]) -> dict[str, tuple[Document, Rate]]:
        """Write the documents that take these starts; return the messages whose starts are not proven."""
        now = self._client.clock.now()
        by_key: dict[str, list[Rate]] = defaultdict(list)
        for _, rate in wanted.values():
            by_key[rate.key].append(rate)
        docs: dict[str, Document] = {}
        for key, found in by_key.items():
            known = self._known[key]
            next_ = known.next
            for rate in found:
                next_ = rates.after(next_, rate, now)
            docs[key] = {**rates.document(known.doc, key, next_, self._lease.id, now)}
        deletions = [deletion(leaf) for key in by_key for leaf in self._known[key].others]
        self._known = {key: each for key, each in self._known.items() if key not in docs}
        results = self._client.bulk([*docs.values(), *deletions])
        for (key, doc), result in zip(docs.items(), results, strict=False):
            if result.is_refused:
                self._refusals.note(key, [doc_id for doc_id, (_, rate) in wanted.items() if rate.key == key], result)
            if result.is_proven:
                self._known[key] = _Known({**doc, '_rev': result.rev}, doc['next'], [])
        return {doc_id: each for doc_id, each in wanted.items() if each[1].key not in self._known}

    def _park(self, doc: Document, rate: Rate, parked: str) -> list[PendingWrite]:
        self._rates[parked] = rate
        self._schedule(parked, rate.key)
        if concurrency.parked_key(doc) == parked:
            return []

        def on_result(result: WriteResult) -> None:
            if result.is_stored:
                logger.debug('message %s waits for a start of rate key %r', doc['_id'], rate.key)

        return [(concurrency.park(doc, parked, self._client.clock.now()), on_result)]


def _is_free(parked: str, credit: Mapping[str, int]) -> bool:
    found = rates.queue_and_key(parked)
    return found is not None and credit.get(found[0], 0) > 0
