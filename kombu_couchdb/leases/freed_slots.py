"""The sweep of slots: frees those of consumers that are gone, and wakes the messages that wait although a slot is free.

Usually the consumer that frees a slot wakes a waiting message. The sweep finds what a killed consumer left, or what
went wrong otherwise. It also tells this consumer which messages wait for starts of rate keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from ..couchdb.client import Document
from ..documents import concurrency, rates
from ..log import get_logger
from ..queues.slots import Slots
from ..queues.store import LeaseStats, Store

__all__ = ['FreedSlots']

logger = get_logger(__name__)

#: The most keys whose slots one sweep counts, and the most waiting messages that it reads for them.
_MAX_KEYS, _MAX_DOCS = 50, 200


class FreedSlots:
    """Sweeps the slots of one database, for one consumer; for its I/O thread alone."""

    def __init__(self, store: Store) -> None:
        self._store, self._slots = store, Slots(store.client)
        #: Returns the revisions of the slots that this consumer knows to have taken, by id.
        self.known: Callable[[], dict[str, str]] = dict
        #: Is called with each `parked_key` under which messages wait for starts of rate keys.
        self.on_waiting: Callable[[str], None] = lambda parked: None
        self._last_key: str | None = None  # of the last sweep that counted slots

    def sweep(self, leases: LeaseStats, own: str, expired: Collection[str]) -> None:
        """Sweep once; no request if `leases` shows neither slots of other consumers nor waiting messages.

        `expired` are the consumers whose leases have just ended. *Raises* the errors of `Client`.
        """
        holders = leases['slot'].keys() - {own}
        unknown = [name for name in holders if name not in leases['consumer']]
        alive = self._store.alive(unknown) if unknown else set()
        for name in [name for name in holders if name in expired or (name in unknown and name not in alive)]:
            if count := self._slots.free(self._slots.of(name)):
                logger.info('%d concurrency slots of consumer %s, which has no lease any more, were freed', count, name)
        known = self.known()
        if leases['slot'].get(own, {}).get('count', 0) > len(known):
            # The responses to these creations were lost, or a cluster did not prove them.
            self._slots.free(doc for doc in self._slots.of(own) if known.get(doc['_id']) != doc['_rev'])
        if leases['parked']:
            self._wake()

    def _wake(self) -> None:
        """Wake waiting messages of the next keys, for the slots of each key that are free."""
        keys = self._slots.parked_keys(_MAX_KEYS, self._last_key)
        self._last_key = keys[-1] if len(keys) == _MAX_KEYS else None
        for parked in self._slots.parked_for_rates():
            self.on_waiting(parked)
        keys = [key for key in keys if rates.queue_and_key(key) is None]
        waiting: dict[str, list[Document]] = defaultdict(list)
        for key, doc in self._slots.first_parked(dict.fromkeys(keys, max(1, _MAX_DOCS // max(1, len(keys))))):
            if doc:
                waiting[key].append(doc)
        docs = list[Document]()
        for key, found in waiting.items():
            highest = max((limit.limit for doc in found if (limit := concurrency.limit_of(doc))), default=0)
            free = set(range(highest)) - (self._slots.taken(key) if highest else set())
            docs += [doc for _, doc in concurrency.assign(found, free)]
        if docs and (count := self._slots.unpark(docs)):
            logger.info('%d messages can be claimed again: their concurrency keys have free slots', count)
