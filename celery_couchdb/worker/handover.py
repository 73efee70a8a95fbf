"""Handing over of results and next tasks: which ones a task leaves to the worker's process.

Also what happens to those that CouchDB refuses then. `results.result_queue` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import states
from celery._state import get_current_task

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import CouchDBError, DocumentTooLarge
from kombu_couchdb.log import get_logger

from ..chords.completion import Counting
from ..results.documents import ChordPart, Packed, Result, pack, stamp
from ..results.queue_item import QueueItem
from ..results.result_queue import ResultQueue
from ..results.result_store import ResultTooLarge

logger = get_logger(__name__)

#: The states that Celery itself stores. A task that stores another state may want to know that it is stored.
_CELERY_STATES = states.ALL_STATES - {states.PENDING}

#: More messages than this are not handed over: they are published in one request, which costs little for each.
_MAX_NEXT_TASKS = 20


class HandOver:
    """Hands over the results of a backend, the parts of its chords, and next tasks."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._app = backend, backend.app
        self.queue = ResultQueue(backend.store, Counting(backend.count_parts).add, self._refused)
        self._has_our_broker = False

    def open(self, *, serve_children: bool) -> None:
        """Hand over from now on; with `serve_children`, also in children that are forked from now on."""
        with self._app.connection_for_read() as connection:  # does not connect
            self._has_our_broker = connection.transport.driver_type == 'couchdb'
        broker = None
        with self._app.connection_for_write() as connection:
            if self._has_our_broker and connection.transport.driver_type == 'couchdb':
                broker = Client(connection.transport.address, *reversed(connection.transport.couchdb.timeouts))
        self.queue.open(broker, serve_children=serve_children)

    def hand_over(self, doc: Result | ChordPart, request: Any, state: str, part: ChordPart | None = None) -> bool:
        """Let the worker's process store a result, or a part of a chord; return False if the caller must store it.

        The caller stores it with the option `confirm_results`, if it is no state of Celery's own, and if a broker other
        than ours might store an acknowledgement before.
        """
        if not self.queue.is_open or request is None or getattr(request, 'is_eager', False):
            return False
        if self._backend.options.confirm_results or state not in _CELERY_STATES or not self._results_come_first():
            return False
        body: Packed | None = None
        if doc['type'] == 'Part' or part is not None:
            body = self._backend.packed_body(request)
            if body is None:  # then this process counts the part, as soon as it is stored
                return False
        if not self.queue.hand_over(QueueItem.of(doc, part, request.group if body else '', body)):
            return False
        if body:
            request.couchdb_handed_over = True
        return True

    def take_next_tasks(self, address: Address, items: Sequence[WorkItem]) -> Sequence[WorkItem]:
        """Hand over the messages that are published after a task; return those that the caller must store.

        `address` is the database that they are for. See `kombu_couchdb.transport.batches`.
        """
        broker = self.queue.broker
        if self._backend.options.confirm_results or broker is None or not self.queue.is_open:
            return items
        if address != broker.address or len(items) > _MAX_NEXT_TASKS or _is_part_of_chord():
            return items
        return [item for item in items if not self.queue.hand_over(QueueItem.of_message(item))]

    def _results_come_first(self) -> bool:
        """Tell whether no acknowledgement is stored before the results that were handed over before it."""
        return self._has_our_broker or not any(task.acks_late for task in self._app.tasks.values())

    def _refused(self, item: QueueItem, error: CouchDBError) -> QueueItem | None:
        """Log that something is lost, or return the failure to be stored in its place."""
        head = item.head
        if item.is_message:
            logger.error('task %s[%s] could not be published: %s', head['task'], head['task_id'], error)
            return self._never_sent(head['task_id'], head['task'], error) if head['task_id'] else None
        if states.SUCCESS in (head.get('status'), head.get('state')) and isinstance(error, DocumentTooLarge):
            return self._too_large(item, error)
        task_id = self._task_id(item)
        logger.error('the result of %s[%s] (%s) is lost: %s', head.get('task'), task_id, head.get('status'), error)
        return None

    def _too_large(self, item: QueueItem, error: CouchDBError) -> QueueItem:
        """Return the failure that takes the place of a success."""
        head = item.head
        failure = ResultTooLarge(f'the result of {head.get("task") or item.id} cannot be stored: {error}')
        if head['type'] == 'Part':
            value = self._backend.encode({'result': self._backend.prepare_exception(failure)})
            doc = {**head, 'state': states.FAILURE, 'value': pack(value, self._backend.content_type)}
        else:
            doc = {**head, **self._failure(self._task_id(item), head['task'], failure)}
        instead = QueueItem.of(doc)
        instead.take_part(item)  # which is counted with the failure
        return instead

    def _never_sent(self, task_id: str, task: str | None, error: CouchDBError) -> QueueItem:
        """Return the failure of a task whose message could not be stored, so that nobody waits for its result."""
        doc = self._failure(task_id, task, error)
        return QueueItem.of(stamp(doc, self._backend.client.clock.now(), self._backend.failure_expires))

    def _task_id(self, item: QueueItem) -> str:
        return item.id.removeprefix(self._backend.task_keyprefix)

    def _failure(self, task_id: str, task: str | None, error: CouchDBError) -> dict[str, Any]:
        """Return the document of a failure without a traceback."""
        result = self._backend.prepare_exception(error)
        meta = {'status': states.FAILURE, 'result': result, 'traceback': None, 'children': [], 'date_done': None}
        found: dict[str, Any] = self._backend.result_document(task_id, task, meta)
        return found


def _is_part_of_chord() -> bool:
    """Tell whether the current task is a step of a chain in the header of a chord.

    If CouchDB refuses its next step, the task must fail, as Celery does it: otherwise the chord would wait for ever.
    """
    request = getattr(get_current_task(), 'request', None)
    steps = getattr(request, 'chain', None) or ()
    return any((step.get('options') or {}).get('chord') for step in steps)
