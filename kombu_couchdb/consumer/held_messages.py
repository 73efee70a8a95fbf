"""The claimed messages that a consumer holds until a decision about them is written. Two threads share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..couchdb.client import Document
from ..documents import workitem
from ..log import get_logger
from .delivery import Delivery
from .mailbox import Mailbox
from .reservations import Reservations

__all__ = ['RELEASED_UNCOUNTED', 'HeldMessages']

logger = get_logger(__name__)

#: The log line for a message that is released without counting its delivery as an attempt.
RELEASED_UNCOUNTED = 'released message %s of queue %s, attempt %s (not counted, not stored yet)'


class HeldMessages(Reservations):
    """The held messages and the places that they take in channels. Any thread may call any method."""

    def __init__(self, mailbox: Mailbox[Delivery | Exception], unlimited: int) -> None:
        super().__init__(mailbox, unlimited)
        #: By delivery tag.
        self._held: dict[str, Delivery] = {}

    def ids(self) -> set[str]:
        """Return the ids of the messages that the database may show as claimed by this consumer."""
        with self._lock:
            return self._unstored | {delivery.doc['_id'] for delivery in self._held.values()}

    def docs(self) -> list[Document]:
        """Return the messages that this consumer holds."""
        with self._lock:
            return [delivery.doc for delivery in self._held.values()]

    def held_ids(self) -> set[str]:
        """Return the ids of the messages that are held."""
        return {doc['_id'] for doc in self.docs()}

    def hold(self, delivery: Delivery) -> None:
        """Hold a claimed message until kombu decides about it."""
        with self._lock:
            if not delivery.final:
                self._held[delivery.tag] = delivery

    def awaiting_bodies(self) -> list[Delivery]:
        """Return the deliveries whose bodies have not been read yet, in the order of their claims."""
        with self._lock:
            return [delivery for delivery in self._held.values() if delivery.needs_body]

    def drop_all(self) -> list[Document]:
        """Forget all claimed messages, without writing anything, and return them: the lease was lost."""
        with self._lock:
            lost, self._held = list(self._held.values()), {}
            for item in self._mailbox.discard(lambda d: isinstance(d, Delivery) and not d.final):
                assert isinstance(item, Delivery)
                item.credit.waiting -= (
                    1  # `deliver` does this for a delivery that kombu is just taking from the mailbox
                )
            for delivery in lost:
                delivery.credit.held -= 1
                delivery.credit.waiting -= self._shelf.take_out(delivery) or delivery.needs_body
            self.wakeup.set()
            return [delivery.doc for delivery in lost]

    def _release_undelivered(self, which: Callable[[Delivery], bool]) -> None:
        """Release the messages that kombu has not received and for which `which(delivery)` is true."""
        self._give_back(self._shelf.having(which))  # first: they would take the places of the others
        for item in [
            *self._mailbox.discard(lambda d: isinstance(d, Delivery) and which(d)),
            *filter(which, self.awaiting_bodies()),
        ]:
            assert isinstance(item, Delivery)
            self._release_one_undelivered(item)

    def _give_back(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self._release_one_undelivered(delivery)

    def _release_one_undelivered(self, delivery: Delivery) -> None:
        delivery.credit.waiting -= 1
        if delivery.tag in self._held:
            self._end(delivery.tag, lambda doc: workitem.release(doc, delivered=False), RELEASED_UNCOUNTED)

    def _end(self, tag: str, change: Callable[[Document], Mapping[str, Any]], log_text: str) -> None:
        """Stop holding a message and add the write of `change(document)`."""
        delivery = self._held.pop(tag)
        delivery.credit.held -= 1
        self._shelf.take_out(delivery)
        self._shelf.refill(delivery.credit)
        self.add_write(delivery.doc, change)
        logger.debug(log_text, delivery.doc['_id'], delivery.doc['queue'], delivery.doc['attempts'])
