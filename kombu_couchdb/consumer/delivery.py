"""Subscriptions, credit and deliveries, which kombu's thread and the I/O thread share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kombu.utils.json import object_hook

from ..couchdb.client import Document
from ..documents import workitem
from ..documents.validation import is_deeper

__all__ = ['BROADCAST_TAG', 'Credit', 'Delivery', 'Subscription', 'broadcast']

#: What the delivery tag of a broadcast begins with.
BROADCAST_TAG = 'broadcast-'

#: An ack waits that long for others, or for a claim, to share their request, in seconds: while there is nothing to claim, and
#: while there is, unless half of the credit is free before. A request for each would be twice the work.
_LINGER, _GATHER = 0.02, 0.005


@dataclass(eq=False)
class Credit:
    """How many messages a channel may hold: AMQP's prefetch count."""

    #: The prefetch count; 0 is no limit.
    limit: int = 0
    #: Claimed for the channel and not acknowledged yet.
    held: int = 0
    #: Not handed to kombu yet, of those and of broadcasts.
    waiting: int = 0
    #: Without a limit: how many were handed to kombu since its thread last asked for more, and how many are claimed ahead, which
    #: grows with the demand (see `subscriptions`).
    taken: int = 0
    ahead: int = 1

    @property
    def free(self) -> int:
        """How many more may be claimed now. Without a limit a message counts until kombu's thread asks for the next one."""
        return self.limit - self.held if self.limit else self.ahead - self.waiting - self.taken

    def patience(self, *, hungry: bool) -> float:
        """Return how long an ack may wait for others, in seconds; `hungry` says whether there is something to claim."""
        if not hungry:
            return _LINGER
        return 0.0 if not self.limit or 2 * self.free >= self.limit else _GATHER


@dataclass(eq=False)
class Subscription:
    """One `basic_consume`. It does not refer to its channel: the I/O thread must not keep a connection that was dropped."""

    queue: str
    credit: Credit


@dataclass(eq=False)
class Delivery:
    """A message that was claimed, as the document stands in the database since."""

    doc: Document
    credit: Credit
    subscription: Subscription | None = None
    #: Whether its consumer took it without an error: given back when that stops, it does not count as an attempt then.
    accepted: bool = False
    #: Whether the message had expired when kombu was given it; see `workitem.delivers_expired`.
    expired: bool = False
    #: Whether nothing is to be settled: a broadcast, or a message that was deleted when it was pulled.
    final: bool = False
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
        if self.final and is_deeper(self.doc['message']):  # a broadcast, of which nobody has looked at that yet
            raise ValueError('the message is nested in too many levels')
        message = {**self.doc['message'], 'headers': _typed(self.doc['message']['headers'])}
        date = self.doc.get('date')
        if isinstance(date, (int, float)) and date > time.time():
            # It is due by the server's clock and not yet by this machine's: Celery must not wait for the latter.
            message['headers']['eta'] = datetime.now(timezone.utc).isoformat()
        if self.expired:
            # By the server's clock; Celery must not run it by this machine's.
            message['headers']['expires'] = datetime.fromtimestamp(0, timezone.utc).isoformat()
        attempts = self.doc.get('attempts') or 1
        info = {
            **message['properties'].get('delivery_info', {}),
            'redelivered': attempts > 1 or 'consumer' in self.doc,
            'delivery_count': attempts,
            'delivery': _generation(self.doc),
        }
        if self.body is not None:
            message['body'] = self.body
        return {**message, 'properties': {**message['properties'], 'delivery_tag': self.tag, 'delivery_info': info}}


def broadcast(message: Document, subscription: Subscription) -> Delivery:
    """Return a broadcast as a delivery, which waits to be handed over and not to be acknowledged."""
    subscription.credit.waiting += 1
    return Delivery(
        {'_id': BROADCAST_TAG + workitem.new_id(time.time()), 'message': message},
        subscription.credit,
        subscription,
        final=True,
    )


def _generation(doc: Document) -> int:
    """Return how often a document was written: of two deliveries of one message, the newer has the higher number."""
    number = str(doc.get('_rev', '')).partition('-')[0]
    return int(number) if number.isdecimal() else 0


def _typed(value: Any) -> Any:
    """Return a header with kombu's `{"__type__": …}` turned back into dates, UUIDs and decimals."""
    if isinstance(value, dict):
        members = {name: _typed(member) for name, member in value.items()}
        try:
            return object_hook(members) if '__type__' in members else members
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return members  # it only looks like one
    return [_typed(member) for member in value] if isinstance(value, list) else value
