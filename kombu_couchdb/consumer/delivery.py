"""Subscriptions, credit and deliveries: the data that kombu's thread and the I/O thread share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kombu.utils.json import object_hook

from ..couchdb.client import Document
from ..documents import workitem
from ..documents.validation import is_deeper
from ..values import revision_parts
from .rate import Rate

__all__ = ['BROADCAST_TAG', 'Credit', 'Delivery', 'Subscription', 'broadcast']

#: The prefix of the delivery tags of broadcasts.
BROADCAST_TAG = 'broadcast-'


@dataclass(eq=False)
class Credit:
    """How many messages a channel may hold: AMQP's prefetch count."""

    #: The prefetch count; 0 is no limit.
    limit: int = 0
    #: How many messages are claimed for the channel and not acknowledged yet.
    held: int = 0
    #: How many of those, and of broadcasts, are not delivered to kombu yet.
    waiting: int = 0
    #: Without a limit: how many messages were delivered to kombu since its thread last asked for more.
    delivered: int = 0
    #: Without a limit: how many messages are claimed ahead. The number grows with the demand, see `subscriptions`.
    ahead: int = 1
    #: How many of the messages that are held were put into the mailbox: never more than the limit.
    handed: int = 0
    #: The messages that were claimed beyond the limit, by delivery tag, in the order of their claims; see `shelf`.
    shelf: dict[str, Delivery] = field(default_factory=dict, repr=False)
    #: With a limit: how fast the messages are worked off.
    rate: Rate = field(default_factory=Rate, repr=False)

    @property
    def free(self) -> int:
        """How many more may be claimed now. Without a limit a message counts until kombu's thread asks for more."""
        return self.limit - self.held if self.limit else self.ahead - self.waiting - self.delivered

    @property
    def surplus(self) -> int:
        """How many messages may be claimed now beyond the limit."""
        return self.rate.ahead(self.limit, time.monotonic()) if self.limit else 0

    def room(self, *, ahead: bool) -> int:
        """Return how many more may be claimed now; with `ahead`, also beyond the limit."""
        return self.free + (self.surplus if ahead else 0)

    @property
    def is_low(self) -> bool:
        """Whether at least half of what may be claimed is worked off, or there is no limit: to claim more is urgent."""
        surplus = self.surplus
        return not self.limit or 2 * (self.free + surplus) >= self.limit + surplus


@dataclass(eq=False)
class Subscription:
    """One `basic_consume`. Without a reference to its channel: the I/O thread must not keep a dropped connection."""

    queue: str
    credit: Credit


@dataclass(eq=False)
class Delivery:
    """A claimed message, or a broadcast.

    `doc` is the document as the claim stored it; with `basic_get` and `no_ack`, as it was before it was deleted.
    """

    doc: Document
    credit: Credit
    subscription: Subscription | None = None
    #: Whether kombu's callback for the message returned without an error. If the consumer then stops without an ack,
    #: the delivery does not count as an attempt.
    received_by_kombu: bool = False
    #: Whether the message had expired when it was delivered to kombu; see `workitem.delivers_expired`.
    expired: bool = False
    #: Whether the message needs no ack: a broadcast, or a message that was deleted by `basic_get` with `no_ack`.
    final: bool = False
    #: The message's body if it is an attachment. It is read after the claim (for `basic_get` before the claim), and is
    #: not part of the documents that are written.
    body: bytes | None = None
    #: Whether the body has not been read yet.
    needs_body: bool = False
    #: Whether the message was put into the mailbox and kombu has not decided about it; see `shelf`.
    handed: bool = False
    #: The monotonic time at which it was put on the shelf.
    shelved: float = 0.0
    tag: str = field(init=False)

    def __post_init__(self) -> None:
        # The tag contains the revision, so two deliveries of one message have different tags: a late ack of the first
        # delivery does not acknowledge the second.
        self.tag = f'{self.doc["_id"]}:{self.doc.get("_rev", "")}'

    def payload(self) -> dict[str, Any]:
        """Return the message as kombu's virtual transports have it; *raises* `ValueError` or `TypeError`."""
        if self.final and is_deeper(self.doc['message']):  # a broadcast: nothing has checked this yet
            raise ValueError('the message is nested in too many levels')
        message = {**self.doc['message'], 'headers': _decoded(self.doc['message']['headers'])}
        date = self.doc.get('date')
        if isinstance(date, (int, float)) and date > time.time():
            # It is due by the server's clock, but not by this machine's: without this, Celery would wait.
            message['headers']['eta'] = datetime.now(timezone.utc).isoformat()
        if self.expired:
            # It has expired by the server's clock. Celery compares with this machine's clock, and must not run it.
            message['headers']['expires'] = datetime.fromtimestamp(0, timezone.utc).isoformat()
        attempts = self.doc.get('attempts') or 1
        info = {
            **message['properties'].get('delivery_info', {}),
            'redelivered': attempts > 1 or 'consumer' in self.doc,
            'delivery_count': attempts,
            # The newer of two deliveries of a message has the higher number.
            'delivery': revision_parts(self.doc.get('_rev'))[0],
        }
        if 'key' in self.doc:
            info['claimed'] = self.doc.get('claimed')  # publishers may change the revision of the claim
        if self.body is not None:
            message['body'] = self.body
        return {**message, 'properties': {**message['properties'], 'delivery_tag': self.tag, 'delivery_info': info}}


def broadcast(message: Document, subscription: Subscription) -> Delivery:
    """Return a broadcast as a delivery; it needs no ack, and counts in `waiting` until kombu receives it."""
    subscription.credit.waiting += 1
    return Delivery(
        {'_id': BROADCAST_TAG + workitem.new_id(time.time()), 'message': message},
        subscription.credit,
        subscription,
        final=True,
    )


def _decoded(value: Any) -> Any:
    """Return a header with dates, UUIDs and decimals in the place of kombu's `{"__type__": …}`."""
    if isinstance(value, dict):
        members = {name: _decoded(member) for name, member in value.items()}
        try:
            return object_hook(members) if '__type__' in members else members
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            return members  # an object of the publisher that has a member of this name
    return [_decoded(member) for member in value] if isinstance(value, list) else value
