"""Stored results of a Celery app, as operators read them: that of one task, and the progress of its chord."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from celery import states

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import ConfigurationError, DatabaseMissing
from kombu_couchdb.log import get_logger
from kombu_couchdb.values import is_number

from .backend import CouchDBBackend
from .chords.counter import is_sound, size_of
from .connections import backend_of
from .results.documents import error_text, is_expired, unpack

logger = get_logger(__name__)

#: The maximum number of results that `complete` reads.
_MAX_CANDIDATES = 200

#: The tasks of a chord are counted in a request with a row for each.
_MAX_COUNTED_PARTS = 1000


@dataclass(frozen=True)
class StoredResult:
    """The result of a task, or its state before. Members are None if they are unknown."""

    id: str
    task: str | None
    state: str
    #: When the result was stored, in seconds since the epoch.
    date: float | None
    #: The type and the text of the exception, if the state has one.
    error: str | None
    #: The return value, or the meta-data of a custom state, if the state has no exception.
    result: Any
    traceback: str | None
    #: The members below are stored only with `result_extended = True`.
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    #: The routing key of the task's message: the name of its queue, unless it was sent to another exchange.
    queue: str | None
    worker: str | None
    retries: int | None
    #: Celery's meta-data, and the document of the result.
    meta: Mapping[str, Any] = field(repr=False)
    document: Document = field(repr=False)

    def described(self) -> dict[str, Any]:
        """Return all members but meta-data and document, for JSON."""
        found = asdict(self)
        del found['document'], found['meta']
        return found


class StoredResults:
    """The results of an app. *Every* method raises the errors of `kombu_couchdb.errors`.

    If the database does not exist yet, there are no results.
    """

    def __init__(self, app: Any, client: Client | None = None) -> None:
        """Use `client`, or create one for the app's database of results.

        *Raises* `ConfigurationError` if the result backend of the app is not CouchDB.
        """
        if not isinstance(backend_of(app), CouchDBBackend):
            raise ConfigurationError(
                'the result backend of this app is not CouchDB: set result_backend to couchdb://…, '
                'or name the app with celery -A'
            )
        self.backend = app.backend
        self.client = client or app.backend.store.client

    def get(self, task_id: str) -> StoredResult | None:
        """Return the result of a task, or None if none is stored; one request."""
        with self._existing():
            return next(self._valid(self.client.find([self.backend.get_key_for_task(task_id)])), None)
        return None

    def complete(self, start: str) -> list[StoredResult]:
        """Return up to 200 results of tasks whose ids begin with `start`, by id; one request."""
        prefix = self.backend.get_key_for_task(start)
        with self._existing():
            return list(
                self._valid(row['doc'] for row in self.client.id_range(prefix, docs=True, limit=_MAX_CANDIDATES))
            )
        return []

    @contextmanager
    def _existing(self) -> Iterator[None]:
        """Ignore that the database does not exist: then nothing is stored yet."""
        try:
            yield
        except DatabaseMissing as exc:
            logger.info('there are no results: %s', exc)

    def _valid(self, docs: Iterable[Document | None]) -> Iterator[StoredResult]:
        now = self.client.clock.now()
        return (self.of(doc) for doc in docs if doc and not is_expired(doc, now))

    def chord_progress(self, group_id: str) -> tuple[int, int] | None:
        """Return how many tasks of an unfinished chord have ended, and how many it has; two requests.

        None if there is no such chord, its size is not known yet, or it has too many tasks to count them here.
        """
        chord_id = self.backend.get_key_for_chord(group_id)
        chord = self.client.get_or_none(chord_id)
        if chord is None or not is_sound(chord) or (size := size_of(chord)) > _MAX_COUNTED_PARTS:
            return None
        return len(self.client.id_range(f'{chord_id}:part:', limit=size)), size

    def of(self, doc: Document) -> StoredResult:
        """Return what a document of the database of results says."""
        error = None
        try:
            meta = self.backend.decode(unpack(doc))
            meta = meta if isinstance(meta, dict) else {}
        except Exception as exc:  # any serializer may have written it, and anybody may have changed it
            meta, error = {}, f'the result cannot be decoded: {exc}'
        state, result = str(doc.get('status')), meta.get('result')
        if state in states.EXCEPTION_STATES:
            error, result = error or error_text(result), None
        args, kwargs, date = meta.get('args'), meta.get('kwargs'), doc.get('date')
        return StoredResult(
            id=doc['_id'].removeprefix(self.backend.key_t(self.backend.task_keyprefix)),
            task=_text(meta.get('name')) or _text(doc.get('task')),
            state=state,
            date=float(date) if is_number(date) else None,
            error=error,
            result=result,
            traceback=_text(meta.get('traceback')),
            args=[*args] if isinstance(args, (list, tuple)) else None,
            kwargs=kwargs if isinstance(kwargs, dict) else None,
            queue=_text(meta.get('queue')),
            worker=_text(meta.get('worker')),
            retries=meta['retries'] if isinstance(meta.get('retries'), int) else None,
            meta=meta,
            document=doc,
        )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
