"""Completion of chords: join the results of the parts, and send the body or store its failure.

`counter` decides when this happens, and in which worker. The errors of a body are the same as with Celery's own
backends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from typing import Any

from celery import states
from celery.backends.base import BaseKeyValueStoreBackend
from celery.canvas import maybe_signature
from celery.exceptions import ChordError, SoftTimeLimitExceeded
from celery.result import GroupResult, ResultSet
from celery.utils.functional import _regen
from kombu.exceptions import EncodeError, OperationalError

from kombu_couchdb.couchdb.fork_safety import reset_in_child
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.errors import RETRIED, ServerUnavailable
from kombu_couchdb.log import get_logger

from ..options import ResultOptions
from ..results.documents import Chord, ChordPart, Document, Packed, is_final, pack, unpack
from ..results.queue_item import QueueItem
from ..results.result_queue import Done
from ..results.result_store import ResultStore
from ..rooms import hooks
from ..waiting.awaited import tasks_in
from .counter import LAG_SECONDS, Chords, size_of

logger = get_logger(__name__)

#: A part has a copy of its result up to this size, in bytes as encoded. The chord then needs no other document.
_MAX_COPY_BYTES = 4096

#: A larger body, in bytes as encoded, is not handed over with each part: the process that runs a task counts its part.
_MAX_BODY_BYTES = 20_000


class ChordMixin(BaseKeyValueStoreBackend):
    """The methods of the backend for chords. The backend sets the attributes."""

    store: ResultStore
    options: ResultOptions
    chords: Chords
    handover: Any
    await_results: Callable[..., Generator[tuple[str, dict[str, Any]]]]

    # -- called when a chord is sent

    def apply_chord(self, header_result_args: Any, body: Any, **_: Any) -> None:
        """Store a chord with its body, which inherits headers of the current task; Celery sends its header next."""
        self.ensure_chords_allowed()
        headers = dict(body.options.get('headers') or {})
        for pass_on in hooks('pass_on'):  # no task runs when the body is sent
            pass_on(headers)
        if headers:
            body.options['headers'] = headers
        group_id, results = header_result_args[0], header_result_args[1]
        # If the header contains groups, the body gets nested lists. Only the saved group knows the nesting. A header
        # from a generator has no nested groups, and must not be consumed here.
        nested = not isinstance(results, _regen) and any(isinstance(result, GroupResult) for result in results)
        if nested:
            self.save_group(group_id, self.app.GroupResult(*header_result_args))
        try:
            encoded = pack(self.encode({'body': body}), self.content_type)
        except EncodeError as exc:
            logger.warning(
                'chord %s cannot be completed by another worker if its last worker is killed: %s', group_id, exc
            )
            encoded = None
        self.chords.prepare(group_id, encoded, nested=nested)

    def drop_chord(self, group_id: str) -> None:
        """Delete a chord whose header cannot be sent."""
        self.chords.drop(group_id)
        self.delete_group(group_id)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Store the number of parts of a chord; Celery sends its last part next."""
        self.chords.set_size(group_id, chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Add a part to a chord; `Task.add_to_chord` has sent its task."""
        self.chords.add(chord_id, str(result.id))

    # -- called when a part has ended

    def chord_part(self, request: Any, task_id: str, state: str, result: Any) -> ChordPart | None:
        """Return the part's document, to be stored together with its result; None if the task is no part of a chord.

        `result` is encoded for storage. A result of more than 4096 bytes is stored only under the task's id.
        """
        if not request.group or request.id != task_id:
            return None
        part = self._new_part(request, state, result, _MAX_COPY_BYTES)
        request.couchdb_part = part['_id']  # tells on_chord_part_return, which Celery calls next, not to store it again
        return part

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        """Count a part that has ended, and complete the chord if all parts have ended.

        The process that stores a part which was handed over counts it, see `count_parts`.
        """
        group_id = request.group
        if not group_id or not request.id:
            return
        part_id = getattr(request, 'couchdb_part', None)
        if part_id is None:
            part = self._new_part(request, state, self.encode_result(result, state))
            if self.handover.hand_over(part, request):
                return
            self._store_part(part)
            part_id = part['_id']
        elif getattr(request, 'couchdb_handed_over', False):
            return
        chord = self._claim(group_id, [part_id])
        if chord is not None:
            self._complete(group_id, chord, maybe_signature(request.chord, app=self.app))

    def count_parts(self, group_id: str, part_ids: list[str], body: Packed) -> None:
        """Count parts that were stored just now, and complete their chord if all its parts have ended."""
        chord = self._claim(group_id, part_ids)
        if chord is None:
            return
        found = self.decode(unpack(body))
        callback = maybe_signature(found['body'], app=self.app)
        for name, value in found['options'].items():
            callback.options.setdefault(name, value)
        self._complete(group_id, chord, callback)

    def packed_body(self, request: Any) -> Packed | None:
        """Return the encoded body of the chord that a part belongs to; None if it cannot be encoded, or is large.

        With it are the options that the body would get from the part if the task of the part sent it.
        """
        options = {'parent_id': request.id, 'root_id': getattr(request, 'root_id', None) or request.id}
        priority = (getattr(request, 'delivery_info', None) or {}).get('priority')
        if self.app.conf.task_inherit_parent_priority and priority is not None:
            options['priority'] = priority
        try:
            payload = self.encode({'body': request.chord, 'options': options})
        except Exception:  # whatever the serializer raises: then this process counts the part, and needs no copy
            return None
        return pack(payload, self.content_type) if len(payload) <= _MAX_BODY_BYTES else None

    def _claim(self, group_id: str, part_ids: list[str]) -> Chord | None:
        try:
            return self.chords.claim(group_id, part_ids)
        except RETRIED as exc:  # no failure of the task: its part is stored, and a sweep completes the chord
            logger.error('chord %s waits for a worker that completes it: %s', group_id, exc)
            return None

    def keep_for_chord(self, doc: Document) -> None:
        """Store the value of a result that is deleted next in its part of a chord, which has no copy of it."""
        if not (is_final(doc) and isinstance(doc.get('part'), str)):
            return
        try:
            value = self.encode({'result': self.decode(unpack(doc))['result']})
        except Exception as exc:  # whatever the serializer raises: the chord cannot read it either
            logger.error('%s, a part of a chord, is deleted and cannot be decoded: %r', doc['_id'], exc)
            return
        task_id = doc['_id'].removeprefix(self.task_keyprefix)
        self.chords.keep_value(doc['part'], task_id, doc['status'], pack(value, self.content_type))

    def _new_part(self, request: Any, state: str, result: Any, max_copy: float = float('inf')) -> ChordPart:
        payload = self.encode({'result': result})
        value = pack(payload, self.content_type) if len(payload) <= max_copy else None
        return self.chords.new_part(request.group, request.group_index, request.id, state, value)

    def _store_part(self, part: ChordPart) -> None:
        """Store a part whose task stores no result. With `result_backend_always_retry`, try until it is stored."""
        while True:
            try:
                self.chords.store_part(part, self.handover.shorter)
                return
            except RETRIED:
                if not self.always_retry:
                    raise
                time.sleep(LAG_SECONDS)

    def complete_unfinished_chords(self, ids: list[str]) -> None:
        """Complete the chords with these document ids whose workers were killed before they completed them."""
        for group_id, chord, was_claimed in self.chords.claim_unfinished(ids):
            logger.warning('chord %s was not completed by its last worker; this worker completes it', group_id)
            try:
                body = maybe_signature(self.decode(unpack(chord.get('body')))['body'], app=self.app)
                if was_claimed and self.store.read(self.get_key_for_task(str(body.id))) is not None:
                    self._finish(group_id, chord)  # the body has a result, so it was sent
                else:
                    self._complete(group_id, chord, body, is_repeated=was_claimed)
            except RETRIED:
                raise
            except Exception as exc:  # its body cannot be decoded; the other chords are completed nevertheless
                reason = f'{type(exc).__name__}: {exc}'
                logger.error('chord %s cannot be completed, and is left until it expires: %.300s', group_id, reason)
                self.chords.set_aside(chord)

    def _complete(self, group_id: str, chord: Chord, body: Any, *, is_repeated: bool = False) -> None:
        """Send the body, or store its failure. After an error of the server, a sweep claims the chord again."""
        try:
            try:
                results = self._join(group_id, chord)
                # If this worker is killed now, another one sends the body again. With our own transport, the second
                # message has the same id, so the body is published once.
                with idempotent(f'{group_id}:{chord.get("run")}', repeated=is_repeated):
                    body.delay(results)
            except (OperationalError, SoftTimeLimitExceeded, *RETRIED) as exc:
                if chord.get('body'):
                    logger.error('chord %s waits for a worker that completes it: %s', group_id, exc)
                    return
                raise
        except Exception as exc:
            if not self.chords.has_claim(chord):
                return  # another worker has completed the chord and deleted its documents
            # Inside the except block, because Celery reads the current traceback.
            error = exc if isinstance(exc, ChordError) else _chord_error(f'Callback error: {exc!r}', exc)
            logger.error('chord %s fails: %s', group_id, error)
            self.chord_error_from_stack(body, error)
        self._finish(group_id, chord)

    def _finish(self, group_id: str, chord: Chord) -> None:
        # A worker that has lost its claim must not delete the group: the worker with the claim still needs it.
        if self.chords.finish(group_id, chord) and chord.get('nested'):
            self.delete_group(group_id)

    def _join(self, group_id: str, chord: Chord) -> list[Any]:
        """Return the results of a chord's parts; *raises* `ChordError` if one has failed or its result was deleted."""
        parts = self.chords.parts(group_id, ordered=self.options.result_chord_ordered)
        if len(parts) < size_of(chord):  # in a cluster, another node may have counted them
            raise ServerUnavailable(
                f'{self.store.client.address.url}: found only {len(parts)} of the {size_of(chord)} parts of a chord'
            )
        docs = self._read_results([part['task_id'] for part in parts if 'value' not in part])
        if None in docs.values():  # `keep_value` may have stored it in its part meanwhile
            parts = self.chords.parts(group_id, ordered=self.options.result_chord_ordered)
        results = [self._result_of(part, docs) for part in parts]
        if not chord.get('nested'):
            return results
        group = GroupResult.restore(group_id, backend=self, app=self.app)
        if group is None:
            raise ChordError(f'GroupResult {group_id} no longer exists')
        found = dict(zip((part['task_id'] for part in parts), results, strict=True))
        # Celery 5.4 counts a group at the end of a chain as one part: wait for the tasks that it did not count.
        uncounted = {node.id for node in tasks_in(group)} - found.keys()
        for task_id, meta in self.await_results(uncounted, self.app.conf.result_chord_join_timeout):
            found[task_id] = _value_or_error(task_id, meta['status'], meta['result'])
        return _nest(group, found)

    def _read_results(self, task_ids: list[str]) -> dict[str, Document | None]:
        """Return the results of tasks, None for deleted ones; *raises* `ServerUnavailable` if some are not visible yet.

        A part may be visible before the result that was stored with it: they are in different shards, and the result
        may be in conflict with an earlier state of its task.
        """
        keys = {task_id: self.get_key_for_task(task_id) for task_id in task_ids}
        docs: dict[str, Document | None] = {}
        late = task_ids
        for pause in (0.0, LAG_SECONDS):
            time.sleep(pause)
            docs.update(zip(late, self.store.read_many(keys[task_id] for task_id in late), strict=True))
            deleted = self.store.known([keys[task_id] for task_id in late if docs[task_id] is None])
            late = [task_id for task_id in late if keys[task_id] not in deleted and not is_final(docs[task_id] or {})]
            if not late:
                return docs
        raise ServerUnavailable(
            f'{self.store.client.address.url}: the results of {len(late)} parts of a chord are not visible yet'
        )

    def _result_of(self, part: Document, found: dict[str, Document | None]) -> Any:
        task_id, state = part['task_id'], part['state']
        if 'value' in part:
            result = self.decode(unpack(part['value']))['result']
        else:
            doc = found[task_id]
            if doc is None:
                raise ChordError(f'The result of dependency {task_id} was deleted')
            state, result = doc['status'], self.decode(unpack(doc))['result']
        return _value_or_error(
            task_id, state, self.exception_to_python(result) if state in states.EXCEPTION_STATES else result
        )


class Counting:
    """Counts stored parts in a thread, which is started for the first part: one count for many parts of one chord.

    `count` is called with the id of a group, the ids of its parts that were stored just now, and the encoded body.
    """

    def __init__(self, count: Callable[[str, list[str], Packed], None]) -> None:
        self._count = count
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Forget everything in a forked child: the thread exists in the parent process only."""
        self._parts: SimpleQueue[tuple[QueueItem, Done]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, results: Sequence[QueueItem], done: Done) -> None:
        """Count the parts among these stored results; then, and for the other results now, call `done(results)`."""
        done([each for each in results if not each.group_id])
        for each in results:
            if each.group_id:
                self._parts.put((each, done))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name='celery-couchdb-chords', daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while True:
            taken = [self._parts.get()]
            while not self._parts.empty():
                taken.append(self._parts.get())
            groups: dict[str, list[tuple[QueueItem, Done]]] = {}
            for part in taken:
                groups.setdefault(part[0].group_id, []).append(part)
            for group_id, parts in groups.items():
                try:
                    self._count(group_id, [each.part_id or each.id for each, _ in parts], parts[0][0].packed_body())
                except BaseException:  # also what a callback raises to end its process; a sweep completes the chord
                    logger.exception('the parts of chord %s cannot be counted', group_id)
                for each, done in parts:
                    done([each])


def _value_or_error(task_id: str, state: str, result: Any) -> Any:
    if state in states.PROPAGATE_STATES:
        raise _chord_error(f'Dependency {task_id} raised {result!r}', result)
    return result


def _nest(group: ResultSet, found: dict[str, Any]) -> list[Any]:
    """Return the results that were `found`, by task id, as a list, with a nested list for each nested group."""
    return [_nest(node, found) if isinstance(node, ResultSet) else found[node.id] for node in group.results]


def _chord_error(message: str, cause: Any) -> ChordError:
    error = ChordError(message)
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error
