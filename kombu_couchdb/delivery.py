"""What passes between kombu's thread and the I/O thread: subscriptions, their credit, and deliveries."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kombu.utils.json import object_hook

from . import workitem
from .client import Document

__all__ = ['BROADCAST_TAG', 'Credit', 'Delivery', 'Subscription', 'broadcast']

#: What the delivery tag of a broadcast begins with.
BROADCAST_TAG = 'broadcast-'


@dataclass(eq=False)
class Credit:
    """How many messages a channel may hold: AMQP's prefetch count."""

    #: The prefetch count; 0 is no limit.
    limit: int = 0
    #: Claimed for the channel and not acknowledged yet.
    held: int = 0
    #: Of those, not handed to kombu yet; and those of consumers that do not acknowledge.
    waiting: int = 0

    def free(self, unlimited: int) -> int:
        """Return how many more may be claimed; without a limit, up to `unlimited` may wait to be handed over."""
        return self.limit - self.held if self.limit else unlimited - self.waiting


@dataclass(eq=False)
class Subscription:
    """One `basic_consume`: `deliver(delivery)` is called in kombu's thread."""

    tag: str
    queue: str
    no_ack: bool
    credit: Credit
    deliver: Callable[[Delivery], None]


@dataclass(eq=False)
class Delivery:
    """A message that was claimed, as the document stands in the database since."""

    doc: Document
    credit: Credit
    subscription: Subscription | None = None
    #: Whether its consumer took it without an error: given back when that stops, it does not count as an attempt then.
    accepted: bool = False
    no_ack: bool = False
    #: The message's body if it is an attachment, which is read after the claim; what is decided is written without it.
    body: bytes | None = None
    #: Whether the body is yet to be read.
    unread: bool = False
    tag: str = field(init=False)

    def __post_init__(self) -> None:
        # The revision tells this delivery from another of the same item, so that a late ack finds nothing.
        self.tag = f'{self.doc["_id"]}:{self.doc.get("_rev", "")}'

    def payload(self) -> dict[str, Any]:
        """Return the message as kombu's virtual transports represent it; *raises* `ValueError` or `TypeError` if it cannot."""
        message = {**self.doc['message'], 'headers': _typed(self.doc['message']['headers'])}
        date = self.doc.get('date')
        if isinstance(date, (int, float)) and date > time.time():
            # It is due by the server's clock and not yet by this machine's: Celery must not wait for the latter.
            message['headers']['eta'] = datetime.now(timezone.utc).isoformat()
        attempts = self.doc.get('attempts') or 1
        info = {**message['properties'].get('delivery_info', {}), 'redelivered': attempts > 1 or 'consumer' in self.doc,
                'delivery_count': attempts}
        if self.body is not None:
            message['body'] = self.body
        return {**message, 'properties': {**message['properties'], 'delivery_tag': self.tag, 'delivery_info': info}}


def broadcast(message: Document, subscription: Subscription) -> Delivery:
    """Return a broadcast as a delivery, which waits to be handed over and not to be acknowledged."""
    subscription.credit.waiting += 1
    return Delivery({'_id': BROADCAST_TAG + workitem.new_id(time.time()), 'message': message}, subscription.credit,
                    subscription, no_ack=True)


def _typed(value: Any) -> Any:
    """Return a header with kombu's `{"__type__": …}` turned back into dates, UUIDs and decimals."""
    if isinstance(value, dict):
        members = {name: _typed(member) for name, member in value.items()}
        try:
            return object_hook(members) if '__type__' in members else members
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return members  # it only looks like one
    return [_typed(member) for member in value] if isinstance(value, list) else value
