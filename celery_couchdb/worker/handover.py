"""Handing over of results and next tasks: what a task's process decides before the worker's process stores them.

`results.outbox` takes them; here it is decided which ones, and what happens to those that CouchDB refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery import states
from celery._state import get_current_task

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import CouchDBError, DocumentTooLarge
from kombu_couchdb.log import get_logger

from ..chords.completion import Counting
from ..options import Options
from ..results.documents import ChordPart, Packed, Result, pack, stamp
from ..results.handed import Handed
from ..results.outbox import Outbox
from ..results.store import ResultTooLarge, Store

__all__ = ['HandOverMixin']

logger = get_logger(__name__)

#: The states that Celery itself stores. A task that stores another state may want to know that it is stored.
_CELERY_STATES = states.ALL_STATES - {states.PENDING}

#: More messages than this are not handed over: they are published in one request, which costs little for each.
_MAX_NEXT_TASKS = 20


class HandOverMixin:
    """The methods of a backend that hand over results. The backend sets the attributes `options` and `outbox`."""

    options: Options
    outbox: Outbox
    _has_our_broker = False

    if TYPE_CHECKING:  # Celery's base class has these; `chords.completion` has the last two
        app: Any
        content_type: str
        encode: Callable[[Any], str | bytes]
        prepare_exception: Callable[[BaseException], Any]
        task_keyprefix: str
        get_key_for_task: Callable[[Any], str]
        client: Client
        failure_expires: float | None
        packed_body: Callable[[Any], Packed | None]
        count_parts: Callable[[str, list[str], Packed], None]

    def new_outbox(self, store: Store) -> Outbox:
        """Return an outbox that counts the parts of chords, and that is not open."""
        outbox = Outbox(store)
        outbox.pipeline.on_stored = Counting(self.count_parts).add
        outbox.pipeline.on_refused = self._failure_instead
        outbox.pipeline.task_id_of = lambda doc_id: doc_id.removeprefix(self.task_keyprefix)
        outbox.pipeline.is_busy, outbox.pipeline.is_cold = _has_waiting_tasks, _must_stop_at_once
        return outbox

    def open_outbox(self, *, serve_children: bool) -> None:
        """Take results from now on; with `serve_children`, also those of children that are forked from now on."""
        with self.app.connection_for_read() as connection:  # does not connect
            self._has_our_broker = connection.transport.driver_type == 'couchdb'
        with self.app.connection_for_write() as connection:
            if self._has_our_broker and connection.transport.driver_type == 'couchdb' and not self.outbox.writer.broker:
                timeouts = connection.transport.couchdb.timeouts
                self.outbox.writer.broker = Client(connection.transport.address, *reversed(timeouts))
        self.outbox.open(serve_children=serve_children)

    def hand_over(self, doc: Result | ChordPart, request: Any, state: str, part: ChordPart | None = None) -> bool:
        """Let the worker's process store a result, or a part of a chord; return False if the caller must store it.

        Celery's own states of a task in a worker are stored soon after this call. For other states, and if a broker
        other than ours might store an acknowledgement before the result, this method waits until they are stored.
        """
        if not self.outbox.is_open or request is None or getattr(request, 'is_eager', False):
            return False
        confirm = self.options.confirm_results or state not in _CELERY_STATES or not self._results_come_first()
        body = None
        if doc['type'] == 'Part' or part is not None:
            body = None if confirm else self.packed_body(request)
            confirm = body is None  # then this process counts the part, as soon as it is stored
            if confirm and doc['type'] == 'Part':
                return False
        handed = Handed.of(doc, part, request.group if body else '', body)
        if not self.outbox.hand_over(handed, confirm=confirm):
            return False
        if body:
            request.couchdb_handed_over = True
        return True

    def take_next_tasks(self, address: Address, items: Sequence[WorkItem]) -> Sequence[WorkItem]:
        """Hand over the messages that are published after a task; return those that the caller must store.

        `address` is the database that they are for. See `kombu_couchdb.transport.taker`.
        """
        broker = self.outbox.writer.broker
        if self.options.confirm_results or broker is None or not self.outbox.is_open:
            return items
        if address != broker.address or len(items) > _MAX_NEXT_TASKS or _is_part_of_chord():
            return items
        return [item for item in items if not self.outbox.hand_over(Handed.of_message(item), confirm=False)]

    def _results_come_first(self) -> bool:
        """Tell whether no acknowledgement is stored before the results that were handed over before it."""
        return self._has_our_broker or not any(task.acks_late for task in self.app.tasks.values())

    def _failure_instead(self, handed: Handed, error: CouchDBError) -> Handed | None:
        """Return the failure to be stored in the place of a success that is too large, or of a message; or None."""
        head = handed.head
        if handed.is_message:
            logger.error('task %s[%s] could not be published: %s', head['task'], head['task_id'], error)
            return self._never_sent(head['task_id'], head['task'], error) if head['task_id'] else None
        is_success = states.SUCCESS in (head.get('status'), head.get('state'))
        if not (is_success and isinstance(error, DocumentTooLarge)):
            return None
        failure = ResultTooLarge(f'the result of {head.get("task") or handed.id} cannot be stored: {error}')
        result = self.prepare_exception(failure)
        if head['type'] == 'Part':
            value = pack(self.encode({'result': result}), self.content_type)
            doc: dict[str, Any] = {**head, 'state': states.FAILURE, 'value': value}
        else:
            task_id = handed.id.removeprefix(self.task_keyprefix)
            doc = {**head, 'status': states.FAILURE, **self._failed_value(task_id, result)}
        # Its part of a chord is counted with the failure.
        instead = Handed.of(doc)
        instead.part_id, instead.part = handed.part_id, handed.part
        instead.group_id, instead.body = handed.group_id, handed.body
        return instead

    def _never_sent(self, task_id: str, task: str | None, error: CouchDBError) -> Handed:
        """Return the failure of a task whose message could not be stored, so that nobody waits for its result."""
        doc: Result = {
            '_id': self.get_key_for_task(task_id),
            'type': 'Result',
            'status': states.FAILURE,
            'task': task,
            **self._failed_value(task_id, self.prepare_exception(error)),  # type: ignore[typeddict-item]
        }
        return Handed.of(stamp(doc, self.client.clock.now(), self.failure_expires))

    def _failed_value(self, task_id: str, result: Any) -> Packed:
        """Return the value of a failure without a traceback."""
        meta = {'task_id': task_id, 'status': states.FAILURE, 'result': result, 'traceback': None}
        return pack(self.encode({**meta, 'children': [], 'date_done': None}), self.content_type)


def _is_part_of_chord() -> bool:
    """Tell whether the current task is a step of a chain in the header of a chord.

    If CouchDB refuses its next step, the task must fail, as Celery does it: otherwise the chord would wait for ever.
    """
    request = getattr(get_current_task(), 'request', None)
    steps = getattr(request, 'chain', None) or ()
    return any((step.get('options') or {}).get('chord') for step in steps)


def _has_waiting_tasks() -> bool:
    """Tell whether this worker has received more tasks than it runs."""
    state = import_module('celery.worker.state')
    return len(state.reserved_requests) > len(state.active_requests)


def _must_stop_at_once() -> bool:
    """Tell whether this worker was told to stop without waiting for its tasks: Celery's cold shutdown."""
    state = import_module('celery.worker.state').should_terminate
    return state is not None and state is not False
