"""Deliveries: messages, broadcasts and responses to `basic_get`, from the I/O thread to kombu's thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kombu.utils.json import object_hook

from ..couchdb.client import Document
from ..documents import workitem
from ..documents.validation import is_deeper
from ..errors import CouchDBError
from ..values import revision_parts
from .credit import Credit, Subscription

#: The prefix of the delivery tags of broadcasts.
BROADCAST_TAG = 'broadcast-'


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
    #: Whether the message was put into the mailbox, and whether kombu has taken it from there.
    handed: bool = False
    delivered: bool = False
    #: The monotonic time at which it was put on the shelf; see `unacked`.
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


class Pull:
    """One `basic_get`: kombu's thread waits while the I/O thread claims one message."""

    def __init__(self, queue: str, no_ack: bool) -> None:
        self.queue, self.no_ack = queue, no_ack
        #: As in AMQP, a message that `basic_get` returns does not count for the channel's prefetch count.
        self.credit = Credit(limit=1)
        #: The ids of messages whose claims CouchDB refused.
        self.refused: set[str] = set()
        self._done = threading.Event()
        self._result: Delivery | Exception | None = None

    def set_result(self, result: Delivery | Exception | None) -> None:
        """End the wait of the other thread with a delivery, with None (the queue has no message) or with an error."""
        self._result = result
        self._done.set()

    def wait(self, thread: threading.Thread) -> Delivery | None:
        """Wait for the result; *raises* it if it is an error, or `CouchDBError` if the I/O thread has ended."""
        while not self._done.wait(1.0):
            if not thread.is_alive():
                raise CouchDBError('the connection was closed')
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def broadcast(message: Document, subscription: Subscription) -> Delivery:
    """Return a broadcast as a delivery: it needs no credit and no ack."""
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
