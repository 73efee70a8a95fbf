"""The Celery result backend for Apache CouchDB: each result is one document, which a person can read there.

What Celery asks of a backend is here; how a document looks is in `documents`, what is asked of the server in `store`, how
waiting is done in `waiting`, what ends a chord in `chords.completion`, and how results expire in `expiry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from celery import signals, states
from celery._state import task_join_will_block
from celery.backends.base import BaseKeyValueStoreBackend
from celery.utils.serialization import UnpickleableExceptionWrapper
from kombu.utils.encoding import bytes_to_str

from kombu_couchdb.couchdb.conflicts import ConflictResolver
from kombu_couchdb.couchdb.fork_safety import reset_in_child
from kombu_couchdb.couchdb.redaction import redacted
from kombu_couchdb.design import conflicted
from kombu_couchdb.errors import RETRIED, AccessDenied, DatabaseMissing, NotFound
from kombu_couchdb.log import get_logger

from . import brevity, expiry, redaction, startup
from .chords.completion import ChordMixin
from .chords.counter import Chords
from .options import Options
from .results.address import address_of
from .results.conflict_rules import RULES
from .results.documents import Document, delivery_of, is_final, pack, stamp, unpack
from .results.store import ResultTooLarge
from .waiting.callbacks import Callbacks
from .waiting.mixin import PushMixin
from .waiting.read_ahead import ReadAhead
from .waiting.subscriber import Subscriber

__all__ = ['CouchDBBackend', 'ResultTooLarge']

redaction.install()

logger = get_logger(__name__)

#: A pool with so many children stores their results through its parent (see `prefork_relay`). Measured on two cores, tasks that
#: do nothing, with and without: 4 children 151 and 154 a second, 8 children 197 and 171, 16 children 254 and 188.
_MANY_CHILDREN = 6

#: How long a chord is left alone, in seconds, before it is taken for one whose worker is gone.
_PATIENCE = 30.0


class CouchDBBackend(ChordMixin, PushMixin, BaseKeyValueStoreBackend):
    """Results and saved groups in one CouchDB database. *Every* method raises the errors of `kombu_couchdb.errors`."""

    key_t = bytes_to_str
    supports_autoexpire = True
    supports_failure_expires = True
    supports_native_join = True
    supports_result_compression = True

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        # A prefix that CouchDB would refuse is refused before the base class uses it.
        self.options = Options.of(app.conf.get('result_backend_transport_options') or {})
        super().__init__(app, url=url, **kwargs)
        # One backend for all threads, whatever result_backend_thread_safe says.
        self.thread_safe = True
        conf = self.app.conf
        failures = conf.get('result_failure_expires')
        self.failure_expires = self.expires if failures is None else self.prepare_expires(failures)
        self.reader = Subscriber.of(
            address_of(url or 'couchdb://', self.options.credentials, self.options.auth), self.options
        )
        self.store, self.client = self.reader.store, self.reader.store.client
        self.callbacks = Callbacks(self.reader, self.get_key_for_task, self.decode_document, self.meta_from_decoded)
        self.ahead = ReadAhead(self.store, self.callbacks.following)
        self.chords = Chords(
            self.store,
            self.chord_keyprefix,
            self._chord_lifetime(),
            max(_PATIENCE, 2 * (conf.result_chord_join_timeout or 0.0)),
        )
        self.resolver = ConflictResolver(self.client, conflicted(), RULES)
        self.sweeper = expiry.Sweeper(self._sweep, self.options.sweep_interval)
        self.forked = self.checked = False
        signals.worker_ready.connect(self._on_worker_ready)
        signals.worker_shutdown.connect(self._on_worker_shutdown)
        signals.worker_before_create_process.connect(self._on_before_create_process)
        reset_in_child(self)

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), 'expires': self.expires, 'url': self.url})

    def as_uri(self, include_password: bool = False) -> str:
        """Return the URL, or the list of them, without passwords unless they are asked for."""
        return (self.url or '') if include_password else redacted(self.url or '')

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Tell Celery what the setting `result_backend_always_retry` covers."""
        return isinstance(exc, RETRIED)

    def reset(self) -> None:
        """Start over, after a fork: threads, and whoever waits for a result, are the parent's."""
        self.forked = True
        self.callbacks.reset()
        self.store.relay.reset()
        self.sweeper.reset()

    # -- what Celery's base class needs of a store

    def get(self, key: str | bytes) -> str | bytes | None:
        """Return the encoded value of a key, None if there is none; one request."""
        return unpack(self.store.read(bytes_to_str(key)))

    def mget(self, keys: Iterable[str | bytes]) -> list[str | bytes | None]:
        """Return the encoded values of keys, in their order; a request for each 250."""
        return [unpack(doc) for doc in self.store.read_many(bytes_to_str(key) for key in keys)]

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Store an encoded value, over any other."""
        doc_id = bytes_to_str(key)
        kind = 'Group' if doc_id.startswith(self.group_keyprefix) else 'Value'
        # A saved group may be what a chord's results are joined by. Values are other people's, and theirs to delete.
        lifetime = self._chord_lifetime() if kind == 'Group' else None
        self._write({'_id': doc_id, 'type': kind, 'status': None, **pack(value, self.content_type)}, lifetime)

    def delete(self, key: str | bytes) -> None:
        """Delete a key, if it exists; two requests."""
        self.ahead.drop()
        self.store.delete(bytes_to_str(key))

    def get_many(
        self,
        task_ids: Iterable[str],
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,
        on_message: Callable[..., Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
        max_iterations: int | None = None,
        READY_STATES: frozenset[str] = states.READY_STATES,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield `(task id, meta)` of results as they become ready; with `max_iterations`, of those that are."""
        if max_iterations or READY_STATES != states.READY_STATES:
            yield from super().get_many(
                task_ids, timeout, interval, no_ack, on_message, on_interval, max_iterations, READY_STATES
            )
            return
        for task_id, meta in self.await_results(
            set(map(bytes_to_str, task_ids)), timeout, interval, on_message, on_interval
        ):
            if meta['status'] == states.SUCCESS:  # a failure may give way to a newer delivery's result
                self._cache[task_id] = meta
            yield task_id, meta

    def store_result(
        self, task_id: Any, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store the result of a task, as Celery does.

        If CouchDB refuses what a worker stores, that is one line in its log. Not so for a part of a chord: Celery takes it for
        failed then, and a chord that lacks it can end.
        """
        try:
            return super().store_result(task_id, result, state, traceback, request=request, **kwargs)
        except AccessDenied as exc:
            if request is None or getattr(request, 'chord', None):
                raise
            logger.error('the result of %s[%s] (%s) is lost: %s', getattr(request, 'task', None), task_id, state, exc)
            return result

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        return self.decode_document(self.ahead.read(self.get_key_for_task(task_id)))

    def _store_result(
        self, task_id: Any, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        if task_join_will_block() and not self.forked:
            self.sweeper.start()  # a worker that made its backend only now; those of a pool's children have a parent
        # The base class reads the state, decides and writes: two requests, and a gap for another writer in between.
        task_id = bytes_to_str(task_id)
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta['task_id'] = task_id
        doc = {
            '_id': self.get_key_for_task(task_id),
            'type': 'Result',
            'status': state,
            'task': getattr(request, 'task', None),
            **pack(self.encode(meta), self.content_type),
        }
        if delivery := delivery_of(request, task_id):
            doc['delivery'] = delivery
        lifetime = self.failure_expires if state == states.FAILURE else self.expires
        part: Document | None = None
        if is_final(doc) and getattr(request, 'chord', None):
            chord = self._chord_lifetime()
            lifetime = max(lifetime, chord) if lifetime and chord else None
            part = self.chord_part(request, task_id, state, result)
        self._write(doc, lifetime, final_stays=True, also=part)
        return result

    def forget(self, task_id: str) -> None:
        """Delete a result; its callbacks will not be called."""
        self.callbacks.forget(task_id)
        super().forget(task_id)

    # -- expiry

    def cleanup(self) -> None:
        """Delete what has expired, now; it is what the task `celery.backend_cleanup` does."""
        self._sweep(lambda: False)

    def _sweep(self, is_over: Callable[[], bool]) -> None:
        try:
            unfinished = expiry.sweep(self.store, self.chords, is_over)
        except (NotFound, DatabaseMissing):
            self.store.set_up()
            unfinished = expiry.sweep(self.store, self.chords, is_over)
        self.end_unfinished_chords(unfinished)
        self.resolver.resolve_if_due()

    def _on_worker_ready(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self.app:
            brevity.shorten_log()
            if not self.checked:
                startup.check(self)
                self.checked = True  # what is refused later does not end a worker that is at work
            import_module('celery_couchdb.control')
            import_module('celery_couchdb.parcels.worker').start(self.app)
            self.sweeper.start()

    def _on_before_create_process(self, sender: Any = None, **_: Any) -> None:
        if getattr(sender, '_processes', 0) >= _MANY_CHILDREN:
            self.store.relay.open()

    def _on_worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self.app:
            self.sweeper.stop()

    # -- ours

    def decode_document(self, doc: Document | None) -> dict[str, Any]:
        """Return the meta-data in the document of a result; without one, or if it holds nothing, those of a pending task."""
        payload = unpack(doc)
        meta: dict[str, Any] = self.decode_result(payload) if payload else {'status': states.PENDING, 'result': None}
        return meta

    def exception_to_python(self, exc: Any) -> Any:
        """Return the exception in a failed result, made of what is stored.

        One that is no `Exception`, such as `SystemExit`, would end the process that asks for it, and whoever may write
        results could name it: it is wrapped as Celery wraps those that it cannot encode.
        """
        found = super().exception_to_python(exc)
        if isinstance(found, BaseException) and not isinstance(found, Exception):
            return UnpickleableExceptionWrapper.from_exception(found)
        return found

    def _chord_lifetime(self) -> float | None:
        """Return how long a chord's results are kept at least: Celery's 5.7 has a setting for that."""
        chord = self.app.conf.get('result_chord_expires')
        chord = self.expires if chord is None else self.prepare_expires(chord)
        return max(chord, self.expires) if chord and self.expires else None

    def _write(
        self, doc: Document, lifetime: float | None, *, final_stays: bool = False, also: Document | None = None
    ) -> None:
        self.ahead.drop()
        self.store.write(stamp(doc, self.client.clock.now(), lifetime), final_stays=final_stays, also=also)
