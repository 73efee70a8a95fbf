"""Messages that were removed while this consumer held them and may not have heard of it.

`admin.jobs.remove` marks the document of a claimed message with `removed`, and the message is deleted when its claim
ends, whoever ends it. The worker is told to revoke the task by a broadcast. A consumer that was cut off from the
server, or was paused, may miss the broadcast. So when it is back, it reads the documents of the messages that it held,
and calls the listeners of this process with the ids of the tasks that were removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..couchdb.client import Client
from ..documents import workitem
from ..log import get_logger

__all__ = ['Suspects', 'on_removed']

logger = get_logger(__name__)

_listeners: list[Callable[[str], Any]] = []


def on_removed(listener: Callable[[str], Any]) -> None:
    """Let `listener(task_id)` be called, in the I/O thread, for tasks that this process must not start any more."""
    if listener not in _listeners:
        _listeners.append(listener)


class Suspects:
    """The messages that this consumer held when it lost its connection or its lease; for the I/O thread alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: dict[str, str] = {}  # by document id

    def add(self, docs: Iterable[Any]) -> None:
        """Note messages, if this process has a listener."""
        if _listeners:
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
                for listener in _listeners:
                    listener(task)
        self._tasks = {}
