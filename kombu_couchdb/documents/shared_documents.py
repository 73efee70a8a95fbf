"""The types of the documents by which processes coordinate: heartbeats, queues, broadcasts, slots, rates and leaders.

`types` has those of messages, and says how these types are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from ..schema import WHOLE, Kind, list_of
from .types import Message, Stored

_Pair = Annotated[list[int], Kind('two whole numbers', lambda value: list_of(WHOLE).accepts(value) and len(value) == 2)]


class ReportedTask(TypedDict):
    """A task that a worker runs."""

    id: str
    task: str
    queue: str
    since: float


class Running(TypedDict):
    """The tasks that a worker has run for a second or more."""

    #: By queue: their number, and how many of them are not acknowledged yet.
    queues: dict[str, _Pair]
    #: At most 100 of them, the longest running first.
    tasks: list[ReportedTask]


class WorkerReport(TypedDict, total=False):
    """What only the heartbeat of a Celery worker has."""

    running: Running
    #: What its tasks were, counted by optional rooms; see `celery_couchdb.contrib.metrics`.
    tasks: dict[str, Any]
    #: Its pool: `name`, number of `processes`, `since` when it runs, and `versions`.
    pool: dict[str, Any]


class _ConsumerOptions(WorkerReport, total=False):
    #: The name of the Celery worker whose connection it is, if the process is a worker.
    worker: str


class Consumer(_ConsumerOptions, Stored):
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
    #: By queue, how many messages per second were acknowledged since the previous heartbeat.
    rates: dict[str, float]


class Slot(Stored):
    """A slot of a concurrency key, while a consumer holds it."""

    _id: str
    type: Literal['Slot']
    key: str
    #: The id of the Consumer document.
    by: str
    date: float


class Rate(Stored):
    """The next start of a rate key."""

    _id: str
    type: Literal['Rate']
    key: str
    #: When the next message may start; it may be a little earlier, see `rates`.
    next: float
    #: The id of the Consumer that has taken the last start, and when.
    by: str
    date: float


class Queue(Stored):
    """A declared queue."""

    _id: str
    type: Literal['Queue']
    name: str
    arguments: dict[str, Any]
    auto_delete: bool
    #: How many seconds it may be unused; None: forever.
    lifetime: float | None
    #: When it is deleted unless it is used; None: never.
    expires: float | None


class _PauseOptions(TypedDict, total=False):
    #: Only if the queue takes no new messages either.
    refuse: Literal[True]


class Pause(_PauseOptions, Stored):
    """While this document exists, no consumer claims messages of the queue."""

    _id: str
    type: Literal['Pause']
    queue: str
    date: float
    #: Who paused the queue, and why; None if they did not say.
    by: str | None
    reason: str | None


class _BindingOptions(TypedDict, total=False):
    #: Only if the queue is temporary, that is, has a lifetime: its message TTL in seconds, or None.
    temporary: float | None
    #: Only of a headers exchange: the headers that a message must have, and `x-match`.
    arguments: dict[str, Any]


class Binding(_BindingOptions, Stored):
    """A binding of a queue to an exchange. `pattern` is a regular expression; None if it is not a topic exchange."""

    _id: str
    type: Literal['Binding']
    exchange: str
    routing_key: str
    pattern: str | None
    queue: str


class FanoutExchange(Stored):
    """A fanout exchange. Other exchanges have no document of their own: their bindings tell their type."""

    _id: str
    type: Literal['Exchange']
    name: str
    kind: Literal['fanout']


class _BroadcastOptions(TypedDict, total=False):
    #: Only of remote control: the binding of the queue for the replies, so that receivers need not read it.
    reply: Mapping[str, Any]


class Broadcast(_BroadcastOptions, Stored):
    """A message to a fanout exchange. After it has expired, its publisher may overwrite it with a later broadcast."""

    _id: str
    type: Literal['Broadcast']
    exchange: str
    routing_key: str
    publisher: str
    #: The number of the broadcast among those of its publisher. A listener that misses a number knows that it has
    #: missed a broadcast.
    number: int
    date: float
    expires: float
    message: Message


class Notice(Stored):
    """It is overwritten when declarations or pauses have changed. It is in the broadcasts database."""

    _id: str
    type: Literal['Notice']
    date: float


class Bell(Stored):
    """It is overwritten to call consumers to a queue. It is in the broadcasts database."""

    _id: str
    type: Literal['Bell']
    queue: str
    date: float


class _LeaderOptions(TypedDict, total=False):
    #: The node name of the process, if it is a Celery worker or beat.
    node: str


class Leader(_LeaderOptions, Stored):
    """The process that currently does a duty that only one process may do at a time."""

    _id: str
    type: Literal['Leader']
    #: None: released. The process has stopped, and any other may take over.
    holder: str | None
    date: float
    #: How long the lead lasts after `date`, in seconds.
    lease: float


class HistoryTask(TypedDict, total=False):
    """The runs of a task that ended in a minute, by outcome, and how many seconds they took."""

    succeeded: float
    failed: float
    retried: float
    rejected: float
    seconds: float


class HistoryMinute(TypedDict):
    """A minute: what ended in it, by task, and the messages at its end, by queue."""

    tasks: dict[str, HistoryTask]
    queues: dict[str, dict[str, float]]


class _TenMinutesOptions(TypedDict, total=False):
    #: Only the newest: by Consumer, since when its process counts, and up to which counts they are in the history.
    totals: dict[str, Any]


class TenMinutes(_TenMinutesOptions, Stored):
    """Ten minutes of the history of tasks and queues."""

    _id: str
    type: Literal['History']
    #: When the first minute began.
    date: float
    #: By number, from 0 to 9.
    minutes: dict[str, HistoryMinute]
