"""The Celery result backend for Apache CouchDB: each result is one document that people can read.

This module implements Celery's interface of a backend. `results.documents` defines the documents,
`results.result_store` the requests to the server, `waiting` waits for results, `chords.completion` ends chords, and
`worker` has what only workers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from celery import signals, states
from celery._state import get_current_task, task_join_will_block
from celery.app.task import Context
from celery.exceptions import BackendStoreError
from celery.utils.serialization import UnpickleableExceptionWrapper
from kombu.utils.encoding import bytes_to_str
from kombu.utils.functional import retry_over_time

from kombu_couchdb.couchdb.address import Address, redacted
from kombu_couchdb.couchdb.call import seconds_left
from kombu_couchdb.couchdb.conflicts import ConflictResolver
from kombu_couchdb.couchdb.fork_safety import reset_in_child
from kombu_couchdb.design import conflicted
from kombu_couchdb.errors import RETRIED, AccessDenied, CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.log import get_logger
from kombu_couchdb.queues.quarantine import Harmful

from .chords.completion import ChordMixin
from .chords.counter import LAG_SECONDS, Chords
from .patches import output, results, workers
from .results.documents import (
    RULES,
    ChordPart,
    Document,
    Result,
    delivery_of,
    is_final,
    pack,
    stamp,
    unpack,
)
from .results.result_store import ResultTooLarge, settings_of
from .waiting.callbacks import Callbacks
from .waiting.mixin import PushMixin
from .waiting.read_ahead import ReadAhead
from .waiting.subscriber import Subscriber
from .worker import expiry, startup
from .worker.handover import HandOver

__all__ = ['CouchDBBackend', 'ResultTooLarge']

for patch in (output, results, workers):
    patch.install()

logger = get_logger(__name__)

#: Whether the current thread stores the result of a task.
_stores: ContextVar[bool] = ContextVar('stores', default=False)

#: The request whose headers say where a failure is stored that the current thread stores for tasks that were not sent.
_failing: ContextVar[Any] = ContextVar('failing', default=None)

#: How long a chord is unchanged, at least, before another worker ends it, because its own worker may be lost.
_MIN_CHORD_PAUSE_SECONDS = 30.0


@contextmanager
def _failure_of(request: Any) -> Iterator[None]:
    token = _failing.set(request)
    try:
        yield
    finally:
        _failing.reset(token)


class CouchDBBackend(ChordMixin, PushMixin):
    """Stores results and saved groups in one CouchDB database.

    *Every* method raises the errors of `kombu_couchdb.errors`. One instance serves all threads of a process, and is
    reset in a forked child.
    """

    key_t = bytes_to_str
    supports_autoexpire = True
    supports_failure_expires = True
    supports_native_join = True
    supports_result_compression = True

    def __init__(self, app: Any, url: str | None = None, *, address: Address | None = None, **kwargs: Any) -> None:
        # Check the options first: the base class uses the prefix, which CouchDB might refuse.
        self.options, own = settings_of(app.conf, url)
        address = address or own
        super().__init__(app, url=url, **kwargs)
        # All threads share this backend, whatever result_backend_thread_safe says.
        self.thread_safe = True
        conf = self.app.conf
        failures = conf.get('result_failure_expires')
        self.failure_expires = self.expires if failures is None else self.prepare_expires(failures)
        self.subscriber = Subscriber.of(address, self.options)
        self.store, self.client = self.subscriber.store, self.subscriber.store.client
        self.callbacks = Callbacks(self.subscriber, self.get_key_for_task, self.decode_document, self.meta_from_decoded)
        self.read_ahead = ReadAhead(self.store, self.callbacks.following, self.subscriber.cache)
        self.chords = Chords(
            self.store,
            self.chord_keyprefix,
            self._chord_lifetime(),
            max(_MIN_CHORD_PAUSE_SECONDS, 2 * (conf.result_chord_join_timeout or 0.0)),
        )
        self.handover = HandOver(self)
        self.resolver = ConflictResolver(self.client, conflicted(), RULES)
        self.sweeper = expiry.ExpirySweeper(self._sweep, self.options.sweep_interval)
        self._harmful = Harmful(self.client, lambda text, reason, now: None)
        self._is_fork = self._is_checked = False
        for signal in workers.READY:
            signal.connect(self._on_worker_ready)
        for signal in workers.SHUTDOWN:
            signal.connect(self._on_worker_shutdown)
        signals.worker_before_create_process.connect(self._on_before_create_process)
        reset_in_child(self)

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), 'expires': self.expires, 'url': self.url})

    def as_uri(self, include_password: bool = False) -> str:
        """Return the URL, or the list of URLs, with masked passwords unless `include_password` is true."""
        return (self.url or '') if include_password else redacted(self.url or '')

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Tell whether the setting `result_backend_always_retry` covers this error: only while a result is stored."""
        return isinstance(exc, RETRIED) and _stores.get()

    def reset(self) -> None:
        """Reset the state after a fork: threads and waiting callers exist in the parent process only."""
        self._is_fork = True
        self.callbacks.reset()
        self.sweeper.reset()

    # -- the key-value store that Celery's base class needs

    def get(self, key: str | bytes) -> str | bytes | None:
        """Return the encoded value of a key, or None if the key does not exist. One request."""
        return unpack(self.store.read(bytes_to_str(key)))

    def mget(self, keys: Iterable[str | bytes]) -> list[str | bytes | None]:
        """Return the encoded values of keys, in the same order. One request for every 250 keys."""
        return [unpack(doc) for doc in self.store.read_many(bytes_to_str(key) for key in keys)]

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Store an encoded value. An existing value is replaced."""
        doc_id = bytes_to_str(key)
        kind = 'Group' if doc_id.startswith(self.group_keyprefix) else 'Value'
        # A saved group expires, but not before the results of a chord that may be joined by it. Other values belong to
        # the program that stored them, and do not expire.
        lifetime = self._chord_lifetime() if kind == 'Group' else None
        doc = {'_id': doc_id, 'type': kind, 'status': None, **pack(value, self.content_type)}
        self.store.write(stamp(doc, self.client.clock.now(), lifetime))

    def delete(self, key: str | bytes) -> None:
        """Delete a key, if it exists. Two requests; more if it is a large result of a part of a chord."""
        doc_id = bytes_to_str(key)
        self.subscriber.drop(doc_id)
        self.store.delete(doc_id, self.keep_for_chord)
        self.subscriber.drop(doc_id)  # another thread may have read it meanwhile

    def store_result(
        self, task_id: Any, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store the result of a task, as Celery does.

        If a worker cannot store a state before the end of a task, the state is lost and the worker logs one line. The
        same holds for a result that CouchDB refuses for lack of rights. For a part of a chord that error is raised:
        Celery then counts the part as failed, so that the chord can end.
        """
        token = _stores.set(True)
        try:
            return super().store_result(task_id, result, state, traceback, request=request, **kwargs)
        except (CouchDBError, BackendStoreError) as exc:
            is_refused = isinstance(exc, AccessDenied) and not getattr(request, 'chord', None)
            if not getattr(request, 'hostname', None) or (state in states.READY_STATES and not is_refused):
                raise
            logger.error('the result of %s[%s] (%s) is lost: %s', getattr(request, 'task', None), task_id, state, exc)
            return result
        finally:
            _stores.reset(token)

    def mark_as_failure(
        self,
        task_id: Any,
        exc: Any,
        traceback: Any = None,
        request: Any = None,
        store_result: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Store the failure of a task and of the later steps of its chain, as Celery does."""
        if not store_result:
            self.handover.store_end(task_id, request, states.FAILURE, exc)
        with _failure_of(request or _failing.get()):
            return super().mark_as_failure(task_id, exc, traceback, request, store_result, *args, **kwargs)

    def chord_error_from_stack(self, callback: Any, exc: Any = None) -> Any:
        """Store the failure of the body of a chord, as Celery does."""
        with _failure_of(Context(headers=callback.options.get('headers'))):
            return super().chord_error_from_stack(callback, exc)

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        read = partial(self.read_ahead.read, self.get_key_for_task(task_id))
        if not self.always_retry or get_current_task() is None or (seconds := seconds_left()) <= 0:
            return self.decode_document(read())
        # A program learns of an outage at once. A task would fail for good because of a short one.
        seconds = min(seconds, self.options.request_timeout)
        return self.decode_document(
            retry_over_time(read, RETRIED, interval_start=0.1, interval_step=0.2, interval_max=1, timeout=seconds)
        )

    def _store_result(
        self, task_id: Any, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        if task_join_will_block() and not self._is_fork:
            # In a worker that creates its backend only now. The children of a pool do not sweep: their parent does.
            self.sweeper.start()
        # The base class would read the state and then write: two requests, between which another process may write.
        task_id = bytes_to_str(task_id)
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        doc = self.result_document(task_id, getattr(request, 'task', None), meta)
        if delivery := delivery_of(request, task_id):
            doc['delivery'] = delivery
        sender = _failing.get() or request
        lifetime = self.lifetime_of(state)
        part: ChordPart | None = None
        if is_final(doc) and getattr(request, 'chord', None):
            chord = self._chord_lifetime()
            lifetime = max(lifetime, chord) if lifetime and chord else None
            part = self.chord_part(request, task_id, state, result)
        doc = stamp(doc, self.client.clock.now(), lifetime)
        # First elsewhere: if it is too large there, Celery stores a failure in its place, here as well.
        is_here = self.handover.store_elsewhere(doc, task_id, request, sender)
        if part is not None and 'value' not in part:
            doc['part'] = part['_id']
        if (is_here or part) and not self.handover.hand_over(doc, request, part):
            self.store.write(doc, part, self.handover.shorter)
        self.subscriber.cache.drop(doc['_id'])
        return result

    def forget(self, task_id: str) -> None:
        """Delete a result. Its callbacks are not called."""
        self.callbacks.forget(task_id)
        super().forget(task_id)

    # -- expiry

    def cleanup(self) -> None:
        """Delete expired results now. The task `celery.backend_cleanup` calls this."""
        self._sweep(lambda: False)

    def _sweep(self, is_over: Callable[[], bool]) -> None:
        self._harmful.replace()
        try:
            unfinished = expiry.sweep(self.store, self.chords, is_over)
        except (NotFound, DatabaseMissing):
            self.store.database.set_up()
            try:
                unfinished = expiry.sweep(self.store, self.chords, is_over)
            except NotFound:  # the server, or another node of a cluster, may not show the new design document yet
                time.sleep(LAG_SECONDS)
                unfinished = expiry.sweep(self.store, self.chords, is_over)
        self.complete_unfinished_chords(unfinished)
        self.resolver.resolve_if_due()

    def _on_worker_ready(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self.app:
            if not self._is_checked:
                startup.check(self)
                self._is_checked = True  # the check can end a worker that starts, but not one that is working
            startup.prepare(self.app, getattr(sender, 'hostname', None))
            startup.start_services(sender)
            self.sweeper.start()
            if not self.options.confirm_results:
                self.handover.open(sender, serve_children=False)

    def _on_before_create_process(self, sender: Any = None, **_: Any) -> None:
        self.client.clock.now()  # the children inherit the server's time: none of them needs a connection to ask for it
        if not self.options.confirm_results:
            self.handover.open(serve_children=True)

    def _on_worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self.app:
            self.handover.close()
            self.sweeper.stop()

    # -- encoding, decoding and writing

    def result_document(self, task_id: str, task: str | None, meta: Mapping[str, Any]) -> Result:
        """Return the document of a result with Celery's meta-data."""
        payload = self.encode({**meta, 'task_id': task_id})
        doc: Result = {
            '_id': self.get_key_for_task(task_id),
            'type': 'Result',
            'status': meta['status'],
            'task': task,
            **pack(payload, self.content_type),  # type: ignore[typeddict-item]  # mypy expects other keys
        }
        return doc

    def error_document(self, task_id: str, task: str | None, error: Exception, state: str = states.FAILURE) -> Result:
        """Return the document of a task that has failed or was revoked without running: it has no traceback."""
        result = self.prepare_exception(error)
        meta = {'status': state, 'result': result, 'traceback': None, 'children': [], 'date_done': None}
        return self.result_document(task_id, task, meta)

    def lifetime_of(self, state: str) -> float | None:
        """Return how long results in this state are kept, in seconds; None if they do not expire."""
        found: float | None = self.failure_expires if state == states.FAILURE else self.expires
        return found

    def decode_document(self, doc: Document | None) -> dict[str, Any]:
        """Return Celery's meta-data in a result document; those of a pending task for None or an empty document."""
        payload = unpack(doc)
        meta: dict[str, Any] = self.decode_result(payload) if payload else {'status': states.PENDING, 'result': None}
        return meta

    def encode_result(self, result: Any, state: str) -> Any:
        """Return a result, or the exception of a task, as it is stored.

        Celery before 5.7 encodes an `Exception` only, and a `BaseException`, such as `asyncio.CancelledError`, cannot
        be stored as JSON.
        """
        is_error = state in self.EXCEPTION_STATES and isinstance(result, BaseException)
        return self.prepare_exception(result) if is_error else super().encode_result(result, state)

    def exception_to_python(self, exc: Any) -> Any:
        """Return the exception object for the stored exception of a failed result.

        An exception that Python ends programs with, such as `SystemExit`, is wrapped as Celery wraps exceptions that it
        cannot encode. Otherwise it would end the process that reads the result, and everybody with write access to the
        results could cause that.
        """
        found = super().exception_to_python(exc)
        is_harmful = isinstance(found, (SystemExit, KeyboardInterrupt, GeneratorExit))
        return UnpickleableExceptionWrapper.from_exception(found) if is_harmful else found

    def _chord_lifetime(self) -> float | None:
        """Return how long the results of a chord are kept at least, in seconds; None if they do not expire.

        Celery 5.7 has the setting `result_chord_expires` for that.
        """
        chord = self.app.conf.get('result_chord_expires')
        chord = self.expires if chord is None else self.prepare_expires(chord)
        return max(chord, self.expires) if chord and self.expires else None


def couchdb_backend_of(app: Any) -> CouchDBBackend | None:
    """Return the result backend of an app; None if it does not store results in CouchDB."""
    found = app.backend
    return found if isinstance(found, CouchDBBackend) else None
