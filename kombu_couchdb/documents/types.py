"""The messages of the broker's database as types; `shared_documents` has its other documents.

docs/development/documents.rst explains the members for users, and a test compares that page with the documents that are
written. Optional members are in a base class with `total=False`. CouchDB's own members are optional everywhere: `_rev`
is missing until a document is written, `_deleted` is there in deletions only.

Every user with access to the database can write any document. So a document that was read is a `Document` until it was
checked (see `schema` and `validation.malformed_reason`), and functions that decide about such documents take any
`Mapping`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict, final

from ..schema import OBJECT, Kind, Schema
from ..values import MAX_NUMBER, is_whole

#: A document of any type, or one that was read and not checked. `Client` reads and writes these.
Document = dict[str, Any]

#: The types of exchanges.
FANOUT: Literal['fanout'] = 'fanout'

#: The `status` of a dead letter, and of a parcel that was refused.
FAIL: Literal['fail'] = 'fail'

#: The `status` of a completed message that is kept.
DONE: Literal['done'] = 'done'


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


#: The number of deliveries of an item; with more it is malformed.
Attempts = Annotated[int, Kind(f'a whole number from 0 to {MAX_NUMBER}', lambda value: is_whole(value, 0, MAX_NUMBER))]

#: A message as kombu's virtual transports represent it. `body` is null if it is an attachment.
Message = TypedDict(
    'Message',
    {
        'body': str | None,
        'headers': dict[str, Any],
        'properties': Annotated[dict[str, Any], Schema({'delivery_info': OBJECT})],
        'content-type': Any,
        'content-encoding': Any,
    },
)


class ClaimedBy(TypedDict):
    """The consumer that has claimed a WorkItem, and the date of the claim."""

    by: str
    date: float


class Parked(TypedDict):
    """For which slots or starts a WorkItem waits, and since when."""

    key: str
    date: float


class TaskError(TypedDict):
    """Why a task failed for good, and where."""

    #: The name of the type of the exception, such as `ValueError`.
    type: str
    #: What the exception says; '' also if it was too long to be stored.
    text: str
    traceback: str
    #: The name of the Celery worker.
    worker: str | None
    #: How often the task was retried before.
    retries: int


class _Expiring(TypedDict, total=False):
    #: Only if the message has an expiration: from then on it is not delivered any more.
    expires: float


class DatedMessage(_Expiring):
    """A message with its dates and priority: part of a WorkItem, and an element of a unique job's `next`."""

    priority: int
    #: When the message is due; None: at once.
    date: float | None
    #: Orders the messages that are due at once.
    published: float
    message: Message


class _WorkItemOptions(TypedDict, total=False):
    #: The id of the Consumer that held the item last. It is set when the item is released or becomes a dead letter.
    consumer: str
    #: Only while the item waits for a slot of its concurrency key, or for a start of its rate key.
    parked: Parked
    #: Only if the queue has a lifetime: without its queue the message is deleted.
    temporary: bool
    #: The job key. This member and the five below are of unique jobs only.
    key: str
    #: When the job was last sent again, or when its message was taken from `next`. A queue's message TTL counts from
    #: this date if it is later than the due date.
    sent: float
    #: The messages that run after the current one.
    next: list[DatedMessage]
    #: The delivery tag of the message that was done last.
    done: str
    #: Messages that were published once (see `unique_merge.once_id`): the ids of the tasks that run for them.
    moved: dict[str, str | None]
    #: Blanks that keep space for later states of a large job, until it is claimed.
    room: str
    #: When an operator removed the message that is claimed: it is deleted when the claim ends. Of any WorkItem.
    removed: float
    #: `FAIL`: the item is a dead letter. This member and the three below are of dead letters only.
    status: Literal['fail']
    #: Why; see `dead_letter`.
    reason: str
    #: When the item became a dead letter.
    failed: float
    #: The error of a task that failed. Such a dead letter `expires`.
    error: TaskError


@final
class WorkItem(DatedMessage, _WorkItemOptions, Stored):
    """A message in the broker's database."""

    _id: str
    type: Literal['WorkItem']
    queue: str
    #: How often it was delivered. Deliveries to consumers that were shut down normally do not count.
    attempts: Attempts
    claimed: ClaimedBy | None


class _DoneItemOptions(TypedDict, total=False):
    #: The name of the Celery worker that completed the message.
    worker: str
    #: The job key. What is kept of a unique job has an id of its own.
    key: str


class DoneItem(_DoneItemOptions, Stored):
    """A completed message that is kept for a while; see `workitem`."""

    _id: str
    type: Literal['DoneItem']
    status: Literal['done']
    queue: str
    priority: int
    date: float | None
    published: float
    attempts: int
    claimed: None
    #: The Consumer that completed the message.
    consumer: str
    #: When it was claimed, and when it was acknowledged.
    started: float
    finished: float
    #: When it is deleted.
    expires: float
    message: Message


class DeadLetter(TypedDict):
    """The members that make a document a dead letter, or a parcel a refused one."""

    status: Literal['fail']
    reason: str
    failed: float


class _TombstoneOptions(TypedDict, total=False):
    #: The delivery tag of the message that this revision had; of unique jobs only.
    done: str
    #: As in the WorkItem.
    moved: dict[str, str | None]
    #: True if the deletion does not mean that the message is done: another leaf of the document has the message.
    void: bool
    #: True if an operator removed the message while a consumer held it.
    removed: bool
    #: True if nobody has acknowledged the message: see `workitem.dropped`.
    dropped: bool


class Tombstone(_TombstoneOptions):
    """The deletion of one revision of a WorkItem."""

    _id: str
    _rev: str
    _deleted: Literal[True]
