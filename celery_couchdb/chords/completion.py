"""Completion of chords: join the results of the parts, and send the body or store its failure.

As with Celery's other backends, a body is sent and errbacks run at the end of the last part: in its process, with its
request as that of `current_task`. `counter` decides when this is. If the process has gone on by then, or was killed,
`complete_chord` does it in a process of the pool, with the same request, which is stored with the part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from celery import current_app, signals, states
from celery._state import _task_stack, get_current_task
from celery.app.task import Context
from celery.backends.base import BaseKeyValueStoreBackend
from celery.canvas import maybe_signature
from celery.exceptions import ChordError, SoftTimeLimitExceeded
from celery.result import GroupResult, ResultSet
from celery.utils.functional import _regen, maybe_list
from kombu.exceptions import EncodeError, OperationalError

from kombu_couchdb.couchdb.shapes import maybe, members, text
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.errors import RETRIED, CouchDBError, ServerUnavailable
from kombu_couchdb.log import get_logger

from ..options import ResultOptions
from ..results.documents import Chord, ChordPart, Document, Packed, is_final, pack, unpack
from ..results.result_store import ResultStore
from ..rooms import pass_on
from ..waiting.awaited import tasks_in
from .counter import LAG_SECONDS, Chords, Claimed

logger = get_logger(__name__)

#: A part has a copy of its result, and of its task's request, up to this size each, in bytes as encoded. The chord then
#: needs no other document.
_MAX_COPY_BYTES = 4096

#: Errbacks that have ended this number of processes do not run again.
_MAX_ERRBACKS = 3

#: What is not copied of a request: it may be large, or has a meaning only while the task runs.
_NOT_COPIED = frozenset(
    ('chord', 'callbacks', 'errbacks', 'chain', 'argsrepr', 'kwargsrepr', 'properties', '_protected', '_children')
)

_is_request = members(id=text, headers=maybe(members()), delivery_info=maybe(members()))


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
        pass_on(headers)  # the last part may have no request any more
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

        The process that stores a part which was handed over counts it. A task waits for that, unless tasks end quickly,
        one after the other, in this process.
        """
        group_id = request.group
        if not group_id or not request.id:
            return
        part_id = getattr(request, 'couchdb_part', None)
        if part_id is None:
            part = self._new_part(request, state, self.encode_result(result, state))
            if not self.handover.hand_over(part, request):
                self._store_part(part)
            part_id = part['_id']
        if self.handover.has_taken(request):
            is_complete = self.handover.is_last_part(request)
        else:
            is_complete = self.all_parts_ended(group_id, [part_id])
        if is_complete and not (get_current_task() is None and self.handover.complete_in_pool(group_id)):
            self.complete_chord(group_id, maybe_signature(request.chord, app=self.app))

    def all_parts_ended(self, group_id: str, part_ids: list[str]) -> bool:
        """Count parts that were stored just now; return whether all parts have ended, and the chord is to be completed.

        If CouchDB does not respond, a sweep completes the chord.
        """
        try:
            return self.chords.is_complete(group_id, part_ids)
        except RETRIED as exc:  # no failure of the task: its part is stored
            logger.error('chord %s waits for a worker that completes it: %s', group_id, exc)
            return False

    def can_be_completed_elsewhere(self, request: Any, part: ChordPart) -> bool:
        """Tell whether another process knows what it needs to complete the chord: its body, and the part's request."""
        if 'request' not in part:
            return False
        try:
            self.encode({'body': request.chord})
        except Exception:  # whatever the serializer raises
            return False
        return True

    def complete_chord(self, group_id: str, body: Any = None, *, unfinished: bool = False) -> None:
        """Complete a chord whose parts have all ended, unless another process does. Errors are logged.

        `body` is given in the task of its last part; without it, this runs as the end of a part. With `unfinished`,
        also a chord whose process was killed while it completed the chord.
        """
        claimed = None
        try:
            claimed = self.chords.claim(group_id, ordered=self.options.result_chord_ordered, unfinished=unfinished)
            if claimed is None:
                return
            if unfinished:
                logger.warning('chord %s was not completed by its last worker; this worker completes it', group_id)
            if body is not None:
                self._complete(group_id, claimed, body)
                return
            body = maybe_signature(self.decode(unpack(claimed.chord.get('body')))['body'], app=self.app)
            with self._request_of(group_id, max(claimed.parts, key=_date_of)):
                self._complete(group_id, claimed, body)
        except RETRIED as exc:
            logger.error('chord %s waits for a worker that completes it: %s', group_id, exc)
        except Exception as exc:  # one of its documents cannot be decoded
            reason = f'{type(exc).__name__}: {exc}'
            logger.error('chord %s cannot be completed, and is left until it expires: %.300s', group_id, reason)
            if claimed is not None:
                with suppress(CouchDBError):
                    self.chords.set_aside(claimed.chord)

    def complete_unfinished_chords(self, ids: list[str]) -> None:
        """Complete the chords with these document ids whose workers were killed before they completed them."""
        for group_id in self.chords.unfinished(ids):
            self.complete_in_pool(group_id, unfinished=True)

    def complete_in_pool(self, group_id: str, *, unfinished: bool = False) -> None:
        """Let a process of the pool run `complete_chord`; a process without a pool runs it itself."""
        if not self.handover.complete_in_pool(group_id, unfinished=unfinished):
            self.complete_chord(group_id, unfinished=unfinished)

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
        return self.chords.new_part(
            request.group, request.group_index, request.id, state, value, self._copy_of_request(request)
        )

    def _copy_of_request(self, request: Any) -> Packed | None:
        """Return the encoded request of a task, without its arguments if they are large; None if it is large."""
        copied = {
            name: value
            for name, value in vars(request).items()
            if value is not None and name not in _NOT_COPIED and not name.startswith('couchdb_')
        }
        for _ in range(2):
            try:
                payload = self.encode({'request': copied})
            except Exception:  # whatever the serializer raises: the arguments may have another one
                payload = None
            if payload is not None and len(payload) <= _MAX_COPY_BYTES:
                return pack(payload, self.content_type)
            copied = {name: value for name, value in copied.items() if name not in ('args', 'kwargs')}
        return None

    @contextmanager
    def _request_of(self, group_id: str, part: Document) -> Iterator[None]:
        """Run as the task `celery.chord_unlock` with the request of a part, as far as it is stored.

        Other backends of Celery use this task for the same. The signals before and after a task let an application
        prepare what belongs to the request, such as the schema of a tenant, and close its connections. Their `task_id`
        is the id of the chord's group: the part itself does not run again.
        """
        try:
            found = self.decode(unpack(part.get('request')))['request']
            request = Context(found) if _is_request(found) else None
        except Exception:  # stored by hand, or by an earlier version
            request = None
        request = request or Context(id=part['task_id'])
        request.update(called_directly=False, args=request.args or (), kwargs=request.kwargs or {})
        task = self.app.tasks['celery.chord_unlock']
        about: dict[str, Any] = {'task_id': group_id, 'task': task, 'args': request.args, 'kwargs': request.kwargs}
        _task_stack.push(task)
        task.request_stack.push(request)
        try:
            signals.task_prerun.send(sender=task, **about)
            yield
        finally:
            try:
                signals.task_postrun.send(sender=task, **about, retval=None, state=part['state'])
            finally:
                _task_stack.pop()
                task.request_stack.pop()

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

    def _complete(self, group_id: str, claimed: Claimed, body: Any) -> None:
        """Send the body, or store its failure. After an error of the server, a sweep claims the chord again."""
        with self.chords.renewing(claimed.chord):
            has_ended = self._send_body(group_id, claimed, body)
        if has_ended:
            self._finish(group_id, claimed.chord)

    def _send_body(self, group_id: str, claimed: Claimed, body: Any) -> bool:
        """Send the body, or store its failure; return False if another process completes the chord."""
        chord, is_repeated = claimed.chord, claimed.is_repeated
        # If this worker is killed now, another one sends the same messages again. With our own transport, they have the
        # same ids, so each is published once.
        once = partial(idempotent, f'{group_id}:{chord.get("run")}', repeated=is_repeated)
        try:
            try:
                if is_repeated and self.store.read(self.get_key_for_task(str(body.id))) is not None:
                    return True  # the body has a result, so it was sent
                results = self._join(group_id, chord, claimed.parts)
                with once():
                    body.delay(results)
            except (OperationalError, SoftTimeLimitExceeded, *RETRIED) as exc:
                if chord.get('body'):
                    logger.error('chord %s waits for a worker that completes it: %s', group_id, exc)
                    return False
                raise
        except Exception as exc:
            if not self.chords.has_claim(chord):
                return False  # another worker has completed the chord and deleted its documents
            # Inside the except block, because Celery reads the current traceback.
            error = exc if isinstance(exc, ChordError) else _chord_error(f'Callback error: {exc!r}', exc)
            logger.error('chord %s fails: %s', group_id, error)
            with once():
                self.chord_error_from_stack(self._with_errbacks(chord, body), error)
        return True

    def _with_errbacks(self, chord: Chord, body: Any) -> Any:
        """Note that the errbacks of a body run; return the body without them if they have ended several processes.

        Those that are sent as tasks get ids that another process would give them, too.
        """
        if not body.options.get('link_error'):
            return body
        chord['errbacks'] = int(chord.get('errbacks') or 0) + 1
        if chord['errbacks'] <= _MAX_ERRBACKS:
            self.chords.renew(chord)
            for position, errback in enumerate(maybe_list(body.options['link_error'])):
                task_id = str(uuid5(NAMESPACE_OID, f'{chord["_id"]}:{chord.get("run")}:{position}'))
                errback['options'].setdefault('task_id', task_id)
            return body
        logger.error('the errbacks of chord %s have ended %d processes, and do not run', chord['_id'], _MAX_ERRBACKS)
        body = body.clone()
        body.options.pop('link_error')
        return body

    def _finish(self, group_id: str, chord: Chord) -> None:
        # A worker that has lost its claim must not delete the group: the worker with the claim still needs it.
        if self.chords.finish(group_id, chord) and chord.get('nested'):
            self.delete_group(group_id)

    def _join(self, group_id: str, chord: Chord, parts: list[Document]) -> list[Any]:
        """Return the results of a chord's parts; *raises* `ChordError` if one has failed or its result was deleted."""
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


def complete_in_this_process(group_id: str, unfinished: bool) -> None:
    """Complete a chord with the backend of the current app: what a process of a pool is told to do."""
    try:
        current_app.backend.complete_chord(group_id, unfinished=unfinished)
    except Exception:  # a later sweep completes the chord
        logger.exception('chord %s cannot be completed', group_id)


def _date_of(part: Document) -> float:
    found = part.get('date')
    return found if isinstance(found, (int, float)) else 0.0


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
