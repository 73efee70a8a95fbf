"""The end of a chord: its parts are joined, and its body is sent, or told of the failure.

`chords` says when that is, and who does it. What a body is told of a failed part is what Celery's own backends tell it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from celery import states
from celery.canvas import maybe_signature
from celery.exceptions import ChordError, SoftTimeLimitExceeded
from celery.result import GroupResult, ResultSet
from celery.utils.functional import _regen
from kombu.exceptions import EncodeError, OperationalError

from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.errors import RETRIED, ServerUnavailable
from kombu_couchdb.log import get_logger

from ..options import Options
from ..results.documents import Document, is_final, pack, unpack
from ..results.store import Store
from ..waiting.mixin import tasks_in
from .counter import LAG, Chords, size_of

__all__ = ['ChordMixin']

logger = get_logger(__name__)

#: The largest result, in bytes as encoded, of which a chord's part keeps a copy: it may outlive the result itself.
_SMALL = 4096


class ChordMixin:
    """The chord half of a backend. `store`, `options` and `chords` are the other half's to make."""

    store: Store
    options: Options
    chords: Chords

    if TYPE_CHECKING:  # Celery's base class has these, and `waiting` the last
        app: Any
        always_retry: bool
        content_type: str
        encode: Callable[[Any], str | bytes]
        encode_result: Callable[[Any, str], Any]
        decode: Callable[[Any], Any]
        exception_to_python: Callable[[Any], Any]
        get_key_for_task: Callable[[str], str]
        save_group: Callable[[str, Any], Any]
        delete_group: Callable[[str], Any]
        ensure_chords_allowed: Callable[[], None]
        chord_error_from_stack: Callable[..., Any]
        await_results: Callable[..., Generator[tuple[str, dict[str, Any]]]]

    # -- called when a chord is sent

    def apply_chord(self, header_result_args: Any, body: Any, **_: Any) -> None:
        """Note the body of a chord whose header is about to be sent."""
        self.ensure_chords_allowed()
        group_id, results = header_result_args[0], header_result_args[1]
        # Groups within the header: the body wants its results in the same form, which only the group knows. A header
        # that is made while it is sent has none, and must not be used up here.
        nested = not isinstance(results, _regen) and any(isinstance(result, GroupResult) for result in results)
        if nested:
            self.save_group(group_id, self.app.GroupResult(*header_result_args))
        try:
            encoded = pack(self.encode({'body': body}), self.content_type)
        except EncodeError as exc:
            logger.warning(
                'chord %s is not brought to an end by others if its last worker is killed: %s', group_id, exc
            )
            encoded = None
        self.chords.prepare(group_id, encoded, nested=nested)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Note how many parts a chord has; the last of them is about to be sent."""
        self.chords.begin(group_id, chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Let a chord wait for one part more; `Task.add_to_chord` has sent it."""
        self.chords.add(chord_id, str(result.id))

    # -- called when a part has ended

    def chord_part(self, request: Any, task_id: str, state: str, result: Any) -> Document | None:
        """Return the document that a part leaves, to be stored with its result; None if it is no part.

        `result` is encoded for storage; a large one is kept once only, under the task's id.
        """
        if not request.group or request.id != task_id:
            return None
        part = self._part(request, state, result, _SMALL)
        request.couchdb_part = part['_id']  # on_chord_part_return, which is next, need not store it again
        return part

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        """Count a part that has ended, and bring the chord to its end if it was the last."""
        group_id = request.group
        if not group_id or not request.id:
            return
        part_id = getattr(request, 'couchdb_part', None)
        if part_id is None:
            part = self._part(request, state, self.encode_result(result, state))
            self._store_part(part)
            part_id = part['_id']
        try:
            chord = self.chords.claim(group_id, part_id)
        except RETRIED as exc:  # the part is stored, and its task has not failed
            logger.error('chord %s waits for a worker to bring it to its end: %s', group_id, exc)
            return
        if chord is not None:
            self._end(group_id, chord, maybe_signature(request.chord, app=self.app))

    def _part(self, request: Any, state: str, result: Any, limit: float = float('inf')) -> Document:
        payload = self.encode({'result': result})
        value = pack(payload, self.content_type) if len(payload) <= limit else None
        return self.chords.part(request.group, request.group_index, request.id, state, value)

    def _store_part(self, part: Document) -> None:
        """Store a part of which no result is stored; as Celery stores results, until it is there if that is wanted."""
        while True:
            try:
                self.chords.store_part(part)
                return
            except RETRIED:
                if not self.always_retry:
                    raise
                time.sleep(LAG)  # not for an event: nobody tells that the server is back

    def end_unfinished_chords(self, ids: list[str]) -> None:
        """Bring to an end those of these chords that were left by workers that were killed."""
        for group_id, chord, again in self.chords.unfinished(ids):
            logger.warning('chord %s was left unfinished by a worker that is gone; it is brought to its end', group_id)
            try:
                body = maybe_signature(self.decode(unpack(chord.get('body')))['body'], app=self.app)
                if again and self.store.read(self.get_key_for_task(str(body.id))) is not None:
                    self._done(group_id, chord)  # its body was sent: it has a result
                else:
                    self._end(group_id, chord, body, again=again)
            except RETRIED:
                raise
            except Exception:  # a body that cannot be read: the other chords go on
                logger.exception('chord %s cannot be brought to its end', group_id)

    def _end(self, group_id: str, chord: Document, body: Any, *, again: bool = False) -> None:
        """Send the body, or tell it why it will never run. A chord that is left here is claimed again by a sweeper."""
        try:
            try:
                results = self._join(group_id, chord)
                # Who is killed before the chord is done has a successor: over our own transport that sends nothing twice.
                with idempotent(f'{group_id}:{chord.get("run")}', repeated=again):
                    body.delay(results)
            except (OperationalError, SoftTimeLimitExceeded, *RETRIED) as exc:
                if chord.get('body'):
                    logger.error('chord %s waits for a worker to bring it to its end: %s', group_id, exc)
                    return
                raise
        except Exception as exc:
            if not self.chords.holds(chord):
                return  # what was looked for is gone because somebody else took over
            # Within the handler, for Celery reads the traceback from there.
            error = exc if isinstance(exc, ChordError) else _caused(f'Callback error: {exc!r}', exc)
            logger.error('chord %s fails: %s', group_id, error)
            self.chord_error_from_stack(body, error)
        self._done(group_id, chord)

    def _done(self, group_id: str, chord: Document) -> None:
        # Who was so slow that somebody else took over leaves the form of the results to him.
        if self.chords.done(group_id, chord) and chord.get('nested'):
            self.delete_group(group_id)

    def _join(self, group_id: str, chord: Document) -> list[Any]:
        """Return the results of a chord's parts; *raises* `ChordError` if one has failed."""
        parts = self.chords.parts(group_id, ordered=self.options.result_chord_ordered)
        if len(parts) < size_of(chord):  # in a cluster, a node may be behind the one that has counted them
            raise ServerUnavailable(
                f'{self.store.client.address.url}: only {len(parts)} parts of a chord of {size_of(chord)}'
            )
        docs = self._stored([part['task_id'] for part in parts if 'value' not in part])
        results = [self._result(part, docs) for part in parts]
        if not chord.get('nested'):
            return results
        group = GroupResult.restore(group_id, backend=self, app=self.app)
        if group is None:
            raise ChordError(f'GroupResult {group_id} no longer exists')
        found = dict(zip((part['task_id'] for part in parts), results, strict=True))
        # Celery 5.4 counts a group at the end of a chain as one part: those that it did not count are waited for.
        uncounted = {node.id for node in tasks_in(group)} - found.keys()
        for task_id, meta in self.await_results(uncounted, self.app.conf.result_chord_join_timeout):
            found[task_id] = _value(task_id, meta['status'], meta['result'])
        return _formed(group, found)

    def _stored(self, task_ids: list[str]) -> dict[str, Document | None]:
        """Return the documents of results, None for those that are gone; *raises* `ServerUnavailable` if some are yet to come.

        A part may be seen before the result that was stored with it: they are in shards of their own, and the result may be in
        conflict with an earlier state of its task.
        """
        keys = {task_id: self.get_key_for_task(task_id) for task_id in task_ids}
        docs: dict[str, Document | None] = {}
        late = task_ids
        for pause in (0.0, LAG):
            time.sleep(pause)  # not for an event: nobody tells of the other shard
            docs.update(zip(late, self.store.read_many(keys[task_id] for task_id in late), strict=True))
            gone = self.store.known([keys[task_id] for task_id in late if docs[task_id] is None])
            late = [task_id for task_id in late if keys[task_id] not in gone and not is_final(docs[task_id] or {})]
            if not late:
                return docs
        raise ServerUnavailable(
            f'{self.store.client.address.url}: the results of {len(late)} parts of a chord are yet to come'
        )

    def _result(self, part: Document, found: dict[str, Document | None]) -> Any:
        task_id, state = part['task_id'], part['state']
        if 'value' in part:
            result = self.decode(unpack(part['value']))['result']
        else:
            doc = found[task_id]
            if doc is None:
                raise ChordError(f'The result of dependency {task_id} is gone')
            state, result = doc['status'], self.decode(unpack(doc))['result']
        return _value(task_id, state, self.exception_to_python(result) if state in states.EXCEPTION_STATES else result)


def _value(task_id: str, state: str, result: Any) -> Any:
    if state in states.PROPAGATE_STATES:
        raise _caused(f'Dependency {task_id} raised {result!r}', result)
    return result


def _formed(group: ResultSet, found: dict[str, Any]) -> list[Any]:
    """Return what was found by the ids of tasks in the form of a group: one within it is a list of its own."""
    return [_formed(node, found) if isinstance(node, ResultSet) else found[node.id] for node in group.results]


def _caused(message: str, cause: Any) -> ChordError:
    error = ChordError(message)
    error.__cause__ = cause if isinstance(cause, BaseException) else None
    return error
