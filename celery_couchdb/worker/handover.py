"""Handing over of results and next tasks: which ones a task leaves to the worker's process.

Also what happens to those that CouchDB refuses then. `results.result_queue` takes them. Optional rooms may name other
databases in which a result is stored (`results.other_databases`).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from celery import states
from celery._state import get_current_task
from celery.app.task import Context

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import CouchDBError, DocumentTooLarge
from kombu_couchdb.log import get_logger

from ..chords.completion import complete_in_this_process
from ..chords.counting import Counting
from ..results.documents import ChordPart, Result, pack, shortened, stamp, unpack
from ..results.other_databases import OtherDatabases
from ..results.queue_item import COMPLETE, QueueItem
from ..results.result_queue import ResultQueue
from ..results.result_store import ResultTooLarge
from ..rooms import concerned
from .pool import run_in_pool

logger = get_logger(__name__)

#: More messages than this are not handed over: they are published in one request, which costs little for each.
_MAX_NEXT_TASKS = 20

#: If a part of a chord has ended in this process less than this number of seconds ago, the next one does not wait until
#: it is counted: that takes 10 to 20 ms, which is much for a short task.
_FLOW_SECONDS = 0.2


class HandOver:
    """Hands over the results of a backend, the parts of its chords, and next tasks."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._app = backend, backend.app
        self._others = OtherDatabases(self._app)
        counting = Counting(backend.all_parts_ended, backend.complete_in_pool)
        self.queue = ResultQueue(backend.store, counting.add, self.refused, self._others)
        self._has_our_broker = False
        #: The consumer of this process, if it is that of a worker.
        self._consumer: Any = None
        #: When the last part of a chord has ended in this process.
        self._last_part_at = float('-inf')

    def open(self, consumer: Any = None, *, serve_children: bool) -> None:
        """Hand over from now on; with `serve_children`, also in children that are forked from now on.

        `consumer` is that of a worker which is ready.
        """
        self._consumer = consumer or self._consumer  # there is none yet when the first processes of a pool are forked
        with self._app.connection_for_read() as connection:  # does not connect
            self._has_our_broker = connection.transport.driver_type == 'couchdb'
        broker = None
        with self._app.connection_for_write() as connection:
            if self._has_our_broker and connection.transport.driver_type == 'couchdb':
                broker = Client(connection.transport.address, connection.transport.couchdb.options)
        self.queue.open(broker, serve_children=serve_children)

    def hand_over(self, doc: Result | ChordPart, request: Any, part: ChordPart | None = None) -> bool:
        """Let the worker's process store a result, or a part of a chord; return False if the caller must store it.

        The caller stores it with the option `confirm_results`, and if a broker other than ours might store an
        acknowledgement before.
        """
        if not self._may_hand_over(request):
            return False
        if doc['type'] != 'Part' and part is None:
            return self.queue.hand_over(QueueItem.encode(doc))
        end = other = None
        can_go_on = self._backend.can_be_completed_elsewhere(request, part or doc)
        if get_current_task() is not None and not (can_go_on and self._is_flowing()):
            end, other = socket.socketpair()
            end.settimeout(self.queue.timeout)
        elif not can_go_on:
            return False  # then this process counts the part, as soon as it is stored
        item = QueueItem.encode(doc, part, request.group, other)
        request.couchdb_taken = self.queue.hand_over(item)
        request.couchdb_answer = end
        if not request.couchdb_taken:
            item.end_waiting()
        return bool(request.couchdb_taken)

    def has_taken(self, request: Any) -> bool:
        """Tell whether the worker's process counts the part of a chord with this request."""
        return bool(getattr(request, 'couchdb_taken', False))

    def is_last_part(self, request: Any) -> bool:
        """Wait until a part that was handed over is counted; return whether this process is to complete the chord.

        If tasks end quickly, one after the other, it does not wait, and another process may be told to do it.
        """
        end = request.couchdb_answer
        try:
            return end is not None and end.recv(1) == COMPLETE
        except OSError:  # the worker's process does not respond in time: it will find that nobody waits
            return False
        finally:
            if end is not None:
                end.close()
            self._last_part_at = time.monotonic()

    def complete_in_pool(self, group_id: str, *, unfinished: bool = False) -> bool:
        """Complete a chord in a process of the pool; return False if this process has none."""
        if self._consumer is None:
            return False
        run_in_pool(self._consumer, complete_in_this_process, group_id, unfinished)
        return True

    def _is_flowing(self) -> bool:
        return time.monotonic() - self._last_part_at < _FLOW_SECONDS

    def store_elsewhere(self, doc: Result, task_id: str, request: Any, sender: Any, *, is_result: bool = True) -> bool:
        """Store a result in the databases that optional rooms name; return whether it is to be stored here, too.

        `request` is that of the task or None, and `sender` the one whose headers count. *Raises* what
        `ResultStore.write` raises.
        """
        others, is_here = self._elsewhere(sender, task_id, doc, is_result=is_result)
        for item in others:
            if self._may_hand_over(request) and self.queue.hand_over(item):
                continue
            is_here |= not self._write_elsewhere(item)
        return is_here

    def store_end(self, task_id: str, request: Any, state: str, error: BaseException | None = None) -> None:
        """Tell the databases that optional rooms name that a task has ended in this state and has no result."""
        if concerned(request):
            result = self._backend.prepare_exception(error) if error else None
            meta: dict[str, Any] = {
                'status': state,
                'result': result,
                'traceback': None,
                'children': [],
                'date_done': None,
            }
            doc = self._backend.result_document(task_id, getattr(request, 'task', None), meta)
            doc = stamp(doc, self._backend.client.clock.now(), None)
            self.store_elsewhere(doc, task_id, request, request, is_result=False)

    def close(self) -> None:
        """Store what was handed over, and close the idle connections."""
        self.queue.close()
        self._others.close()

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

    def _may_hand_over(self, request: Any) -> bool:
        if not self.queue.is_open or request is None or getattr(request, 'is_eager', False):
            return False
        return not self._backend.options.confirm_results and self._results_come_first()

    def _results_come_first(self) -> bool:
        """Tell whether no acknowledgement is stored before the results that were handed over before it."""
        return self._has_our_broker or not any(task.acks_late for task in self._app.tasks.values())

    def _write_elsewhere(self, item: QueueItem) -> bool:
        """Store a result in another database; return False if it can only be stored here."""
        for _, error in self._backend.store.retried(self._others.write, item.database, [item]):
            if isinstance(error, DocumentTooLarge):
                if shorter := self.shorter(item, error):
                    return self._write_elsewhere(shorter)
                raise ResultTooLarge.of(item.head, error) from error
            self._log_kept(item, error)
            return False
        return True

    def refused(self, item: QueueItem, error: CouchDBError) -> list[QueueItem]:
        """Log that something is lost, or return what is to be stored in its place."""
        head = item.head
        if item.is_message:
            logger.error('task %s[%s] could not be published: %s', head['task'], head['task_id'], error)
            return self._never_sent(item, error) if head['task_id'] else []
        if isinstance(error, DocumentTooLarge) and (shorter := self.shorter(item, error, fails=True)):
            return [shorter]
        if item.database:
            self._log_kept(item, error)
            return [self._kept(item)]
        task_id = self._task_id(item)
        logger.error('the result of %s[%s] (%s) is lost: %s', head.get('task'), task_id, head.get('status'), error)
        return []

    def _log_kept(self, item: QueueItem, error: CouchDBError) -> None:
        head, task_id = item.head, self._task_id(item)
        text = 'the result of %s[%s] (%s) cannot be stored in %s, and is stored here: %s'
        logger.error(text, head.get('task'), task_id, head.get('status'), item.database, error)

    def _kept(self, item: QueueItem) -> QueueItem:
        """Return the result that another database has refused as one of this database."""
        backend, doc = self._backend, json.loads(item.text)['result']
        return QueueItem.encode(stamp(doc, backend.client.clock.now(), backend.lifetime_of(doc['status'])))

    def shorter(self, item: QueueItem, error: CouchDBError, *, fails: bool = False) -> QueueItem | None:
        """Return what is stored in place of a result, or a part of a chord, that CouchDB refuses as too large.

        What is only for people is left out first, see `shortened`. Then an error takes the place of an exception, and
        with `fails` also that of a value. None if the caller must do without it.
        """
        head, backend = item.head, self._backend
        state = head.get('status') or head['state']
        meta: dict[str, Any] = {'result': None, 'traceback': None, 'date_done': None}
        try:
            doc = json.loads(item.text)
            meta.update(backend.decode(unpack(doc['result'] if item.database else doc)))
        except Exception:  # whatever the serializer raises
            logger.debug('%s cannot be decoded', item.id, exc_info=True)
        meta['status'] = state
        found = [*shortened(meta)]
        if fails and state == states.SUCCESS:
            state = states.FAILURE
        if state in states.EXCEPTION_STATES:
            failure = backend.prepare_exception(ResultTooLarge.of(head, error))
            found.append({**(found or [meta])[-1], 'status': state, 'result': failure, 'children': []})
        return next((one for one in (self._with(item, meta) for meta in found) if one.size < item.size), None)

    def _with(self, item: QueueItem, meta: dict[str, Any]) -> QueueItem:
        """Return a result, or a part of a chord, with other meta-data."""
        head, backend = item.head, self._backend
        if head['type'] == 'Part':
            value = pack(backend.encode({'result': meta['result']}), backend.content_type)
            request = {name: kept for name, kept in json.loads(item.text).items() if name == 'request'}
            found = QueueItem.encode({**head, **request, 'state': meta['status'], 'value': value})
        else:
            doc = {**head, **backend.result_document(self._task_id(item), head['task'], meta)}
            found = QueueItem.encode(doc)
            if item.database:
                found = QueueItem.of_returned(item.database, {**json.loads(item.text), 'result': doc})
        found.take_part(item)  # it is counted with what takes its place
        return found

    def _never_sent(self, item: QueueItem, error: CouchDBError) -> list[QueueItem]:
        """Return the failure of a task whose message could not be stored, so that nobody waits for its result."""
        backend, task_id = self._backend, item.head['task_id']
        failure = backend.error_document(task_id, item.head['task'], error)
        doc = stamp(failure, backend.client.clock.now(), backend.failure_expires)
        request = Context(json.loads(item.text)['message']['headers'])
        others, is_here = self._elsewhere(request, task_id, doc, is_result=True)
        return [*others, QueueItem.encode(doc)] if is_here else others

    def _elsewhere(self, request: Any, task_id: str, doc: Result, *, is_result: bool) -> tuple[list[QueueItem], bool]:
        """Return a result as optional rooms store it in other databases, and whether it is stored here, too."""
        found, is_here = list[QueueItem](), True
        for room in concerned(request):
            docs, is_here_too = room.on_result(self._backend, request, task_id, doc, is_result=is_result)
            found += [QueueItem.of_returned(database, other) for database, other in docs]
            is_here &= is_here_too
        return found, is_here

    def _task_id(self, item: QueueItem) -> str:
        doc_id: str = json.loads(item.text)['result']['_id'] if item.database else item.id
        return doc_id.removeprefix(self._backend.task_keyprefix)


def _is_part_of_chord() -> bool:
    """Tell whether the current task is a step of a chain in the header of a chord.

    If CouchDB refuses its next step, the task must fail, as Celery does it: otherwise the chord would wait for ever.
    """
    request = getattr(get_current_task(), 'request', None)
    steps = getattr(request, 'chain', None) or ()
    return any((step.get('options') or {}).get('chord') for step in steps)
