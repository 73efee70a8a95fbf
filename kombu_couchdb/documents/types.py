"""The documents of the broker's database and of a database of parcels, as types.

docs/reference/documents.rst explains the members for users, and a test compares that page with the documents that are
written. Optional members are in a base class with `total=False`. CouchDB's own members are optional everywhere: `_rev`
is missing until a document is written, `_deleted` is there in deletions only.

Members may write whatever they like into the database. So a document that was read is a `Document` until it was checked
(see `workitem.flaw`), and functions that decide about such documents take any `Mapping`.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, final

__all__ = [
    'FAIL',
    'FANOUT',
    'Attachment',
    'Binding',
    'Broadcast',
    'Claim',
    'Consumer',
    'DeadLetter',
    'Document',
    'FanoutExchange',
    'Follower',
    'Leader',
    'Message',
    'Parcel',
    'Published',
    'Queue',
    'Tombstone',
    'WorkItem',
]

#: A document as it was read, or of any type. `Client` reads and writes these.
Document = dict[str, Any]

#: The types of exchanges.
FANOUT: Literal['fanout'] = 'fanout'

#: The `status` of a dead letter, and of a parcel that was refused.
FAIL: Literal['fail'] = 'fail'


class Attachment(TypedDict, total=False):
    """An attachment as it is written: base64 in `data`; or its stub as it is read, with `length` in bytes."""

    content_type: str
    data: str
    length: int
    stub: bool


class Stored(TypedDict, total=False):
    """CouchDB's own members of a document, beside `_id`."""

    _rev: str
    _deleted: bool
    _attachments: dict[str, Attachment]


#: A message as kombu's virtual transports represent it. `body` is null if it is an attachment.
Message = TypedDict(
    'Message',
    {
        'body': str | None,
        'headers': dict[str, Any],
        'properties': dict[str, Any],
        'content-type': str,
        'content-encoding': str,
    },
)


class Claim(TypedDict):
    """Which consumer has claimed a WorkItem, and when."""

    by: str
    date: float


class _Expiring(TypedDict, total=False):
    #: Only if the message has an expiration: from then on it is not delivered any more.
    expires: float


class Follower(_Expiring):
    """The part of a WorkItem that belongs to its message. `next` of a unique job has others, which run after it."""

    priority: int
    #: When the message is due; None: at once.
    date: float | None
    #: Orders the messages that are due at once.
    published: float
    message: Message


class _WorkItemOptions(TypedDict, total=False):
    #: The id of the Consumer that held the item last; after a release or a rejection.
    consumer: str
    #: The job key. This member and the four below are of unique jobs only.
    key: str
    #: When the newest message for the job was sent, or when the job's turn came after the one before it.
    sent: float
    #: The messages that run after the one that is running.
    next: list[Follower]
    #: The delivery tag of the message that ran before.
    done: str
    #: Blanks that keep space for later states of a large job, until it is claimed.
    room: str
    #: `FAIL`: the item is a dead letter. This member and the two below are of dead letters only.
    status: Literal['fail']
    #: Why; see `reasons`.
    reason: str
    #: When the item became a dead letter.
    failed: float


@final
class WorkItem(Follower, _WorkItemOptions, Stored):
    """A message in the broker's database."""

    _id: str
    type: Literal['WorkItem']
    queue: str
    #: How often it was delivered. Deliveries to consumers that stopped regularly do not count.
    attempts: int
    claimed: Claim | None


class DeadLetter(TypedDict):
    """The members that make a document a dead letter, or a parcel a refused one."""

    status: Literal['fail']
    reason: str
    failed: float


class _TombstoneOptions(TypedDict, total=False):
    #: The delivery tag of the message that ran last; of unique jobs only.
    done: str
    #: True if the deletion does not mean that the message is done: another leaf of the document has the message.
    void: bool


class Tombstone(_TombstoneOptions):
    """The deletion of one revision of a WorkItem."""

    _id: str
    _rev: str
    _deleted: Literal[True]


class Consumer(Stored):
    """The heartbeat of a consuming connection."""

    _id: str
    type: Literal['Consumer']
    #: The design document whose views the consumer reads.
    layout: str
    host: str
    pid: int
    queues: list[str]
    #: How many heartbeats were written since `queues` changed.
    beats: int
    date: float
    expires: float
    #: By queue, how many messages a second were acknowledged since the previous heartbeat.
    rates: dict[str, float]


class Queue(Stored):
    """A declared queue."""

    _id: str
    type: Literal['Queue']
    name: str
    arguments: dict[str, Any]
    auto_delete: bool
    #: How many seconds it may be unused; None: for ever.
    lifetime: float | None
    #: When it is deleted unless it is used; None: never.
    expires: float | None


class Binding(Stored):
    """A binding of a queue to an exchange. Of a topic exchange it has a `pattern`, a regular expression."""

    _id: str
    type: Literal['Binding']
    exchange: str
    routing_key: str
    pattern: str | None
    queue: str


class FanoutExchange(Stored):
    """A fanout exchange. Other exchanges have no document of their own: their bindings tell what they are."""

    _id: str
    type: Literal['Exchange']
    name: str
    kind: Literal['fanout']


class Broadcast(Stored):
    """A message to a fanout exchange. A publisher writes a later one over it when it has expired."""

    _id: str
    type: Literal['Broadcast']
    exchange: str
    routing_key: str
    publisher: str
    #: The number of the broadcast among those of its publisher. A listener that misses a number knows that it fell
    #: behind.
    number: int
    date: float
    expires: float
    message: Message


class Leader(Stored):
    """The process that does a job which one of many does."""

    _id: str
    type: Literal['Leader']
    #: None: the process has stopped, and any other may take over.
    holder: str | None
    date: float


class _ParcelOptions(TypedDict, total=False):
    status: Literal['fail']
    reason: str
    failed: float


@final
class Parcel(_ParcelOptions, Stored):
    """A message on its way to the broker's database, in a database of parcels."""

    _id: str
    type: Literal['Parcel']
    #: The name and the id of the task.
    task: str
    id: str | None
    #: Where it is to be published; '' is the default exchange.
    exchange: str
    routing_key: str
    #: Parcels are moved in this order.
    published: float
    message: Message


#: A document that publishing a message creates, in the broker's database or in a database of parcels.
Published = WorkItem | Parcel
