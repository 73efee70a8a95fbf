"""The hooks of a worker: functions that Celery's side registers, and that the consumer calls about tasks.

They answer how long a completed message is kept, whether a task may still run when its channel closes, and what is
written into heartbeats: the tasks that run, and members of optional rooms. And they are told which tasks were removed.

`admin.jobs.remove` marks the document of a claimed message with `removed`, and the message is deleted when its claim
ends, whoever ends it. The worker is told to revoke the task by a broadcast. A consumer that was cut off from the
server, or was paused, may miss the broadcast. So when it is back, it reads the documents of the messages that it held,
and calls the listeners of this process with the ids of the tasks that were removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..couchdb.client import Client, Document
from ..documents import workitem
from ..errors import ConfigurationError
from ..leases.lease import worker_name
from ..log import get_logger

logger = get_logger(__name__)

#: The functions that are registered, by the name of the function below that registers them.
_hooks: dict[str, Callable[..., Any]] = {}

#: The functions that return members of heartbeats, by member.
_members: dict[str, Callable[[], Any]] = {}


class RunningTask(NamedTuple):
    """A task that a worker runs."""

    id: str
    task: str
    queue: str
    #: Since when, by the clock of this machine.
    since: float
    #: Whether its message is not acknowledged yet.
    is_claimed: bool


def keep_done_of(lookup: Callable[[str], Any]) -> None:
    """Let `lookup(name)` return the attribute `keep_done` of the task with this name, or None."""
    _hooks['keep_done_of'] = lookup


def while_running(check: Callable[[str], bool]) -> None:
    """Let `check(task_id)` tell whether this process may be running a task. Any thread may call it."""
    _hooks['while_running'] = check


def on_removed(listener: Callable[[str], Any]) -> None:
    """Let `listener(task_id)` be called, in the I/O thread, for tasks that this process must not start any more."""
    _hooks['on_removed'] = listener


def report_running(lookup: Callable[[Collection[str]], Collection[RunningTask] | None]) -> None:
    """Let `lookup(queues)` return the tasks that this process runs, or None if it is no worker of any of these queues.

    I/O threads call it.
    """
    _hooks['running'] = lookup


def report_member(name: str, value: Callable[[], Any]) -> None:
    """Let `value()` return the member `name` of this worker's heartbeats; without a value there is no such member.

    I/O threads call it.
    """
    _members[name] = value


def reports_running() -> bool:
    """Tell whether heartbeats of this process may have to name its tasks."""
    return 'running' in _hooks


def running_tasks(queues: Collection[str]) -> Collection[RunningTask] | None:
    """Return the tasks that the process runs; None if it is no worker of any of these queues."""
    lookup = _hooks.get('running')
    return lookup(queues) if lookup is not None else None


def members_of_heartbeat() -> dict[str, Any]:
    """Return the members of a worker's heartbeat that optional rooms add.

    A member that is no JSON is left out and logged: the messages of the worker depend on its heartbeat.
    """
    found = dict[str, Any]()
    for name, value in _members.items():
        if member := value():
            try:
                json.dumps(member, allow_nan=False)
            except (TypeError, ValueError):
                logger.error('the heartbeat has no member %r: it is no JSON', name)
            else:
                found[name] = member
    return found


def may_run(doc: Mapping[str, Any]) -> bool:
    """Tell whether this process may be working on a message that it has received; True if nobody knows."""
    task_id = workitem.task_id(doc)
    check = _hooks.get('while_running')
    return task_id is None or check is None or bool(check(task_id))


class KeepDone:
    """What is written when a message is acknowledged: its deletion, or its kept form."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the transport option `keep_done`: for messages of tasks that do not say otherwise."""
        self._seconds = seconds
        self._wrong: set[str] = set()

    def completed(self, doc: Document, now: float) -> Mapping[str, Any]:
        """Return the document to write when a claimed message is acknowledged."""
        seconds = self._seconds_of(doc)
        return workitem.done(doc, seconds, now, worker_name()) if seconds else workitem.acked(doc, now)

    def _seconds_of(self, doc: Document) -> float:
        """Return for how long a message is kept: by its property, else by its task, else by the transport option."""
        given = doc['message']['properties'].get(workitem.KEEP_DONE)
        task = workitem.task_name(doc)
        lookup = _hooks.get('keep_done_of')
        if given is None and task is not None and (lookup is None or (given := lookup(task)) is None):
            given = self._seconds
        try:
            return workitem.check_keep_done(given) if given else 0.0
        except ConfigurationError as exc:
            if (source := task or doc['queue']) not in self._wrong:
                self._wrong.add(source)
                logger.error('completed messages of %s are not kept: %s', source, exc)
            return 0.0


class Suspects:
    """The messages that this consumer held when it lost its connection or its lease; for the I/O thread alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: dict[str, str] = {}  # by document id

    def add(self, docs: Iterable[Any]) -> None:
        """Note messages, if this process has a listener."""
        if 'on_removed' in _hooks:
            self._tasks.update({doc['_id']: task for doc in docs if (task := workitem.task_id(doc))})

    def check(self) -> None:
        """Tell the listeners which of the messages were removed; one request if any were noted."""
        if not self._tasks:
            return
        ids = list(self._tasks)
        for doc_id, leaves in zip(ids, self._client.fetch_leaves(ids), strict=True):
            # The embedded server's _bulk_get leaves out documents that are deleted.
            if any(leaf.get('removed') for leaf in leaves or self._client.leaves(doc_id)):
                task = self._tasks[doc_id]
                logger.info('task %s was removed while this consumer was cut off: it is not started', task)
                _hooks['on_removed'](task)
        self._tasks = {}
