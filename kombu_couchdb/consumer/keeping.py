"""The lifetime of completed messages that are kept: from a property of the message, the task or a transport option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..couchdb.client import Document
from ..documents import workitem
from ..errors import ConfigurationError
from ..leases.lease import worker_name
from ..log import get_logger

__all__ = ['Keeping', 'register']

logger = get_logger(__name__)

#: Returns the attribute `keep_done` of the task with this name in the app of this process, or None.
Lookup = Callable[[str], Any]

_lookups: list[Lookup] = []


def register(lookup: Lookup) -> None:
    """Let `lookup` tell, for the workers of this process, how long the completed messages of a task are kept."""
    _lookups[:] = [lookup]


class Keeping:
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
        given = doc['message']['properties'].get(workitem.KEEP_DONE)
        task = workitem.task_name(doc)
        if given is None and task is not None:
            given = next((found for lookup in _lookups if (found := lookup(task)) is not None), self._seconds)
        try:
            return workitem.check_keep_done(given) if given else 0.0
        except ConfigurationError as exc:
            if (source := task or doc['queue']) not in self._wrong:
                self._wrong.add(source)
                logger.error('completed messages of %s are not kept: %s', source, exc)
            return 0.0
