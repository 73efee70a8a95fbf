"""Stored results of a Celery app by state: list what failed, and send failed tasks again.

The views in `celery_couchdb.design` find the results. CouchDB brings their index up to date when it is read, so the
first read after many new results takes long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from celery import states
from kombu.exceptions import KombuError

from kombu_couchdb.admin.jobs import paged
from kombu_couchdb.couchdb.client import LAST, Client, Document
from kombu_couchdb.couchdb.shapes import items, members, number
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.documents.ids import QUEUE
from kombu_couchdb.errors import ConfigurationError, CouchDBError

from . import design
from .backend import CouchDBBackend
from .jobs import backend_of, client_of
from .results.documents import error_text, is_expired, pack, unpack

#: How long a request may take. Reading a view first brings its index up to date, which may take long.
_REQUEST_SECONDS = 120.0

#: The shapes of the rows of the views, and of their reductions.
_ROW, _COUNT = members(key=items(lambda part: True)), members(value=number)


class NotSent(ValueError):
    """A failed task was not sent again. The text is one sentence that says why."""


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
    #: The document of the result.
    document: Document = field(repr=False)

    def described(self) -> dict[str, Any]:
        """Return all members but the document, for JSON."""
        found = asdict(self)
        del found['document']
        return found


class StoredResults:
    """The results of an app. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, app: Any, client: Client | None = None) -> None:
        """Use `client`, or create one for the app's database of results.

        *Raises* `ConfigurationError` if the result backend of the app is not CouchDB.
        """
        if not isinstance(backend_of(app), CouchDBBackend):
            raise ConfigurationError(
                'the result backend of this app is not CouchDB: set result_backend to couchdb://…, '
                'or name the app with celery -A'
            )
        self.app, self._backend = app, app.backend
        self.client = client or Client(app.backend.store.client.address, _REQUEST_SECONDS)
        self._queues: dict[str, bool] = {}  # whether queues exist, by name

    def listing(
        self, state: str = states.FAILURE, *, task: str | None = None, since: float | None = None
    ) -> Iterator[StoredResult]:
        """Yield the results with this state, the newest first, in batches that are read when they are needed.

        `task` is the name of a task, `since` a date in seconds since the epoch. You may retry results while you
        iterate.
        """
        view, oldest, newest = _range(state, task, since)
        where = {'startkey': newest, 'endkey': oldest, 'descending': True, 'reduce': False, 'include_docs': True}
        for row in paged(self.client, design.NAME, view, _ROW, **where):
            doc = row['doc']
            if doc and doc.get('status') == state and not is_expired(doc, self.client.clock.now()):
                yield self.of(doc)

    def count(self, state: str = states.FAILURE, *, task: str | None = None, since: float | None = None) -> int:
        """Return the number of results that `listing` yields. Expired results that are not deleted yet count, too."""
        view, oldest, newest = _range(state, task, since)
        rows = self.client.view(design.NAME, view, _COUNT, startkey=oldest, endkey=newest)
        return int(rows[0]['value']) if rows else 0

    def get(self, task_id: str) -> StoredResult | None:
        """Return the result of a task, or None if none is stored."""
        doc = self.client.get_or_none(self._backend.get_key_for_task(task_id))
        return None if doc is None or is_expired(doc, self.client.clock.now()) else self.of(doc)

    def retry(self, result: StoredResult, *, queue: str | None = None) -> None:
        """Send a failed task again, with its id and its arguments, to its queue or to `queue`.

        The state of the result becomes `RETRY` until the task runs. Only the task itself is sent: the chain, the chord
        or the callbacks that it was part of have ended with its failure. If this process is killed meanwhile, the
        result is still a failure, and another call does the rest: the task is sent once for each failure. *Raises*
        `NotSent` if the task has not failed, if its arguments are unknown, if another process has changed the result,
        or if the task cannot be sent.
        """
        name, args, kwargs, doc = result.task, result.args, result.kwargs, result.document
        if result.state != states.FAILURE:
            raise NotSent(f'its state is {result.state}: only failed tasks can be sent again')
        if name is None or args is None or kwargs is None:
            raise NotSent(
                'its arguments are not stored: set result_extended = True in the app of the workers, and tasks that '
                'fail from then on can be sent again'
            )
        queue = queue or (result.queue if result.queue and self._exists(result.queue) else None)
        failed = {name: value for name, value in doc.items() if name != 'delivery'}
        # Without a delivery, any later result replaces this one.
        rev = self.client.try_put(failed) if 'delivery' in doc else doc['_rev']
        if rev is None:
            raise NotSent('another process changed its result just now')
        try:
            with idempotent(f'{doc["_id"]} {doc.get("date")}'):
                task = self.app.signature(name, args=args, kwargs=kwargs)
                task.apply_async(task_id=result.id, **({'queue': queue} if queue else {}))
        except (KombuError, CouchDBError, TypeError, ValueError, LookupError) as exc:
            raise NotSent(f'it cannot be sent: {exc}') from exc
        # A conflict means that the task has run already.
        self.client.try_put({**self._waiting(failed), '_rev': rev})

    def _waiting(self, doc: Document) -> Document:
        """Return a failed result with the state `RETRY`."""
        meta = {**self._backend.decode(unpack(doc)), 'status': states.RETRY, 'date_done': None}
        kept = {name: value for name, value in doc.items() if name not in ('value', 'base64', 'content_type')}
        packed = pack(self._backend.encode(meta), self._backend.content_type)
        return {**kept, 'status': states.RETRY, 'date': self.client.clock.now(), **packed}

    def _exists(self, queue: str) -> bool:
        """Tell whether a queue has this name. The app may be configured with it, or any process have declared it."""
        if queue not in self._queues:
            try:
                self._queues[queue] = queue in self.app.amqp.queues or bool(
                    client_of(self.app).find([QUEUE + queue])[0]
                )
            except ConfigurationError:
                self._queues[queue] = False  # another broker
        return self._queues[queue]

    def of(self, doc: Document) -> StoredResult:
        """Return what a document of the database of results says."""
        error = None
        try:
            meta = self._backend.decode(unpack(doc))
            meta = meta if isinstance(meta, dict) else {}
        except Exception as exc:  # any serializer may have written it, and anybody may have changed it
            meta, error = {}, f'the result cannot be decoded: {exc}'
        state, result = str(doc.get('status')), meta.get('result')
        if state in states.EXCEPTION_STATES:
            error, result = error or error_text(result), None
        args, kwargs, date = meta.get('args'), meta.get('kwargs'), doc.get('date')
        return StoredResult(
            id=doc['_id'].removeprefix(self._backend.key_t(self._backend.task_keyprefix)),
            task=_text(meta.get('name')) or _text(doc.get('task')),
            state=state,
            date=float(date) if isinstance(date, (int, float)) else None,
            error=error,
            result=result,
            traceback=_text(meta.get('traceback')),
            args=[*args] if isinstance(args, (list, tuple)) else None,
            kwargs=kwargs if isinstance(kwargs, dict) else None,
            queue=_text(meta.get('queue')),
            worker=_text(meta.get('worker')),
            retries=meta['retries'] if isinstance(meta.get('retries'), int) else None,
            document=doc,
        )


def _range(state: str, task: str | None, since: float | None) -> tuple[str, list[Any], list[Any]]:
    """Return the name of a view, and the first and the last key of its rows for this state, task and date."""
    first = [state] if task is None else [task, state]
    return 'by_state' if task is None else 'by_task', [*first, *([] if since is None else [since])], [*first, LAST]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
